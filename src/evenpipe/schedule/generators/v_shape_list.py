"""Reschedule a V-schedule for other pass times: weight gradients fill the waits.

Each device keeps its forwards in the order of a base schedule. A free device runs a ready pass; a W runs if the wait
for the next pass is long enough, or if a forward needs its memory.

This always completes, for all times: of the remaining moves, consider the first one in the base. Everything it waits
for came before it in the base, so it is done. If it is an I or a W, it can run. If it is a forward, it is the next one
of its device, which has made no forward that comes later in the base, and every W that comes earlier is done or can
run; so it fits into memory as it does in the base.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .v_shape import Move, Rows, StepTimes, device_of_step, spans_and_makespan


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """How a base is rescheduled.

    patience: a W starts in a wait of at least this share of its own time; 0 starts it in any wait.
    strict: I's keep their place among the forwards; otherwise a device takes the first ready move of the base.
    share: each device may be idle in shorter waits for this share of the difference between its span and the longest
        span, before it starts W's in them too; in further rounds, for this share of the remaining difference. None is
        forever.
    """

    patience: float = 1.0
    strict: bool = True
    share: float | None = None
    rounds: int = 1

    def rows(self, base: Rows, limits: Sequence[int], times: StepTimes, within: float = math.inf) -> Rows | None:
        """Return the moves of `base` in an order for `times`; None if a span is longer than `within`. limits: stage
        activations per device, at least what `base` needs."""
        rows, spare = base, [math.inf] * len(base)
        for number in range(1, self.rounds + 1):
            if self.share is not None:
                spans, _ = spans_and_makespan(rows, times)
                spare = [self.share * (max(spans) - span) for span in spans]
            longest = within if number == self.rounds else math.inf
            found = _Plan(self, rows, limits, times, spare).run(longest)
            if found is None:
                return None
            rows = found
        return rows


class _Plan:
    """One run of the event loop, with its state per device."""

    def __init__(
        self, how: Rescheduling, base: Rows, limits: Sequence[int], times: StepTimes, spare: list[float]
    ) -> None:
        devices = len(base)
        self.forwards, self.chain = 2 * devices, 4 * devices  # steps below are F, or F and I
        self.queued = self.chain if how.strict else self.forwards  # steps below keep their order
        self.how, self.limits, self.steps, self.hop, self.spare = how, limits, times.steps, times.hop, spare
        self.there = [device_of_step(devices, step) for step in range(6 * devices)]
        self.base = base
        self.place = [{move: at for at, move in enumerate(row) if move[0] < self.chain} for row in base]
        self.queue = [[move for move in row if move[0] < self.queued] for row in base]
        self.head = [0] * devices  # next of `queue`
        self.arrival: dict[Move, float] = {move: 0.0 for move in self.queue[0] if move[0] == 0}
        self.coming: list[list[tuple[float, Move]]] = [[] for _ in base]  # I's outside `queue`, by arrival
        self.ready: list[list[tuple[int, Move]]] = [[] for _ in base]  # those that have arrived, by place
        self.weights: list[deque[Move]] = [deque() for _ in base]
        self.held, self.free = [0] * devices, [0.0] * devices
        self.idling = [False] * devices
        self.rows: Rows = [[] for _ in base]
        self.events = [(0.0, device) for device in range(devices)]

    def run(self, within: float) -> Rows | None:
        """Return rows with the moves of `base`, in an order for `times`; None if a span is longer than `within`."""
        # When each device has to start its next move; as long as it has run none, with its start at 0.
        latest = [within - sum(self.steps[step] for step, _ in row) for row in self.base]
        while self.events:
            now, device = heappop(self.events)
            if self.free[device] <= now:
                move = self.choose(device, now)
                if move is not None:
                    if not self.rows[device]:
                        latest[device] += now
                    elif now > latest[device]:
                        return None
                    latest[device] += self.steps[move[0]]
                    self.start(device, move, now)
        assert all(len(row) == len(old) for row, old in zip(self.rows, self.base, strict=True)), (
            "base does not complete"
        )
        return self.rows

    def choose(self, device: int, now: float) -> Move | None:
        """Return the next move of the device, if any; a W leaves `weights`, other moves stay in place."""
        coming, ready, weights = self.coming[device], self.ready[device], self.weights[device]
        while coming and coming[0][0] <= now:
            _, move = heappop(coming)
            heappush(ready, (self.place[device][move], move))
        queue, head = self.queue[device], self.head[device]
        following = queue[head] if head < len(queue) else None
        arrival = None if following is None else self.arrival.get(following)
        arrived = arrival is not None and arrival <= now
        full = following is not None and following[0] < self.forwards and self.held[device] >= self.limits[device]
        if ready and (following is None or not arrived or ready[0][0] < self.place[device][following]):
            return ready[0][1]
        if arrived and not full:
            return following
        if ready and not weights:
            return ready[0][1]
        if not weights:
            return None
        if following is not None and not full:
            gap = self.gap(device, following, arrival, now)
            if gap < self.how.patience * self.steps[weights[0][0]] and gap <= self.spare[device]:
                self.idling[device] = True
                return None
        return weights.popleft()

    def gap(self, device: int, following: Move, arrival: float | None, now: float) -> float:
        """Return a lower bound on the wait of the device."""
        known = [self.coming[device][0][0]] if self.coming[device] else []
        if arrival is not None:
            known.append(arrival)
        elif self.how.strict:  # its predecessor has not even started
            known.append(now + self.steps[following[0] - 1])
        return min(known) - now if known else math.inf

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
        if step < self.queued:
            self.head[device] += 1
        else:
            heappop(self.ready[device])
        if step < self.forwards:
            self.held[device] += 1
        else:
            self.weights[device].append((step + self.forwards, i))
        if step == self.chain - 1:
            return
        other = self.there[step + 1]
        arrival = end + (self.hop if other != device else 0.0)
        if step + 1 < self.queued:
            self.arrival[step + 1, i] = arrival
        else:
            heappush(self.coming[other], (arrival, (step + 1, i)))
        heappush(self.events, (arrival, other))
