"""The heuristic of arXiv 2401.10241, section 3.1: each turn runs the forwards of a microbatch down the pipeline, and
the backwards of one back up.

Weight gradients fill the waits of a device. Three choices apply to the whole step; the caller tries all combinations.
One addition for unequal stages: a device with less work than the busiest device may be idle for the difference before
it counts as late.
"""

from __future__ import annotations

from enum import Enum

from .split_step import WHOLE, SplitProblem, Step


class WarmUp(Enum):
    """Number of forwards of a device between its first one and its first backward, if memory allows."""

    FITTING = "those that fit into the wait for the backward"
    DELAYING = "one more, which delays it"
    TWO_PER_HOP = "two for each device behind, as in zb-h2"


def simulate_turns(problem: SplitProblem, warm_up: WarmUp, skip: bool, fill: bool, bound: float) -> Step | None:
    """Run the whole step with these choices; return None once a device is later than `bound`.

    skip: a device that is ahead may leave out a forward. fill: every gap gets a weight gradient, even a longer one.
    """
    step = Step(problem)
    _first_microbatch(step, warm_up)
    for _ in range(1, problem.microbatches):
        if step.latest > bound:
            return None
        _next_microbatch(step, skip, fill)
    for device in range(problem.devices):
        step.all_weights(device)
    return step


def _first_microbatch(step: Step, warm_up: WarmUp) -> None:
    """Run the forward of the first microbatch on all devices, further forwards until its backward arrives, and its
    backward."""
    devices = step.problem.devices
    for device in range(devices):
        step.forward(device)
    for device, count in enumerate(_ahead(step, warm_up)):
        for _ in range(count):
            step.forward(device)
    for device in reversed(range(devices)):
        step.backward(device)


def _ahead(step: Step, warm_up: WarmUp) -> list[int]:
    """How many forwards each device runs between its first forward and its first backward."""
    problem = step.problem
    counts = [0] * problem.devices
    back = step.clock[-1] + problem.I[-1]  # when the first backward ends on the next device
    for device in reversed(range(problem.devices - 1)):
        clock, arrival = step.clock[device], back + problem.hop
        limit = int(min(problem.microbatches - 1, problem.limits[device] - 1 + WHOLE))
        while counts[device] < limit:
            conditions = {
                WarmUp.FITTING: clock + problem.F[device] <= arrival + problem.tolerance,
                WarmUp.DELAYING: clock < arrival - problem.tolerance,
                WarmUp.TWO_PER_HOP: counts[device] < 2 * (problem.devices - 1 - device),
            }
            if not conditions[warm_up]:
                break
            clock += problem.F[device]
            counts[device] += 1
        back = max(clock, arrival) + problem.I[device]
    # A device that has run as many as its predecessor would wait for its next forward, and all others with it.
    for device in range(1, problem.devices):
        if counts[device - 1] < problem.microbatches - 1:
            counts[device] = min(counts[device], max(0, counts[device - 1] - 1))
    return counts


def _next_microbatch(step: Step, skip: bool, fill: bool) -> None:
    """Run a forward on the devices that take one, from the first; then a backward everywhere, from the last."""
    for device in _takers(step, skip):
        while not step.fits(device):
            step.weight(device)
        _fill(step, device, step.next_forward_input(device), fill)
        step.forward(device)
    for device in reversed(range(step.problem.devices)):
        if device == 0 and step.forwards[0] == step.problem.microbatches:
            step.all_weights(0)
        _fill(step, device, step.next_backward_input(device), fill)
        step.backward(device)


def _takers(step: Step, skip: bool) -> list[int]:
    """The devices that run a forward now, ascending: they have one left, and their successor runs one too."""
    problem = step.problem
    takers: list[int] = []
    back = 0.0  # when the backward of this turn ends on the next device, as far as known
    for device in reversed(range(problem.devices)):
        if step.forwards[device] == problem.microbatches:
            break
        arrival = back + problem.hop if takers else 0.0
        if skip and takers and step.forwards[device] - step.forwards[device + 1] >= 2:
            wait = max(0.0, arrival - step.clock[device])
            if step.late[device] + wait <= step.latest + problem.tolerance:
                break
        start = step.clock[device]
        if device and step.forwards[device] < step.forwards[device - 1]:
            start = max(start, step.next_forward_input(device))
        back = max(start + problem.F[device], arrival) + problem.I[device]
        takers.append(device)
    return takers[::-1]


def _fill(step: Step, device: int, arrival: float, always: bool) -> None:
    """Run weight gradients while the device waits. A weight gradient longer than the wait runs only if the device would
    otherwise become the latest, or with `always`."""
    tolerance = step.problem.tolerance
    pending = step.inputs[device] - step.weights[device]
    while pending and step.clock[device] + step.problem.W[device] <= arrival + tolerance:
        step.weight(device)
        pending -= 1
    gap = arrival - step.clock[device]
    if pending and gap > tolerance and (always or gap > step.latest - step.late[device]):
        step.weight(device)
