"""Random programs and orders, sound and damaged: the checker finds a fault if and only if the walkers fail.

    python tests/schedule/agreement.py --cases 50000 --seed 0

What the checker passes, walkers complete with the loss and the gradients of one process, and nothing is left over. What
it finds a fault in makes a walker raise, makes all of them stand still, leaves something over, or gives other results.
`exchange` says under which model transfers complete. In two respects the checker asks for more: every member of a
transfer names its communicator, all members and the root as they are (`ADDRESSES`), of which a walker reads what it
needs; and no pass is repeated, also not in an evaluation, where a second forward does no harm.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache

from damage import (
    TO_BOTH,
    TO_PROGRAMS,
    Damage,
    Rows,
    change_communicator,
    change_members,
    change_root,
    count_cases,
    insert,
)
from random_programs import MODES_OF_ROWS, random_program
from schedule_oracle import random_costs
from walked import walk

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    SHARING,
    Order,
    Placement,
    Program,
    add_communication,
    add_sharding,
    check_order,
    check_program,
    evaluation_program,
    plan_program,
)

DAMAGED_ALIKE = 8
"""Cases that begin with the same program."""
ADDRESSES = (change_members, change_root, change_communicator)


@dataclass(frozen=True, slots=True)
class Case:
    """What is looked at, and what was done to it."""

    schedule: Order | Program
    damage: tuple[Damage, ...]
    seed: int

    @property
    def name(self) -> str:
        """By which cases are counted."""
        what = "program" if isinstance(self.schedule, Program) else "order"
        damage = [one.__name__ for one in self.damage] or ["as it is"]
        return f"{what}, {damage[0] if len(damage) == 1 else 'two damages'}"


def case_of(seed: int) -> Case:
    """The case of that number."""
    rng = random.Random(seed)
    program = sound_program(seed // DAMAGED_ALIKE)
    schedule = program if rng.random() < 0.7 else program.order
    possible = TO_PROGRAMS if isinstance(schedule, Program) else TO_BOTH
    damage = tuple(rng.choice([*possible, insert]) for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 1, 2])))
    rows: Rows = [[item for item in row if item is not None] for row in schedule.rows]
    for one in damage:
        if any(rows):
            one(rng, rows)
    return Case(replace(schedule, rows=tuple(map(tuple, rows))), damage, seed)


@lru_cache(maxsize=1)
def sound_program(seed: int) -> Program:
    """Of up to three devices: what a schedule with a name makes, or anything that dependencies allow; for one replica
    or several."""
    rng = random.Random(seed)
    program = _program_of_one_replica(rng)
    if rng.random() < 0.5:
        return program
    return add_sharding(
        program,
        gathers=rng.random() < 0.7,
        tied=False,
        reshard=rng.random() < 0.6,
        prefetch=rng.choice([None, 0, 1, 2]),
    )


def _program_of_one_replica(rng: random.Random) -> Program:
    devices, microbatches, evaluates = rng.randint(1, 3), rng.choice([1, 1, 2, 2, 3, 4]), rng.random() < 0.2
    if rng.random() < 0.3:
        name, mode, sharing = rng.choice(list(SCHEDULES)), rng.choice(MODES), rng.choice(SHARING)
        try:
            order, program = plan_program(name, devices, microbatches, mode, sharing=sharing)
            return evaluation_program(order, sharing=sharing) if evaluates else program
        except InputError:  # not made for this size
            pass
    stages = devices + rng.choice([0, 0, 1, 2])
    table = [*range(devices), *(rng.randrange(devices) for _ in range(stages - devices))]
    rng.shuffle(table)
    mode = rng.choice(MODES_OF_ROWS)
    return random_program(rng, Placement(devices, tuple(table)), microbatches, mode, evaluates)


def judged(seed: int) -> tuple[str, str, str]:
    """A case by its number: name, outcome, and how the checker and the walkers disagree, or ""."""
    case = case_of(seed)
    schedule, failure = case.schedule, None
    report = check_program(schedule) if isinstance(schedule, Program) else check_order(schedule)
    try:
        if isinstance(schedule, Order):
            rng = random.Random(case.seed)
            schedule = add_communication(schedule, random_costs(case.seed, schedule.placement), rng.choice(SHARING))
            if report.ok:
                check_program(schedule).raise_if_faulty()
        walk(schedule, case.seed)
    except Exception as error:  # whatever it is: a walker that is given an unsound program may stumble over anything
        failure = error
    if report.ok == (failure is None):
        return case.name, "sound" if report.ok else "faulty", ""
    repeated = case.schedule.forward_only and all("is already at" in fault.message for fault in report.faults)
    if not report.ok and (repeated or any(one in ADDRESSES for one in case.damage)):
        return case.name, "stricter", ""
    return case.name, "disagree", f"{failure!r}, {[fault.message for fault in report.faults]}"


if __name__ == "__main__":
    count_cases(__doc__, judged)
