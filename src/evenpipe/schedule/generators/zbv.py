"""ZB-V: no bubble with the activations of 1F1B, on all devices alike (arXiv 2401.10241, section 6)."""

from __future__ import annotations

from functools import partial

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.order import Order

from .v_budget import blocks_within
from .v_shape import Move, Rows, StepTimes, chain_steps, v_order
from .v_shape_choice import Base, shortest


def zbv(devices: int, microbatches: int, *, costs: Costs | None = None) -> Order:
    """ZB-V: no bubble with equal passes, and the activations of 1F1B on every device (arXiv 2401.10241, section 6).

    Any devices >= 1 and microbatches >= 1. Without `costs`, the order that the authors give: with equal passes F = I =
    W = 1 and microbatches >= 2 * devices - 1 the bubble is 0 and every device stores 2 * devices stage activations;
    fewer microbatches leave a bubble. With `costs` (per stage, and with hops between devices), the shortest among that
    order, building blocks that store no more, and both of these rescheduled for the given times.
    """
    if costs is None:
        return v_order(devices, microbatches, by_hand(devices, microbatches))
    limits = (2 * devices,) * devices
    bases: list[Base] = [partial(by_hand, devices), *blocks_within(devices, limits)]
    return v_order(devices, microbatches, shortest(bases, microbatches, limits, StepTimes.of(devices, costs)))


def by_hand(devices: int, microbatches: int) -> Rows:
    """The authors' rows."""
    return [_by_hand(devices, device, microbatches) for device in range(devices)]


def _by_hand(devices: int, device: int, microbatches: int) -> list[Move]:
    """One device's row: the row for at least 2 * devices - 1 microbatches, without the extra microbatches.

    `down` is the stage on the way from device 0, `up` the stage on the way back to it.
    """
    down_f, up_f, up_i, down_i = chain_steps(devices, device)
    up_w, down_w = up_i + 2 * devices, down_i + 2 * devices
    count = max(microbatches, 2 * devices - 1)
    turns = {step: iter(range(count)) for step in (down_f, up_f, up_i, down_i, up_w, down_w)}
    row: list[Move] = []

    def run(*steps: int) -> None:
        for step in steps:
            i = next(turns[step], None)
            if i is not None and i < microbatches:
                row.append((step, i))

    remaining = devices - device
    # 1. Warm-up: enough forwards to be busy until the first microbatch returns.
    for _ in range(2 * remaining - 1):
        run(down_f)
    for _ in range(device):
        run(up_f, down_f)
    for _ in range(remaining):
        run(up_f, up_i, up_w)
    # 2. Steady: one microbatch down, one up, in turn, until all forwards are done.
    for _ in range(count - devices):
        run(down_f, down_i, down_w, up_f, up_i, up_w)
    # 3. Cool-down: passes that others wait for come first, weight gradients last.
    for _ in range(device):
        run(down_i, up_i)
    for _ in range(remaining):
        run(down_i, down_w)
    for _ in range(count):
        run(up_w)
    for _ in range(count):
        run(down_w)
    return row
