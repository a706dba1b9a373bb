"""Choose the shortest of several V-schedules for given pass times, and reschedule it: weight gradients fill the waits.

Rescheduled, a device makes its F and I moves in the order of the base, and runs a W where the wait for the next of them
is long enough, or where a forward needs its memory. This always completes, for all times: of the remaining moves,
consider the first one in the base. Everything it waits for came before it in the base, so it is done. If it is an I or
a W, it can run. If it is a forward, it is the next one of its device, which has made no forward that comes later in the
base, and every W that comes earlier is done or can run; so it fits into memory as it does in the base.

Without rescheduling, steps of `benchmarks/arrangement.py` are up to 2.8 % longer, and 0.5 % on average.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .v_shape import Move, Rows, StepTimes, device_of_step, spans_and_makespan

Base = Callable[[int], Rows]
"""A V-schedule of any number of microbatches."""

FINALISTS = 4
"""Bases that are rescheduled, and candidates that are compared with all microbatches, if there are many."""


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """When weight gradients run.

    patience: a W starts in a wait of at least this share of the time of W.
    share: each device may be idle in shorter waits for this share of the difference between its span and the longest
        span, before it starts W's in them too; in further rounds, for this share of the remaining difference. None
        means no limit.
    """

    patience: float = 1.0
    share: float | None = None
    rounds: int = 1

    def rows(self, base: Rows, limits: Sequence[int], times: StepTimes) -> Rows:
        """The moves of `base` in an order for `times`. limits: stage activations per device, at least what
        `base` needs."""
        rows = base
        for _ in range(self.rounds):
            spare = [math.inf] * len(base)
            if self.share is not None:
                spans, _ = spans_and_makespan(rows, times)
                spare = [self.share * (max(spans) - span) for span in spans]
            rows = _Plan(self.patience, rows, limits, times, spare).run()
        return rows


_Candidate = tuple[tuple[float, float], Base, Rescheduling | None, Rows]
"""A candidate, with its span and its makespan."""

LAYOUTS = (Rescheduling(0.5), Rescheduling(share=1.0, rounds=2))
"""With ten layouts, of 16 bases each, no step would be shorter by more than 0.5 %."""


def shortest(
    bases: Sequence[Base], microbatches: int, limits: Sequence[int], times: StepTimes, enough: float | None = None
) -> Rows:
    """The rows with the shortest span, then the shortest makespan, among all bases and the shortest bases rescheduled,
    within `limits`.

    With `enough`, no base is rescheduled, and the first base whose bubble is at most `enough` ends the search. A first
    comparison uses few microbatches; its winners and the first base are then compared with all microbatches.
    """
    few = min(microbatches, 3 * len(limits))
    seen: set[tuple[tuple[Move, ...], ...]] = set()
    candidates: list[_Candidate] = []
    for base in bases:
        rows = base(few)
        key = tuple(map(tuple, rows))
        if key in seen:
            continue
        seen.add(key)
        candidates.append((_length(rows, times), base, None, rows))
        if enough is not None and candidates[-1][0][0] <= few * _work(times, len(limits)) + enough:
            return base(microbatches)
    candidates.sort(key=lambda entry: entry[0])
    for _, base, _, rows in candidates[:FINALISTS] if enough is None else []:
        for layout in LAYOUTS:
            rescheduled = layout.rows(rows, limits, times)
            candidates.append((_length(rescheduled, times), base, layout, rescheduled))
    candidates.sort(key=lambda entry: entry[0])
    if few == microbatches:
        return candidates[0][3]
    finals = []
    for base, chosen_layout in [
        *((base, chosen_layout) for _, base, chosen_layout, _ in candidates[:FINALISTS]),
        (bases[0], None),
    ]:
        rows = base(microbatches)
        finals.append(rows if chosen_layout is None else chosen_layout.rows(rows, limits, times))
    return min(finals, key=lambda rows: _length(rows, times))


def _length(rows: Rows, times: StepTimes) -> tuple[float, float]:
    spans, makespan = spans_and_makespan(rows, times)
    return max(spans), makespan


def _work(times: StepTimes, devices: int) -> float:
    """The work of the busiest device per microbatch."""
    per_device = [0.0] * devices
    for step, time in enumerate(times.steps):
        per_device[device_of_step(devices, step)] += time
    return max(per_device)


class _Plan:
    """One run of the event loop, with its state per device."""

    def __init__(
        self, patience: float, base: Rows, limits: Sequence[int], times: StepTimes, spare: list[float]
    ) -> None:
        devices = len(base)
        self.forwards, self.chain = 2 * devices, 4 * devices  # steps below are F, or F and I
        self.patience, self.limits, self.steps, self.hop, self.spare = patience, limits, times.steps, times.hop, spare
        self.device_of = [device_of_step(devices, step) for step in range(6 * devices)]
        self.base = base
        self.queue = [[move for move in row if move[0] < self.chain] for row in base]
        self.head = [0] * devices  # next of `queue`
        self.arrival: dict[Move, float] = {move: 0.0 for move in self.queue[0] if move[0] == 0}
        self.weights: list[deque[Move]] = [deque() for _ in base]
        self.held, self.free = [0] * devices, [0.0] * devices
        self.idling = [False] * devices
        self.rows: Rows = [[] for _ in base]
        self.events = [(0.0, device) for device in range(devices)]

    def run(self) -> Rows:
        """Rows with the moves of `base`, in an order for `times`."""
        while self.events:
            now, device = heappop(self.events)
            if self.free[device] <= now:
                move = self.choose(device, now)
                if move is not None:
                    self.start(device, move, now)
        assert list(map(len, self.rows)) == list(map(len, self.base)), "the base does not complete"
        return self.rows

    def choose(self, device: int, now: float) -> Move | None:
        """The next move of the device, if any; a W is removed from `weights`, other moves stay in the queue."""
        weights, queue, head = self.weights[device], self.queue[device], self.head[device]
        following = queue[head] if head < len(queue) else None
        if following is None:
            return weights.popleft() if weights else None
        arrival = self.arrival.get(following)
        full = following[0] < self.forwards and self.held[device] >= self.limits[device]
        if arrival is not None and arrival <= now and not full:
            return following
        if not weights:
            return None
        if not full:
            # If its predecessor has not started, the wait is at least as long as the predecessor takes.
            gap = self.steps[following[0] - 1] if arrival is None else arrival - now
            if gap < self.patience * self.steps[weights[0][0]] and gap <= self.spare[device]:
                self.idling[device] = True
                return None
        return weights.popleft()

    def start(self, device: int, move: Move, now: float) -> None:
        """Run `move`, and wake the devices that wait for it."""
        step, i = move
        if self.idling[device]:
            self.spare[device] -= now - self.free[device]
            self.idling[device] = False
        end = self.free[device] = now + self.steps[step]
        self.rows[device].append(move)
        heappush(self.events, (end, device))
        if step >= self.chain:
            self.held[device] -= 1
            return
        self.head[device] += 1
        if step < self.forwards:
            self.held[device] += 1
        else:
            self.weights[device].append((step + self.forwards, i))
        if step < self.chain - 1:
            neighbour = self.device_of[step + 1]
            arrival = self.arrival[step + 1, i] = end + (self.hop if neighbour != device else 0.0)
            heappush(self.events, (arrival, neighbour))
