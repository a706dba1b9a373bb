"""When copies to the host and back can run: lanes that carry one copy at a time.

A copy needs the stream of its device (one for both directions, or one per direction) and, if devices share a link to
the host, that link in its direction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from evenpipe.schedule.copy_streams import CopyStreams
from evenpipe.schedule.links import CopyEngine

OUT, BACK = False, True
"""Directions: to the host, and back to the device."""


class Lane:
    """Non-overlapping busy times of a lane."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def earliest(self, time: float, takes: float) -> float:
        """The earliest start, at or after `time`, of a free period of length `takes`."""
        for index in range(bisect_right(self._ends, time), len(self._starts)):
            if time + takes <= self._starts[index]:
                break
            time = max(time, self._ends[index])
        return time

    def latest(self, end: float, takes: float) -> float:
        """The latest start of a free period of length `takes` that ends by `end`."""
        start = end - takes
        for index in range(bisect_left(self._starts, end) - 1, -1, -1):
            if self._ends[index] <= start:
                break
            start = min(start, self._starts[index] - takes)
        return start

    def take(self, start: float, takes: float) -> None:
        """Mark the lane as busy for `takes` from `start`; do nothing for a length of 0."""
        if takes > 0:
            index = bisect_left(self._starts, start)
            self._starts.insert(index, start)
            self._ends.insert(index, start + takes)

    def release(self, start: float, takes: float) -> None:
        """Undo `take` with the same arguments."""
        if takes > 0:
            index = bisect_left(self._starts, start)
            del self._starts[index], self._ends[index]


class Lanes:
    """The lanes of all devices."""

    def __init__(self, engine: CopyEngine) -> None:
        self._two_streams = engine.streams == 2
        self._link_of = engine.link_of
        self._lanes: dict[tuple[str, int, bool], Lane] = {}

    def _of(self, device: int, direction: bool) -> Sequence[Lane]:
        keys = [("stream", device, self._two_streams and direction)]
        if device in self._link_of:
            keys.append(("link", self._link_of[device], direction))
        return [self._lanes.setdefault(key, Lane()) for key in keys]

    def earliest(self, device: int, direction: bool, time: float, takes: float) -> float:
        """As `Lane.earliest`, on all lanes that a copy needs."""
        lanes, previous = self._of(device, direction), None
        while previous != time:
            previous = time
            for lane in lanes:
                time = lane.earliest(time, takes)
        return time

    def latest(self, device: int, direction: bool, end: float, takes: float) -> float:
        """As `Lane.latest`."""
        lanes, start = self._of(device, direction), end - takes
        previous = None
        while previous != start:
            previous = start
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
    """One copy as its device issues it. predecessor: for a copy back, the number of the copy that it needs."""

    device: int
    direction: bool
    issued: float
    takes: float
    predecessor: int | None = None


def ends_of(copies: Sequence[Copy], engine: CopyEngine) -> list[float]:
    """When copies end if each device issues its copies in the given order."""
    ends = [inf] * len(copies)
    following = {copy.predecessor: number for number, copy in enumerate(copies) if copy.predecessor is not None}
    events = [(copy.issued, number, False) for number, copy in enumerate(copies)]
    heapify(events)

    def waits(number: int) -> bool:
        predecessor = copies[number].predecessor
        return predecessor is not None and ends[predecessor] == inf

    def begin(number: int, now: float) -> None:
        heappush(events, (now + copies[number].takes, number, True))

    stream_keys = [(copy.device, copy.direction) for copy in copies]
    streams = CopyStreams(engine, stream_keys.__getitem__, waits, begin)
    while events:
        now, number, over = heappop(events)
        if not over:
            streams.submit(number, now)
            continue
        ends[number] = now
        if number in following:
            streams.unblocked(following[number], now)
        streams.done(number, now)
    return ends
