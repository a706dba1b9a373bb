"""What V-schedules share: the way of a microbatch there and back, in numbered steps.

Stages lie in a V, 0 1 2 3 3 2 1 0 for four devices. A microbatch takes one step after the other, forward through all
2d stages, then back through them, so step s needs step s - 1 and nothing else:

    device 0   0             7   8             15        steps 0 to 2d - 1       F of stage `step`
    device 1     1         6       9         14          steps 2d to 4d - 1      I of stage 4d - 1 - step
    device 2       2     5           10    13            steps 4d to 6d - 1      W of stage 6d - 1 - step
    device 3         3 4               11 12

A weight gradient, which nothing waits for, has the step of its I plus 2d.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass
from evenpipe.schedule.placement import Placement

Move = tuple[int, int]
"""(step, microbatch)"""

KINDS = (Kind.F, Kind.I, Kind.W)


def device_of_step(devices: int, step: int) -> int:
    """The device that takes a step."""
    there = step % (2 * devices)
    return min(there, 2 * devices - 1 - there)


def chain_steps(devices: int, device: int) -> tuple[int, int, int, int]:
    """The steps of one device that others wait for: F, F, I, I, in the order in which a microbatch takes them."""
    return device, 2 * devices - 1 - device, 2 * devices + device, 4 * devices - 1 - device


def stores(devices: int, step: int) -> int:
    """Stage activations that a step adds to its device: 1 for F, -1 for W."""
    return 1 - step // (2 * devices)


def kind_of_step(devices: int, step: int) -> Kind:
    """Kind of the pass of a step."""
    return KINDS[step // (2 * devices)]


def stage_of_step(devices: int, step: int) -> int:
    """Stage of the pass of a step."""
    there = step % (2 * devices)
    return there if step < 2 * devices else 2 * devices - 1 - there


def v_order(devices: int, microbatches: int, rows: Sequence[Iterable[Move]]) -> Order:
    """The order in which each device makes the moves of its row."""
    what = [(kind_of_step(devices, step), stage_of_step(devices, step)) for step in range(6 * devices)]
    placement = Placement.v_shape(devices)
    return Order(placement, microbatches, tuple(tuple(Pass(*what[step], i) for step, i in row) for row in rows))
