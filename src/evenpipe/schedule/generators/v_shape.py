"""Shared code of V-schedules: the path of a microbatch through the stages and back, in numbered steps.

Stages form a V, 0 1 2 3 3 2 1 0 for four devices. A microbatch takes the steps in sequence, forward through all 2d
stages, then back through them, so step s needs only step s - 1:

    device 0   0             7   8             15        steps 0 to 2d - 1       F of stage `step`
    device 1     1         6       9         14          steps 2d to 4d - 1      I of stage 4d - 1 - step
    device 2       2     5           10    13            steps 4d to 6d - 1      W of stage 6d - 1 - step
    device 3         3 4               11 12

The step of a weight gradient, which nothing waits for, is the step of its I plus 2d.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass, TransferKind
from evenpipe.schedule.placement import Placement

Move = tuple[int, int]
"""(step, microbatch)"""
Rows = list[list[Move]]
"""Moves of each device, in order."""

KINDS = (Kind.F, Kind.I, Kind.W)


def device_of_step(devices: int, step: int) -> int:
    """The device that runs a step."""
    offset = step % (2 * devices)
    return min(offset, 2 * devices - 1 - offset)


def chain_steps(devices: int, device: int) -> tuple[int, int, int, int]:
    """The steps of a device that others wait for, F, F, I, I, in the order of a microbatch."""
    return device, 2 * devices - 1 - device, 2 * devices + device, 4 * devices - 1 - device


def stores(devices: int, step: int) -> int:
    """The stage activations that a step adds to its device: 1 for F, -1 for W."""
    return 1 - step // (2 * devices)


def passes_of_steps(devices: int) -> list[tuple[Kind, int]]:
    """Kind and stage of the pass of each step."""
    stages = range(2 * devices)
    return [*((Kind.F, stage) for stage in stages), *product((Kind.I, Kind.W), reversed(stages))]


def v_order(devices: int, microbatches: int, rows: Sequence[Iterable[Move]]) -> Order:
    """The order in which each device makes the moves of its row."""
    step_passes, placement = passes_of_steps(devices), Placement.v_shape(devices)
    return Order(placement, microbatches, tuple(tuple(Pass(*step_passes[step], i) for step, i in row) for row in rows))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time of each of the 6 * devices steps, and of a `hop` between two devices."""

    steps: tuple[float, ...]
    hop: float

    @classmethod
    def of(cls, devices: int, costs: Costs) -> StepTimes:
        """Raises InputError if a list of `costs` does not have one number per stage, or if F, I or W is missing."""
        requirement = "a V-schedule needs F, I and W, a number or a list each"
        times = dict(zip(KINDS, costs.needed_times(Placement.v_shape(devices), KINDS, requirement), strict=True))
        steps = (times[kind][stage] for kind, stage in passes_of_steps(devices))
        return cls(tuple(steps), costs.transfer_time(TransferKind.SEND_F))


def spans_and_makespan(rows: Rows, times: StepTimes) -> tuple[list[float], float]:
    """The span of each device and the makespan if every move runs as early as possible."""
    devices = len(rows)
    chain, steps, hop = 4 * devices, times.steps, times.hop
    device_of = [device_of_step(devices, step) for step in range(6 * devices)]
    ends: dict[Move, float] = {}
    position, clock = [0] * devices, [0.0] * devices
    first: list[float | None] = [None] * devices
    runnable = list(range(devices))
    while runnable:
        device = runnable.pop()
        row, now, at = rows[device], clock[device], position[device]
        while at < len(row):
            step, i = move = row[at]
            if 0 < step < chain:
                arrival = ends.get((step - 1, i))
                if arrival is None:
                    break
                if device_of[step - 1] != device:
                    arrival += hop
                now = max(now, arrival)
            if first[device] is None:
                first[device] = now
            now += steps[step]
            at += 1
            if step < chain:
                ends[move] = now
                if step < chain - 1 and device_of[step + 1] != device:
                    runnable.append(device_of[step + 1])
        clock[device], position[device] = now, at
    assert all(at == len(row) for at, row in zip(position, rows, strict=True)), "the rows wait for each other"
    return [end - (start or 0.0) for start, end in zip(first, clock, strict=True)], max(clock)
