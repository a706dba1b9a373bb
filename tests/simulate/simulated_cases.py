"""Orders and costs that many tests of the simulator share."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

from evenpipe.errors import InputError
from evenpipe.schedule import MODES, SCHEDULES, Costs, Order, Placement, plan_order

SHAPES = [(1, 3), (2, 1), (2, 5), (3, 4), (4, 8), (5, 11)]
"""(devices, microbatches): one device, one microbatch, fewer microbatches than devices, odd numbers."""


@cache
def order_of_case(schedule: str, mode: str, shape: tuple[int, int]) -> Order | None:
    """A registered schedule of some size in a vocabulary mode; None where it says that it needs other numbers."""
    try:
        return plan_order(schedule, *shape, mode)
    except InputError:
        return None


CASES = list(product(SCHEDULES, [mode for mode in MODES if mode != "redistribute"], SHAPES))
"""All that differ in their orders."""


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
    if "links" in more:
        del values["p2p"], values["collectives"]
    return Costs(**{**values, **more})  # type: ignore[arg-type]
