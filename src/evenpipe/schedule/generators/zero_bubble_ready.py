"""A step in which every device runs any ready pass: preferably a backward, else a forward, else a weight gradient.

No device waits for its turn, so a memory limit below the number of devices costs much less than in `zero_bubble_turns`.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from .split_step import SplitProblem, Step


def simulate_ready(problem: SplitProblem, patience: float, bound: float) -> Step | None:
    """Run the whole step; return None once a device is later than `bound`.

    A weight gradient waits if another pass is certain to become ready within `patience`, a share of its time.
    """
    step = Step(problem)
    last = problem.devices - 1
    events = [(0.0, -device) for device in range(problem.devices)]  # when a device may find a ready pass
    heapify(events)
    while events:
        if step.latest > bound:
            return None
        now, device = heappop(events)
        device = -device
        if step.clock[device] > now + problem.tolerance:
            continue  # busy; checked again when the device is free
        backward = step.next_backward_input(device)
        forward = step.next_forward_input(device) if step.fits(device) else math.inf
        if backward <= now + problem.tolerance:
            step.backward(device)
            if device:
                heappush(events, (step.clock[device] + problem.hop, -(device - 1)))
        elif forward <= now + problem.tolerance:
            step.forward(device)
            if device < last:
                heappush(events, (step.clock[device] + problem.hop, -(device + 1)))
        elif step.weights[device] < step.inputs[device]:
            if min(backward, forward) < now + patience * problem.W[device]:
                continue  # checked again when that pass is ready
            step.weight(device)
        else:
            continue
        heappush(events, (step.clock[device], -device))
    return step
