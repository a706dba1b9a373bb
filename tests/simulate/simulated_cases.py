"""Orders and costs that many tests of the simulator share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import unit_needs

from evenpipe.errors import InputError
from evenpipe.schedule import MODES, SCHEDULES, Costs, Dependencies, Kind, Order, Pass, Placement, generate, plan_order

SHAPES = [(1, 3), (2, 1), (2, 5), (3, 4), (4, 8), (5, 11)]
"""(devices, microbatches): one device, one microbatch, fewer microbatches than devices, odd numbers."""


def orders(mode: str, shapes: list[tuple[int, int]] = SHAPES) -> Iterator[tuple[str, Order]]:
    """Every registered schedule that exists for a shape, in one vocabulary mode, with a label."""
    for devices, microbatches in shapes:
        for name in SCHEDULES:
            try:
                order = plan_order(generate(name, devices, microbatches), devices, microbatches, mode)
            except InputError:
                continue  # the schedule says that it needs other numbers
            yield f"{name} {devices} {microbatches} {mode}", order


@cache
def every_order() -> dict[str, Order]:
    """`orders` in all modes that differ in their orders. Made once per process: it takes seconds."""
    return {label: order for mode in MODES if mode != "redistribute" for label, order in orders(mode)}


def random_costs(placement: Placement, seed: int, **more: object) -> Costs:
    """Times per stage and device from 0.5 to 3, and transfers that take some time."""
    chance = random.Random(seed)

    def times(count: int) -> list[float]:
        return [chance.uniform(0.5, 3) for _ in range(count)]

    stages, devices = placement.stages, placement.devices
    values: dict[str, object] = {
        **{kind: times(stages) for kind in "FIW"},
        **{kind: times(devices) for kind in "SCTEG"},
        "p2p": chance.uniform(0, 2),
        "collectives": {name: chance.uniform(0, 2) for name in ("broadcast", "statistics", "reduce", "embedding")},
        "bytes": [float(chance.randint(1, 9)) for _ in range(stages)],
    }
    if set(more) & {"links"}:
        del values["p2p"], values["collectives"]
    return Costs(**{**values, **more})  # type: ignore[arg-type]


def random_order(placement: Placement, microbatches: int, split: bool, barriers: int, seed: int) -> Order:
    """Any legal order: again and again, some pass that has all it needs is put at the end of its row."""
    chance = random.Random(seed)
    dependencies = Dependencies(placement, barriers)
    backward = (Kind.I, Kind.W) if split else (Kind.B,)
    kinds = {0: (), 1: (Kind.E, Kind.S, Kind.C, Kind.T, Kind.G), 2: (Kind.E, Kind.S, Kind.T, Kind.G)}[barriers]
    left = {
        (device, Pass(kind, stage, microbatch))
        for microbatch in range(microbatches)
        for stage, device in enumerate(placement.stage_device)
        for kind in (Kind.F, *backward)
    } | {
        (device, Pass(kind, None, microbatch))
        for microbatch in range(microbatches)
        for device in range(placement.devices)
        for kind in kinds
    }

    def present(device: int, item: Pass) -> tuple[int, Pass]:
        kind = Kind.I if split and item.kind is Kind.B else item.kind
        return device, Pass(kind, item.stage, item.microbatch)

    needs = {}
    for device, item in left:
        before = [present(device, earlier) for earlier in unit_needs.after(dependencies, item, device)]
        for transfer in unit_needs.waits_for(dependencies, item, device):
            before += [present(*made) for made in unit_needs.producers(dependencies, transfer, device)]
        needs[device, item] = set(before)
    rows: list[list[Pass]] = [[] for _ in range(placement.devices)]
    while left:
        ready = sorted((one for one in left if not needs[one] & left), key=str)
        device, item = chance.choice(ready)
        rows[device].append(item)
        left.remove((device, item))
    return Order(placement, microbatches, tuple(map(tuple, rows)), barriers)
