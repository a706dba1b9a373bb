"""The pending waits of a process: of its main thread, or else of its GPU."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from evenpipe.processes.signs import Board, Waiting

LATE_SECONDS = 1.0
"""How far a wait on the host may exceed its limit before the watch ends it: normally the wait itself raises."""


@dataclass(frozen=True, slots=True)
class _DeviceWait:
    waiting: Waiting
    is_done: Callable[[], bool]
    limit_seconds: float


class PendingWaits:
    """The waits of this process: the main thread announces them, and the watch's thread reads them."""

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

    def move_to_device(self, is_done: Callable[[], bool] | None, limit_seconds: float) -> None:
        """The main thread continues while the GPU waits until `is_done()`; None: the GPU's wait is not watched."""
        if self._waiting is not None and is_done is not None:
            self._on_device.append(_DeviceWait(self._waiting, is_done, limit_seconds))
        self._waiting = None  # the board shows it until the watch finds it done

    @property
    def first(self) -> Waiting | None:
        """The wait of the main thread, or else of the GPU: its first pending transfer."""
        waiting = self._waiting
        with contextlib.suppress(IndexError):  # the watch's thread may remove the last one
            waiting = waiting or self._on_device[0].waiting
        return waiting

    def first_with_limit(self) -> tuple[Waiting, float] | None:
        """Return `first` and its limit in seconds. For the watch's thread."""
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
