"""V-Half and V-Min: V-schedules with a half and a third of the activations of ZB-V (arXiv 2405.15362, section 3.2)."""

from __future__ import annotations

from evenpipe.schedule.order import Order

from .v_shape import v_order
from .v_shape_blocks import Block, in_order, repeat, squeezed


def v_half(devices: int, microbatches: int, *, squeeze: bool = True) -> Order:
    """V-Half: half the activations of ZB-V, the same on every device (arXiv 2405.15362, section 3.2).

    Any devices >= 1 and microbatches >= 1. Every device stores 2 * floor((devices + 2) / 2) stage activations. With
    equal passes F = I = W = 1 the bubble is 6 * ceil(devices / 2) - 7 passes from 2 * devices microbatches on (1 on two
    devices, 0 on one), the least possible for a V-schedule with that memory. With other times it stays constant in the
    number of microbatches while W + 2 I >= 2 F and W + 2 F >= 2 I. `v_budget` plans by costs.

    `squeeze=False` repeats the building block and leaves both ends unchanged: the bubble grows, for instance from 17
    to 26 on 8 devices, and passes keep the distances of the block.
    """
    return _order(half_block(devices), devices, microbatches, 2 * ((devices + 2) // 2), squeeze)


def v_min(devices: int, microbatches: int, *, squeeze: bool = True) -> Order:
    """V-Min: a third of the activations of ZB-V, the minimum without idle slots (arXiv 2405.15362, section 3.2).

    Any devices >= 1 and microbatches >= 1. The fullest device stores 2 * floor((devices + 4) / 3) stage activations.
    With equal passes F = I = W = 1 the bubble is 4 * devices - 7 passes if 3 divides devices, else 4 * devices - 5,
    from 2 * devices microbatches on (0 on one device). With unequal passes the bubble grows with every microbatch.
    `v_budget` plans by costs.

    `squeeze=False` repeats the building block and leaves both ends unchanged.
    """
    return _order(min_block(devices), devices, microbatches, min_peak(devices), squeeze)


def min_peak(devices: int) -> int:
    """The stage activations that V-Min stores on the fullest device."""
    return 2 * ((devices + 4) // 3)


def half_block(devices: int) -> Block:
    """Two slots per step away from device 0, one towards it; with even devices the backward waits three more."""
    shift = 3 if devices % 2 == 0 else 0
    return (
        *(2 * r for r in range(devices)),
        *(3 * devices - 2 - r for r in reversed(range(devices))),
        *(3 * devices - 1 + shift + 2 * r for r in range(devices)),
        *(6 * devices - 2 + shift - r for r in reversed(range(devices))),
    )


def min_block(devices: int) -> Block:
    """One slot per step; if 3 divides devices, the backward waits two more, because passes would collide."""
    shift = 2 if devices % 3 == 0 else 0
    return (*range(2 * devices), *range(2 * devices + shift, 4 * devices + shift))


def _order(block: Block, devices: int, microbatches: int, limit: int, squeeze: bool) -> Order:
    limits = [limit] * devices
    rows = squeezed(block, microbatches, limits) if squeeze else in_order(repeat(block, microbatches))
    return v_order(devices, microbatches, rows)
