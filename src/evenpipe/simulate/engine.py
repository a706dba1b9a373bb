"""Copy engines, which run O and L beside compute.

Each device has one stream, or one per direction. A stream runs its copies in the order in which the device issued
them. Devices behind one link to the host share it: per direction it carries one copy at a time, first come, first
served.
"""

from __future__ import annotations

from collections import deque
from heapq import heappush
from typing import TYPE_CHECKING

from evenpipe.schedule import CopyEngine, Kind

from .work import Work

if TYPE_CHECKING:
    from .loop import Loop

ENGINE, LINK = "engine", "link"

Stream = tuple[int, bool]
"""Device, or number of a shared link, and direction: whether it loads."""


class Engines:
    """The copy engines of all devices, as part of a `Loop`, which keeps the times."""

    def __init__(self, work: Work, engine: CopyEngine, loop: Loop) -> None:
        self.work, self.loop = work, loop
        self.two_streams = engine.streams == 2
        self.group = {device: number for number, group in enumerate(engine.shared) for device in group}
        self.streams: dict[Stream, deque[int]] = {}  # the first copy runs, or waits for its link
        self.links: dict[Stream, deque[int]] = {}  # the first copy is on the link

    def submit(self, number: int, now: float) -> None:
        """Queue copy `number`, which its device has issued."""
        line = self.streams.setdefault(self._stream(number), deque())
        line.append(number)
        if len(line) == 1:
            self._first(number, now)

    def unblocked(self, number: int, now: float) -> None:
        """Mark the activations that L `number` loads as copied to the host."""
        line = self.streams.get(self._stream(number))
        if line and line[0] == number:
            self._first(number, now)

    def done(self, number: int, now: float) -> None:
        """Process the end of copy `number`."""
        loop = self.loop
        loop.end[number] = now
        for waiting in self.work.beside[number]:
            loop.arrived(waiting, number, now)
        link = self._link(number)
        if link is not None:
            line = self.links[link]
            line.popleft()
            if line:
                loop.why[line[0]], loop.who[line[0]] = LINK, number
                self._begin(line[0], now)
        line = self.streams[self._stream(number)]
        line.popleft()
        if line:
            loop.why[line[0]], loop.who[line[0]] = ENGINE, number
            self._first(line[0], now)

    def _first(self, number: int, now: float) -> None:
        """Move `number`, the first of its stream, on to its link if it need not wait."""
        if self.loop.needs[number]:
            return
        link = self._link(number)
        if link is not None:
            line = self.links.setdefault(link, deque())
            line.append(number)
            if len(line) > 1:
                return
        self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        self.loop.start[number] = now
        heappush(self.loop.heap, (now + self.work.takes[number], number))

    def _loads(self, number: int) -> bool:
        return self.work.items[number].kind is Kind.L

    def _stream(self, number: int) -> Stream:
        return self.work.device_of[number], self.two_streams and self._loads(number)

    def _link(self, number: int) -> Stream | None:
        group = self.group.get(self.work.device_of[number])
        return None if group is None else (group, self._loads(number))
