"""Random programs and orders, sound and damaged: the checker finds a fault if and only if the walkers fail.

    python tests/schedule/agreement.py --cases 50000 --seed 0

What the checker passes, walkers complete with the loss and the gradients of one process, and nothing is left over. What
it finds a fault in makes a walker raise, makes all of them stand still, leaves something over, or gives other results.
`exchange` says under which model transfers complete. In one respect the checker asks for more (`ADDRESSES`): every
member of a transfer names its communicator, all members and the root as they are. A walker reads what it needs of them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from damage import TO_BOTH, TO_PROGRAMS, Damage, Rows, change_communicator, change_members, change_root, insert
from schedule_oracle import random_costs
from walked import walk

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    SHARING,
    Dependencies,
    Item,
    Kind,
    Order,
    Pass,
    Placement,
    Program,
    Route,
    add_communication,
    add_sharding,
    check_order,
    check_program,
    evaluation_program,
    plan_program,
)
from evenpipe.schedule.flows import vocabulary_kinds

Node = tuple[int, Pass] | tuple[Route, int]
"""A pass and its device, or a transfer by its route and microbatch."""

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
    return random_program(rng, Placement(devices, tuple(table)), microbatches, rng.choice([0, 1, 2]), evaluates)


def random_program(
    rng: random.Random, placement: Placement, microbatches: int, barriers: int, forward_only: bool
) -> Program:
    """Passes and transfers one after the other, each when chance will have it, once what it needs is there."""
    sharing = rng.choice(SHARING)
    dependencies = Dependencies(placement, barriers, forward_only, sharing)
    passes = dict.fromkeys(random_passes(rng, placement, microbatches, barriers, forward_only))
    needs: dict[Node, list[Node]] = {(route, i): [] for route in dependencies.routes for i in range(microbatches)}
    for device, item in passes:
        rule, i = dependencies.rule(device, item.kind, item.stage), item.microbatch
        assert i is not None
        own = [(device, Pass(kind, stage, i)) for kind, stage in (*rule.after, *rule.if_present)]
        own += [(device, replace(one, kind=Kind.I)) for _, one in own if one.kind is Kind.B]
        needs[device, item] = [*(one for one in own if one in passes), *((route, i) for route in rule.uses)]
        for route in rule.feeds:
            needs[route, i].append((device, item))
    followers: dict[Node, list[Node]] = {node: [] for node in needs}
    for node, needed in needs.items():
        for one in needed:
            followers[one].append(node)
    missing = {node: len(needed) for node, needed in needs.items()}
    ready = [node for node, count in missing.items() if not count]
    rows: list[list[Item]] = [[] for _ in range(placement.devices)]
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        match node:
            case int(device), Pass() as item:
                rows[device].append(item)
            case Route() as route, int(i):
                for device in route.members:
                    rows[device].append(route.transfer(device, i))
        for one in followers[node]:
            missing[one] -= 1
            if not missing[one]:
                ready.append(one)
    assert not any(missing.values())
    return Program(placement, microbatches, tuple(map(tuple, rows)), barriers, forward_only, sharing=sharing)


def random_passes(
    rng: random.Random, placement: Placement, microbatches: int, barriers: int, forward_only: bool
) -> Iterator[tuple[int, Pass]]:
    """All passes, each with its device: backwards whole and split, some forwards twice, some activations moved."""
    split, again, moved = rng.choice([0.0, 0.5, 1.0]), rng.random() / 2, rng.random() / 2
    for i in range(microbatches):
        for device in range(placement.devices):
            for kind in sorted(vocabulary_kinds(barriers, forward_only)):
                yield device, Pass(kind, None, i)
        for stage, device in enumerate(placement.stage_device):
            kinds = [Kind.F]
            if not forward_only:
                kinds += [Kind.I, Kind.W] if rng.random() < split else [Kind.B]
                kinds += [Kind.R] if rng.random() < again else []
                kinds += [Kind.O, Kind.D, Kind.L] if rng.random() < moved else []
            for kind in kinds:
                yield device, Pass(kind, stage, i)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What both said."""

    sound: bool
    failure: Exception | None
    faults: tuple[str, ...]

    @property
    def agree(self) -> bool:
        return self.sound == (self.failure is None)

    def stricter(self, case: Case) -> bool:
        """Whether the checker asks for more than walkers do in what was damaged."""
        return not self.sound and self.failure is None and any(one in ADDRESSES for one in case.damage)


def judge(case: Case) -> Verdict:
    """What the checker says, and what walkers make of it."""
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
    return Verdict(report.ok, failure, tuple(fault.what for fault in report.faults))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    outcomes = ("sound", "faulty", "stricter", "disagree")
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        case = case_of(seed)
        verdict = judge(case)
        outcome = "sound" if verdict.sound else "faulty"
        if not verdict.agree:
            outcome = "stricter" if verdict.stricter(case) else "disagree"
        if outcome == "disagree":
            print(f"case {seed}, {case.name}: {verdict.failure!r}, {verdict.faults}", flush=True)
        counts[case.name, outcome] += 1
        counts["all", outcome] += 1
    print(f"{'':46}" + "".join(f"{outcome:>10}" for outcome in outcomes))
    for name in sorted({name for name, _ in counts}):
        print(f"{name:46}" + "".join(f"{counts[name, outcome]:10}" for outcome in outcomes))
    sys.exit(counts["all", "disagree"] > 0)


if __name__ == "__main__":
    main()
