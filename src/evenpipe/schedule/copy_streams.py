"""Copies to the host and back, queued on streams and links.

A stream runs its copies in the order in which its device issued them; a device has one stream, or one per direction.
Devices may share one link to the host, which carries one copy at a time per direction, first come, first served.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from .links import CopyEngine

Line = tuple[int, bool]
"""Device, or number of a shared link, and direction: True for copies back to the device."""


class CopyStreams:
    """The queues of all devices. Copies are identified by numbers.

    Args:
        place_of: returns the device of a copy, and whether it loads.
        waits: returns how many other copies a copy still waits for, such as the copy that saved the data it loads.
        begin: called with a copy that begins, and the time.
        held_up: called with a copy that had to wait, "engine" or "link", and the copy that occupied it.
    """

    def __init__(
        self,
        engine: CopyEngine,
        place_of: Callable[[int], Line],
        waits: Callable[[int], int],
        begin: Callable[[int, float], None],
        held_up: Callable[[int, str, int], None] = lambda *_: None,
    ) -> None:
        self._two_streams, self._link_of = engine.streams == 2, engine.link_of
        self._place_of, self._waits, self._begin, self._held_up = place_of, waits, begin, held_up
        self._streams: defaultdict[Line, deque[int]] = defaultdict(deque)  # the first copy runs, or waits for its link
        self._links: defaultdict[Line, deque[int]] = defaultdict(deque)  # the first copy is on the link

    def submit(self, number: int, now: float) -> None:
        """Queue a copy that its device has issued."""
        line = self._stream(number)
        line.append(number)
        if len(line) == 1:
            self._first(number, now)

    def unblocked(self, number: int, now: float) -> None:
        """Record that a copy, which may not have been issued yet, no longer waits for others."""
        line = self._stream(number)
        if line and line[0] == number:
            self._first(number, now)

    def done(self, number: int, now: float) -> None:
        """Record the end of a copy."""
        link, stream = self._link(number), self._stream(number)
        if link is not None:
            link.popleft()
            if link:
                self._held_up(link[0], "link", number)
                self._begin(link[0], now)
        stream.popleft()
        if stream:
            self._held_up(stream[0], "engine", number)
            self._first(stream[0], now)

    def _first(self, number: int, now: float) -> None:
        """Start the first copy of a stream, or queue it on its link, unless it has to wait for others."""
        if self._waits(number):
            return
        link = self._link(number)
        if link is not None:
            link.append(number)
            if len(link) > 1:
                return
        self._begin(number, now)

    def _stream(self, number: int) -> deque[int]:
        device, loads = self._place_of(number)
        return self._streams[device, self._two_streams and loads]

    def _link(self, number: int) -> deque[int] | None:
        device, loads = self._place_of(number)
        return self._links[self._link_of[device], loads] if device in self._link_of else None
