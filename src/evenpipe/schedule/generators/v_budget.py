"""V-schedules for any memory between V-Min and ZB-V: building blocks chosen by their memory (arXiv 2405.15362).

The fewer slots a microbatch spends on each hop, the shorter the lifetime of a block. Hops before and after a switch
device get different gaps, which gives blocks of every size; the gaps where a microbatch turns (on the last device, at
the loss, and on the last device again) keep a block from colliding with its repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from evenpipe.errors import InputError
from evenpipe.schedule.check_limit import limits_per_device
from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.order import Order
from evenpipe.words import count

from .v_shape import StepTimes, v_order
from .v_shape_blocks import Block, block_of_gaps, collides, peaks, squeezed
from .v_shape_choice import Base, shortest
from .v_shape_fixed import min_peak

FAMILIES = (((5, 1), (1, 1)), ((5, 1), (2, 1)), ((1, 1), (2, 2)))
"""Slots of a hop away from device 0 and of a hop towards it, before and after the switch. Found by search: with equal
passes the first family is always best, with other times any family may be."""
TURNS = tuple(product((1, 2), range(1, 6), (1, 2, 7)))
"""Slots of the three turns. A turn that waits one period longer stores one more stage activation, which gives odd
peaks; hops alone give only even peaks."""


def v_budget(
    devices: int,
    microbatches: int,
    *,
    max_in_flight: float | Sequence[float] | None = None,
    costs: Costs | None = None,
) -> Order:
    """The shortest V-schedule found that stores at most `max_in_flight` stage activations on a device.

    Any devices >= 1 and microbatches >= 1. `max_in_flight` is one number or one per device: at least 2 * floor((devices
    + 4) / 3), as V-Min takes, by default 2 * devices, as ZB-V takes; more helps only with unequal passes. Without
    `costs` it plans for equal passes F = I = W = 1. With them it also reschedules its candidates for these times, per
    stage and with hops between devices, and returns the one with the shortest span.

    With equal passes and at least 2 * devices microbatches the bubble is max(0, 6 * devices - 3 * k - 1) for limit k,
    the lower bound for V-schedules of arXiv 2405.15362 (figure 13); only k = 2 * devices - 1 leaves 3 instead of 2:

        memory limit            4   5   6   7   8   9  10  11  12  13  14  15  16
        bubble on 4 devices    11   8   5   3   0
        bubble on 8 devices                    23  20  17  14  11   8   5   3   0

    Raises InputError if no schedule fits into the limit.
    """
    given_limits = limits_per_device(2 * devices if max_in_flight is None else max_in_flight, devices)
    limits = tuple(map(math.floor, given_limits))
    times = StepTimes.of(devices, EQUAL_COSTS if costs is None else costs)
    bases = blocks_within(devices, limits)
    if not bases:
        limit = f"{max_in_flight:g}" if isinstance(max_in_flight, (int, float)) else max_in_flight
        raise InputError(
            f"max_in_flight is {limit}, but a V-schedule on {count(devices, 'device')} needs {min_peak(devices)} stage "
            "activations on each"
        )
    enough, lowest_limit = None, min(limits)
    if costs is None and microbatches >= 2 * devices:
        enough = max(0, 6 * devices - 3 * lowest_limit - 1) + (lowest_limit == 2 * devices - 1)
    return v_order(devices, microbatches, shortest(bases, microbatches, limits, times, enough))


def blocks_within(devices: int, limits: Sequence[int]) -> list[Base]:
    """The squeezed blocks that fit into the limits and nearly fill them."""
    return [
        partial(squeezed, block, limits=limits, late=late)
        for block in _fitting(devices, limits)
        for late in (True, False)
    ]


def _fitting(devices: int, limits: Sequence[int]) -> list[Block]:
    stored: dict[Block, int] = {}
    for block in _blocks(devices):
        if not collides(block):
            block_peaks = peaks(block)
            if all(peak <= limit for peak, limit in zip(block_peaks, limits, strict=True)):
                stored[block] = sum(block_peaks)
    enough = max(stored.values(), default=0) - devices
    return sorted((block for block, total in stored.items() if total >= enough), key=lambda block: -stored[block])


def _blocks(devices: int) -> Iterator[Block]:
    seen = set()
    for gaps_before, gaps_after in FAMILIES:
        for switch in range(devices):
            hops = [gaps_before if hop < switch else gaps_after for hop in range(devices - 1)]
            away, back = [gap for gap, _ in hops], [gap for _, gap in reversed(hops)]
            for last, loss, last_again in TURNS:
                block = block_of_gaps([*away, last, *back, loss, *away, last_again, *back])
                if block not in seen:
                    seen.add(block)
                    yield block
