"""Random orders of slices and their programs, sound and damaged, against the rules as `schedule_oracle` has them.

    python tests/schedule/sliced_agreement.py --cases 10000 --seed 0

The checker finds a fault if and only if the second opinion does, and `releases` gives back what was sent exactly where
an independent walk has proof of its arrival.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from damage import TO_BOTH, TO_PROGRAMS, Damage, Rows
from schedule_oracle import GRAPHS, order_is_sound, program_is_sound, random_costs, random_order
from test_releases import check as check_releases

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    Item,
    Kind,
    Order,
    Pass,
    Placement,
    Program,
    add_communication,
    check_order,
    check_program,
    evaluation_program,
    plan_order,
)
from evenpipe.schedule.passes import ROLE

DAMAGED_ALIKE = 4
"""Cases that begin with the same order."""


def swap_in_sequence(rng: random.Random, rows: Rows) -> None:
    """Two F, or two B or I, of one stage and sequence change places."""
    places: dict[tuple[int, Kind, int | None, int | None], list[int]] = {}
    for device, row in enumerate(rows):
        for position, item in enumerate(row):
            if isinstance(item, Pass) and ROLE[item.kind] in (Kind.F, Kind.B):
                places.setdefault((device, item.kind, item.stage, item.microbatch), []).append(position)
    pairs = [(device, found) for (device, *_), found in sorted(places.items(), key=str) if len(found) > 1]
    for device, found in pairs and [rng.choice(pairs)]:
        one, other = rng.sample(found, 2)
        rows[device][one], rows[device][other] = rows[device][other], rows[device][one]


def drop_slice(rng: random.Random, rows: Rows) -> None:
    """Everything about one slice of a sequence, on all devices or on one."""
    units = [(item.microbatch, item.slice) for row in rows for item in row if item.microbatch is not None]
    devices = range(len(rows)) if rng.random() < 0.5 else [rng.randrange(len(rows))]
    for unit in units and [rng.choice(units)]:
        for device in devices:
            rows[device] = [item for item in rows[device] if (item.microbatch, item.slice) != unit]


def turn_sequence(rng: random.Random, rows: Rows) -> None:
    """The backwards of one sequence on one device run from the first slice to the last."""
    device = rng.randrange(len(rows))
    row = rows[device]
    places = [at for at, item in enumerate(row) if isinstance(item, Pass) and ROLE[item.kind] is Kind.B]
    for at in places and [rng.choice(places)]:
        chosen = [other for other in places if _of(row[other]) == _of(row[at])]
        for place, item in zip(chosen, [row[other] for other in reversed(chosen)], strict=True):
            row[place] = item


def _of(item: Item) -> tuple[object, ...]:
    return item.kind, item.stage, item.microbatch


OF_SEQUENCES = (swap_in_sequence, swap_in_sequence, drop_slice, turn_sequence)


@dataclass(frozen=True, slots=True)
class Case:
    """A sound order or program, and what becomes of it."""

    sound: Program
    schedule: Order | Program
    damage: Damage | None

    @property
    def name(self) -> str:
        what = "program" if isinstance(self.schedule, Program) else "order"
        return f"{what}, {'as it is' if self.damage is None else self.damage.__name__}"


def sound_program(rng: random.Random) -> Program:
    """Of up to four devices and slices: by name, or anything that the rules allow."""
    while True:
        devices, microbatches, slices = rng.randint(1, 4), rng.randint(1, 4), rng.randint(2, 4)
        mode, split = rng.choice(MODES), rng.random() < 0.5
        if rng.random() < 0.5:
            schedule: str | Order = rng.choice(list(SCHEDULES))
        else:
            table = [*range(devices), *(rng.randrange(devices) for _ in range(rng.choice([0, 0, 1, 2])))]
            rng.shuffle(table)
            placement = rng.choice([Placement(devices, tuple(table)), rng.choice(GRAPHS)])
            schedule = random_order(rng.randrange(10**6), placement, microbatches, split=split, slices=slices)
            devices = placement.devices
        costs = random_costs(rng.randrange(10**6), schedule.placement) if isinstance(schedule, Order) else None
        try:
            order = plan_order(schedule, devices, microbatches, mode, costs, slices=slices)
        except InputError:  # not made for this size, or passes that run as one
            continue
        return evaluation_program(order) if rng.random() < 0.15 else add_communication(order, costs)


def case_of(seed: int) -> Case:
    """The case of that number."""
    program = sound_program(random.Random(seed // DAMAGED_ALIKE))
    rng = random.Random(-1 - seed)
    schedule: Order | Program = program if rng.random() < 0.5 else program.order
    if seed % DAMAGED_ALIKE == 0:
        return Case(program, schedule, None)
    others = TO_PROGRAMS if isinstance(schedule, Program) else TO_BOTH
    damage = rng.choice(OF_SEQUENCES if rng.random() < 0.5 else others)
    rows: Rows = [[item for item in row if item is not None] for row in schedule.rows]
    damage(rng, rows)
    return Case(program, replace(schedule, rows=tuple(map(tuple, rows))), damage)


def complaints(case: Case) -> Iterator[str]:
    """What the checker, or `releases`, and the second opinion do not agree on."""
    schedule = case.schedule
    if isinstance(schedule, Program):
        told, sound = check_program(schedule).ok, program_is_sound(schedule, case.sound)
    else:
        told, sound = check_order(schedule).ok, order_is_sound(schedule)
    if told != sound:
        yield f"the checker says {told}, the rules say {sound}"
    if case.damage is None and not sound:
        yield "it is not sound to begin with"
    if sound and isinstance(schedule, Program):
        try:
            check_releases(schedule)
        except AssertionError as error:
            yield f"releases: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        case = case_of(seed)
        checked = check_program if isinstance(case.schedule, Program) else check_order
        outcome = "sound" if checked(case.schedule).ok else "faulty"  # type: ignore[operator]
        counts[case.name, outcome] += 1
        counts["all", outcome] += 1
        for complaint in complaints(case):
            wrong += 1
            print(f"case {seed}, {case.name}: {complaint}", flush=True)
    for name in sorted({name for name, _ in counts}):
        print(f"{name:46}{counts[name, 'sound']:8} sound{counts[name, 'faulty']:8} faulty")
    print(f"{wrong} disagreements")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
