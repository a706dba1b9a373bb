"""Simulates one training step with a split backward, pass by pass on all devices at once, for heuristics."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evenpipe.schedule.passes import Kind

WHOLE = 1e-6
"""Rounding tolerance for sums of activation shares."""


@dataclass(frozen=True, slots=True)
class SplitProblem:
    """One stage per device. F, I, W: times per stage. hop: time between devices. tolerance: times below it count as 0.

    limits: the most stage activations per device, of which I leaves `weight_share` until W.
    """

    microbatches: int
    F: tuple[float, ...]
    I: tuple[float, ...]
    W: tuple[float, ...]
    hop: float
    tolerance: float
    limits: tuple[float, ...]
    weight_share: float

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.F)


class Step:
    """The passes that have run so far. Each kind runs in the order of microbatches; a pass starts as soon as it can.

    rows: the kinds that each device has run.
    forwards, inputs, weights: the number of F, I and W that each device has run.
    clock: when each device is free.
    forward_input, backward_input: per device and microbatch, when the inputs of F and I arrive, as far as known.
    late: idle time of each device since its first pass, minus its slack relative to the device with the most work.
    latest: the maximum of `late`. The span is `latest` plus the work of the device with the most work.
    """

    def __init__(self, problem: SplitProblem) -> None:
        devices, microbatches = problem.devices, problem.microbatches
        self.problem = problem
        self.rows: list[list[Kind]] = [[] for _ in range(devices)]
        self.forwards, self.inputs, self.weights = [0] * devices, [0] * devices, [0] * devices
        self.clock, self.stored = [0.0] * devices, [0.0] * devices
        self.forward_input: list[list[float]] = [[0.0] * microbatches, *([] for _ in range(devices - 1))]
        self.backward_input: list[list[float]] = [[] for _ in range(devices)]
        work = [microbatches * sum(times) for times in zip(problem.F, problem.I, problem.W, strict=True)]
        self.late = [device_work - max(work) for device_work in work]
        self.latest = 0.0

    @property
    def score(self) -> tuple[int, int]:
        """The values to minimise: the span minus the work of the busiest device, then the makespan, both rounded so
        that rounding errors do not matter."""
        return round(self.latest / self.problem.tolerance), round(max(self.clock) / self.problem.tolerance)

    def next_forward_input(self, device: int) -> float:
        """When the input of the next F arrives; infinity if that is not known, or if no F is left."""
        return _next(self.forward_input[device], self.forwards[device])

    def next_backward_input(self, device: int) -> float:
        """The same for the next I."""
        return _next(self.backward_input[device], self.inputs[device])

    def fits(self, device: int) -> bool:
        """Whether there is memory for one more F."""
        return self.stored[device] + 1 <= self.problem.limits[device] + WHOLE

    def forward(self, device: int) -> None:
        """Run the next F."""
        microbatch = self.forwards[device]
        start = max(self.clock[device], self.forward_input[device][microbatch])
        if microbatch:
            self._wait(device, start)
        self.clock[device] = end = start + self.problem.F[device]
        if device + 1 < self.problem.devices:
            self.forward_input[device + 1].append(end + self.problem.hop)
        else:
            self.backward_input[device].append(end)
        self.stored[device] += 1
        self.forwards[device] += 1
        self.rows[device].append(Kind.F)

    def backward(self, device: int) -> None:
        """Run the next I."""
        microbatch = self.inputs[device]
        start = max(self.clock[device], self.backward_input[device][microbatch])
        self._wait(device, start)
        self.clock[device] = end = start + self.problem.I[device]
        if device:
            self.backward_input[device - 1].append(end + self.problem.hop)
        self.stored[device] -= 1 - self.problem.weight_share
        self.inputs[device] += 1
        self.rows[device].append(Kind.I)

    def weight(self, device: int) -> None:
        """Run the next W."""
        assert self.weights[device] < self.inputs[device], "no weight gradient is pending"
        self.clock[device] += self.problem.W[device]
        self.stored[device] -= self.problem.weight_share
        self.weights[device] += 1
        self.rows[device].append(Kind.W)

    def all_weights(self, device: int) -> None:
        """Run every pending W."""
        while self.weights[device] < self.inputs[device]:
            self.weight(device)

    def _wait(self, device: int, start: float) -> None:
        late = self.late[device] + start - self.clock[device]
        self.late[device] = late
        self.latest = late if late > self.latest else self.latest


def _next(known: list[float], index: int) -> float:
    return known[index] if index < len(known) else math.inf
