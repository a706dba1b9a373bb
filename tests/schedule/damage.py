"""Damage to the rows of a schedule, at places that `rng` chooses. Some of it does no harm.

`count_cases` tells what came of many damaged schedules.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from evenpipe.schedule import Item, Kind, Pass, Transfer, TransferKind, parts_of
from evenpipe.schedule.passes import JOINT_KINDS, SHAPES

Rows = list[list[Item]]
Damage = Callable[[random.Random, Rows], None]


def somewhere(rng: random.Random, rows: Rows) -> tuple[list[Item], int]:
    row = rng.choice([row for row in rows if row])
    return row, rng.randrange(len(row))


def drop(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    del row[position]


def repeat(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    row.insert(rng.randint(0, len(row)), row[position])


def swap(rng: random.Random, rows: Rows) -> None:
    row, one = somewhere(rng, rows)
    other = rng.randrange(len(row))
    row[one], row[other] = row[other], row[one]


def swap_neighbours(rng: random.Random, rows: Rows) -> None:
    row, one = somewhere(rng, rows)
    other = max(0, one - 1)
    row[one], row[other] = row[other], row[one]


def move(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    item = row.pop(position)
    row.insert(rng.randint(0, len(row)), item)


def move_to_another_device(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    item, other = row.pop(position), rng.choice(rows)
    other.insert(rng.randint(0, len(other)), item)


def exchange_rows(rng: random.Random, rows: Rows) -> None:
    one, other = rng.randrange(len(rows)), rng.randrange(len(rows))
    rows[one], rows[other] = rows[other], rows[one]


def joinable(items: list[Item]) -> list[Pass]:
    """The passes and parts of these items, if all may stand in a joint pass."""
    parts = [part for item in items if isinstance(item, Pass) for part in parts_of(item)]
    return parts if all(isinstance(item, Pass) for item in items) and {p.kind for p in parts} <= JOINT_KINDS else []


def join_neighbours(rng: random.Random, rows: Rows) -> None:
    """In either turn; which is no damage where neither needs the other. Where nobody can be joined, nothing is done."""
    places = [(row, at) for row in rows for at in range(len(row) - 1) if joinable(row[at : at + 2])]
    for row, at in places and [rng.choice(places)]:
        parts = joinable(row[at : at + 2])
        row[at : at + 2] = [Pass(Kind.OVERLAP_F_B, parts=tuple(rng.sample(parts, len(parts))))]


def repeat_within_a_joint_pass(rng: random.Random, rows: Rows) -> None:
    places = [(row, at) for row in rows for at in range(len(row)) if joinable(row[at : at + 1])]
    for row, at in places and [rng.choice(places)]:
        parts = joinable(row[at : at + 1])
        row[at] = Pass(Kind.OVERLAP_F_B, parts=(*parts, rng.choice(parts)))


def insert(rng: random.Random, rows: Rows) -> None:
    """A pass of any kind, of a stage and a microbatch that there are."""
    stages = [0, *(item.stage for row in rows for item in row if item.stage is not None)]
    kind = rng.choice([kind for kind in SHAPES if isinstance(kind, Kind) and kind is not Kind.OVERLAP_F_B])
    insert_passes(rng, rows, [kind], rng.choice(stages))


def insert_copies(rng: random.Random, rows: Rows) -> None:
    """To the host and back, of any stage and microbatch; now and then rightly so."""
    forwards = [item.stage for row in rows for item in row if item.kind is Kind.F and item.stage is not None]
    insert_passes(rng, rows, [Kind.O, Kind.D, Kind.L], rng.choice([0, *forwards]))


def insert_passes(rng: random.Random, rows: Rows, kinds: list[Kind], stage: int) -> None:
    """In this order, on a device that has this stage if there is one."""
    microbatch = rng.choice([0, *(item.microbatch for row in rows for item in row if item.microbatch is not None)])
    row = rng.choice([row for row in rows if any(item.stage == stage for item in row)] or rows)
    places = sorted(rng.randint(0, len(row)) for _ in kinds)
    for kind, place in reversed(list(zip(kinds, places, strict=True))):
        has_stage, has_microbatch = SHAPES[kind]
        row.insert(place, Pass(kind, stage if has_stage else None, microbatch if has_microbatch else None))


def move_on_all_members(rng: random.Random, rows: Rows) -> None:
    """A transfer, in each row that has it, by a few places; where there are no transfers, nothing is done."""

    def same(item: Transfer) -> tuple[str, tuple[int, ...], int, int]:
        name = item.kind.value if item.stage is None else item.kind.value[-1]
        return name, item.members, item.microbatch, item.slice

    there = [same(item) for row in rows for item in row if isinstance(item, Transfer)]
    for chosen in there and [rng.choice(there)]:
        for row in rows:
            found = [at for at, item in enumerate(row) if isinstance(item, Transfer) and same(item) == chosen]
            for position in found[:1]:
                row.insert(max(0, position + rng.randint(-4, 4)), row.pop(position))


def cut_off(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    del row[position:]


def changed(rng: random.Random, rows: Rows, **change: Callable[[Item], object]) -> None:
    """Another field for some pass or transfer that has such a field, if there is one."""
    places = [
        (row, position)
        for row in rows
        for position, item in enumerate(row)
        if all(hasattr(item, name) and getattr(item, name) is not None for name in change)
        and not getattr(item, "parts", ())
    ]
    for row, position in places and [rng.choice(places)]:
        row[position] = replace(row[position], **{name: make(row[position]) for name, make in change.items()})


def change_microbatch(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, microbatch=lambda item: item.microbatch + rng.choice([-1, 1, 10**6]))


def change_stage(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, stage=lambda item: item.stage + rng.choice([-1, 1, 10**6]))


def change_slice(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, slice=lambda item: rng.choice([other for other in range(3) if other != item.slice]))


def change_peer(rng: random.Random, rows: Rows) -> None:
    """The stage at the other end of a hop that names it."""
    changed(rng, rows, peer=lambda item: item.peer + rng.choice([-1, 1, 10**6]))


def change_kind(rng: random.Random, rows: Rows) -> None:
    def other(item: Item) -> Kind | TransferKind:
        return rng.choice([kind for kind in type(item.kind) if kind is not item.kind])

    changed(rng, rows, kind=other)


def change_members(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, members=lambda item: rng.choice([item.members[::-1], item.members[1:], (7, *item.members)]))


def change_root(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, root=lambda item: item.root + 1)


def change_communicator(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, communicator=lambda item: item.communicator + "'")


TO_BOTH = [
    *(drop, repeat, swap, swap_neighbours, move, move_to_another_device, exchange_rows, cut_off),
    *(join_neighbours, repeat_within_a_joint_pass, insert_copies),
    *(change_microbatch, change_stage, change_slice, change_kind),
]
TO_PROGRAMS = [
    *TO_BOTH,
    swap_neighbours,
    move,
    change_peer,
    move_on_all_members,
    change_members,
    change_root,
    change_communicator,
]


def count_cases(description: str | None, judged: Callable[[int], tuple[str, str, str]]) -> None:
    """The command line of `agreement` and `rules_agreement`: exits with 1 if any case shows that the code is wrong.

    Args:
        judged: gives for the number of a case its name, its outcome, and what is wrong with the code, or "".
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        name, outcome, complaint = judged(seed)
        if complaint:
            wrong += 1
            print(f"case {seed}, {name}: {complaint}", flush=True)
        counts[name, outcome] += 1
    for (name, outcome), count in sorted(counts.items()):
        print(f"{name:46}{outcome:>10}{count:10}")
    print(f"{wrong} wrong")
    sys.exit(wrong > 0)
