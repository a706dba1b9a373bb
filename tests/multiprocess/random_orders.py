"""Random orders for any devices: any table of stages to devices, any sequence that dependencies allow, whole and split
backwards in one order, forwards that run again, passes run as one, and sequences in slices."""

from __future__ import annotations

import random
from dataclasses import replace

from evenpipe.schedule import Kind, Order, Pass, Placement, check_order


def random_order(seed: int, devices: int, microbatches: int, most_stages: int, slices: int = 1) -> Order:
    rng = random.Random(seed)
    stages = rng.randint(devices, most_stages)
    table = [*range(devices), *(rng.randrange(devices) for _ in range(stages - devices))]
    rng.shuffle(table)
    placement = Placement(devices, tuple(table))
    # What each unit has to go through, as (pass, passes before it).
    needs: dict[Pass, list[Pass]] = {}
    backward_of: dict[tuple[int, int, int], Pass] = {}
    for unit in range(microbatches * slices):
        microbatch, number = divmod(unit, slices)
        backwards: list[Pass] = []
        for stage in range(stages):
            needs[Pass(Kind.F, stage, microbatch, number)] = [
                *([Pass(Kind.F, stage - 1, microbatch, number)] if stage else []),
                *([Pass(Kind.F, stage, microbatch, number - 1)] if number else []),
            ]
        for stage in reversed(range(stages)):
            forward = Pass(Kind.F, stage, microbatch, number)
            backward = Pass(rng.choice((Kind.B, Kind.I)), stage, microbatch, number)
            needs[backward] = [forward, *backwards]
            if backward.kind is Kind.I:
                needs[Pass(Kind.W, stage, microbatch, number)] = [backward]
            if rng.random() < 0.3:
                again = Pass(Kind.R, stage, microbatch, number)
                needs[again] = [forward]
                needs[backward].append(again)
            backwards = [backward]
            backward_of[stage, microbatch, number] = backward
    for (stage, microbatch, number), backward in backward_of.items():
        if number:
            needs[backward_of[stage, microbatch, number - 1]].append(backward)
    rows: list[list[Pass]] = [[] for _ in range(devices)]
    done: set[Pass] = set()
    while len(done) < len(needs):
        ready = [item for item, before in needs.items() if item not in done and done.issuperset(before)]
        chosen = rng.choice(ready)
        done.add(chosen)
        assert chosen.stage is not None
        rows[table[chosen.stage]].append(chosen)
    order = Order(placement, microbatches, tuple(tuple(row) for row in rows), slices=slices)
    for device in range(devices):
        order = _with_joint_pass(order, device, rng)
    return order


def _with_joint_pass(order: Order, device: int, rng: random.Random) -> Order:
    """Two neighbours of a row run as one, if there are such that nobody has to wait for."""
    row = order.rows[device]
    kinds = [item.kind for item in row]
    places = [
        place
        for place in range(len(row) - 1)
        if Kind.F in kinds[place : place + 2] and {Kind.B, Kind.I} & set(kinds[place : place + 2])
    ]
    if not places:
        return order
    place = rng.choice(places)
    joint = Pass(Kind.OVERLAP_F_B, parts=row[place : place + 2])
    rows = list(order.rows)
    rows[device] = (*row[:place], joint, *row[place + 2 :])
    changed = replace(order, rows=tuple(rows))
    return changed if check_order(changed).ok else order
