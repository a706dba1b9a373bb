"""When copies to the host and back can run: lanes that carry one copy at a time.

A copy needs the stream of its device (one for both directions, or one each) and, where devices share a link to the
host, that link in its direction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from evenpipe.schedule.links import CopyEngine

OUT, BACK = False, True
"""Directions: to the host, and back to the device."""


class Lane:
    """Non-overlapping busy times of one lane."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def earliest(self, time: float, takes: float) -> float:
        """Return the first start at or after `time` of a free period of this length."""
        for place in range(bisect_right(self._ends, time), len(self._starts)):
            if time + takes <= self._starts[place]:
                break
            time = max(time, self._ends[place])
        return time

    def latest(self, end: float, takes: float) -> float:
        """Return the last start of a free period of this length that ends in time."""
        start = end - takes
        for place in range(bisect_left(self._starts, end) - 1, -1, -1):
            if self._ends[place] <= start:
                break
            start = min(start, self._starts[place] - takes)
        return start

    def take(self, start: float, takes: float) -> None:
        """Mark the lane as busy from then on for this long; do nothing for a length of 0."""
        if takes > 0:
            place = bisect_left(self._starts, start)
            self._starts.insert(place, start)
            self._ends.insert(place, start + takes)

    def release(self, start: float, takes: float) -> None:
        """Undo `take` with the same arguments."""
        if takes > 0:
            place = bisect_left(self._starts, start)
            del self._starts[place], self._ends[place]


class Lanes:
    """The lanes of all devices."""

    def __init__(self, engine: CopyEngine) -> None:
        self._two_streams = engine.streams == 2
        self._group = {device: number for number, group in enumerate(engine.shared) for device in group}
        self._lanes: dict[tuple[str, int, bool], Lane] = {}

    def _of(self, device: int, direction: bool) -> Sequence[Lane]:
        keys = [("stream", device, self._two_streams and direction)]
        if device in self._group:
            keys.append(("link", self._group[device], direction))
        return [self._lanes.setdefault(key, Lane()) for key in keys]

    def earliest(self, device: int, direction: bool, time: float, takes: float) -> float:
        """As `Lane.earliest`, on all lanes that a copy needs."""
        lanes, found = self._of(device, direction), None
        while found != time:
            found = time
            for lane in lanes:
                time = lane.earliest(time, takes)
        return time

    def latest(self, device: int, direction: bool, end: float, takes: float) -> float:
        """As `Lane.latest`."""
        lanes, start = self._of(device, direction), end - takes
        found = None
        while found != start:
            found = start
            for lane in lanes:
                start = lane.latest(start + takes, takes)
        return start

    def take(self, device: int, direction: bool, start: float, takes: float) -> None:
        """As `Lane.take`."""
        for lane in self._of(device, direction):
            lane.take(start, takes)

    def release(self, device: int, direction: bool, start: float, takes: float) -> None:
        """As `Lane.release`."""
        for lane in self._of(device, direction):
            lane.release(start, takes)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy as its device issues it. behind: for a copy back, the number of the copy that it needs."""

    device: int
    direction: bool
    issued: float
    takes: float
    behind: int | None = None


def ends_of(copies: Sequence[Copy], engine: CopyEngine) -> list[float]:
    """Return when copies end that each device issues in the given order.

    A stream runs its copies in that order; a link carries one at a time in each direction, first come, first served.
    """
    two_streams = engine.streams == 2
    group = {device: number for number, devices in enumerate(engine.shared) for device in devices}
    streams: defaultdict[tuple[int, bool], deque[int]] = defaultdict(deque)  # the first one runs, or waits
    links: defaultdict[tuple[int, bool], deque[int]] = defaultdict(deque)  # the first one is on the link
    waiting: dict[int, int] = {}
    ends = [inf] * len(copies)
    events = [(copy.issued, number, False) for number, copy in enumerate(copies)]
    heapify(events)

    def stream(number: int) -> deque[int]:
        copy = copies[number]
        return streams[copy.device, two_streams and copy.direction]

    def first(number: int, now: float) -> None:
        copy = copies[number]
        if copy.behind is not None and ends[copy.behind] == inf:
            waiting[copy.behind] = number
            return
        if copy.device in group:
            line = links[group[copy.device], copy.direction]
            line.append(number)
            if len(line) > 1:
                return
        heappush(events, (now + copy.takes, number, True))

    while events:
        now, number, over = heappop(events)
        line = stream(number)
        if not over:
            line.append(number)
            if len(line) == 1:
                first(number, now)
            continue
        ends[number] = now
        line.popleft()
        copy = copies[number]
        if copy.device in group:
            others = links[group[copy.device], copy.direction]
            others.popleft()
            if others:
                heappush(events, (now + copies[others[0]].takes, others[0], True))
        if number in waiting:
            first(waiting.pop(number), now)
        if line:
            first(line[0], now)
    return ends
