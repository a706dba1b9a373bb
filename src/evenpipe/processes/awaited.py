"""What a process waits for: its main thread, or else its GPU."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from evenpipe.processes.signs import Board, Waiting

LATE_SECONDS = 1.0
"""How much longer than its limit a wait on the host may last before the watch ends it: normally the wait itself
raises."""


@dataclass(frozen=True, slots=True)
class _DeviceWait:
    waiting: Waiting
    is_done: Callable[[], bool]
    limit_seconds: float


class Awaited:
    """The announced waits of one process. The main thread announces them, and the watch's thread looks."""

    def __init__(self, rank: int, board: Board | None) -> None:
        """board: shows the launcher what this process waits for."""
        self._rank, self._board = rank, board
        self._waiting: Waiting | None = None
        self._limit_seconds = 0.0
        self._on_device: deque[_DeviceWait] = deque()

    def begin(self, waiting: Waiting, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._waiting = waiting
        if self._board is not None:
            self._board.show(self._rank, waiting)

    def end(self) -> None:
        self._waiting = None
        if self._board is not None:
            self._board.clear(self._rank)

    def pass_on(self, is_done: Callable[[], bool] | None, limit_seconds: float) -> None:
        """The main thread goes on, and the GPU waits until `is_done()`; None: nobody looks whether it does."""
        if self._waiting is not None and is_done is not None:
            self._on_device.append(_DeviceWait(self._waiting, is_done, limit_seconds))
        self._waiting = None  # the board keeps showing it until the watch knows better

    @property
    def first(self) -> Waiting | None:
        """What the main thread waits for, or else the GPU: its first pending transfer."""
        waiting = self._waiting
        with contextlib.suppress(IndexError):  # the other thread may remove the last one
            waiting = waiting or self._on_device[0].waiting
        return waiting

    def limited(self) -> tuple[Waiting, float] | None:
        """Return the same, and its limit in seconds. For the watch's thread."""
        if (waiting := self._waiting) is not None:
            return waiting, self._limit_seconds + LATE_SECONDS
        while self._on_device:
            first = self._on_device[0]
            if not first.is_done():
                return first.waiting, first.limit_seconds
            self._on_device.popleft()
            if self._board is not None and self._waiting is None and not self._on_device:
                self._board.clear(self._rank)
        return None
