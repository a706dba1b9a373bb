"""Requests to stop a run: the program answers the first Ctrl-C or SIGTERM at the end of a step, and a second one ends
the process at once.

Processes of `launch` ignore these signals: a terminal and Slurm send them to all processes, so only the launcher
reacts: it writes the request to the store, and ends the processes at the second signal. Elsewhere each process reacts
itself, on the thread of the watch, because the main thread may be blocked in a wait. Under torchrun SIGTERM also
arrives when another process has failed, so the watch looks for such a cause first.

Processes notice the request at different times but must stop at the same step: gather `StopRequest.signal_number`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from evenpipe.processes.bell import STOPS
from evenpipe.processes.store import Store, StoreError
from evenpipe.processes.watch import FAREWELL_SECONDS
from evenpipe.processes.worker import STORE_FOLDER, Worker

LISTENING, ASKED = "stops when asked", "asked to stop"
"""Keys in the store of `launch`: all processes can stop on request; the request, with the signal's number."""


class StopForwarder:
    """The launcher's side: forwards the first signal once the processes can stop on request."""

    def __init__(self, store: Store, on_stop: Callable[[int], None] | None) -> None:
        """on_stop: called with the signal's number when it has been forwarded; None: signals are not forwarded."""
        self._store, self._on_stop = store, on_stop
        self.accepted = False

    def accept(self, number: int) -> bool:
        """Forward the signal if possible; return whether it was forwarded. For a signal handler."""
        if self.accepted or self._on_stop is None or number not in STOPS or not self._store.has([LISTENING]):
            return False
        with contextlib.suppress(StoreError):  # disk full: the signal ends the processes
            self._store.write(ASKED, str(int(number)))
            self.accepted = True
            self._on_stop(number)
        return self.accepted


class StopRequest:
    """The request to stop this process. Create it on the main thread, once per process."""

    def __init__(self, worker: Worker, on_signal: Callable[[int, bool], None]) -> None:
        """Handle signals from now on: the first one no longer ends the process.

        on_signal: called with the signal's number and whether the process ends at once, on any thread. Not called in
            processes of `launch`, which calls its own `on_stop`.
        """
        self._worker, self._on_signal = worker, on_signal
        self._launched = STORE_FOLDER in os.environ
        self._number, self._received_at = 0, float("inf")
        self._previous_handlers = {}
        if threading.current_thread() is not threading.main_thread():
            return
        if self._launched or not worker.watch.handle_stop_signals(on_signal):
            handler = signal.SIG_IGN if self._launched else self._handle
            self._previous_handlers = {number: signal.signal(number, handler) for number in STOPS}

    def announce(self) -> None:
        """Tell the launcher that processes can stop on request. Called by one process, once all have created a
        `StopRequest`."""
        if self._launched:
            self._worker.mark(LISTENING)

    @property
    def signal_number(self) -> int:
        """Return the number of the signal that asked this process to stop; 0 if there was none."""
        if self._launched and self._worker.store is not None:
            return int(self._worker.store.read(ASKED) or 0)
        return self._number or self._worker.watch.stop_signal

    def close(self) -> None:
        """Stop handling requests. The launcher of `launch` still handles signals."""
        self._worker.watch.handle_stop_signals(None)
        if not self._launched:
            for number, previous in self._previous_handlers.items():
                signal.signal(number, previous)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Signal handler of a process without others."""
        now = time.monotonic()
        if not self._number:
            self._number, self._received_at = number, now
            self._on_signal(number, False)
        elif now > self._received_at + FAREWELL_SECONDS:  # before, it is the same request, from torchrun's agent
            self._on_signal(number, True)
            os._exit(128 + number)
