"""Ask a run to stop: the first Ctrl-C or SIGTERM is a request that the program fulfils at the end of a step, and a
second one ends the process at once.

Processes of `launch` ignore these signals: a terminal and Slurm send them to all processes, so only the launcher
reacts, writes the request to the store, and ends the processes itself at the second signal. Elsewhere each process
reacts itself, on the thread of the watch, because the main thread is blocked while it waits. Under torchrun SIGTERM
also arrives because another process has failed, so the watch looks for such a cause first.

Processes notice the request at different times but must stop at the same step: gather `StopRequest.asked`.
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
"""Texts in the store of `launch`: all processes can stop on request; and, with the number of the signal, the
request."""


class Wish:
    """The launcher's side: passes the first signal on, once the processes can stop on request."""

    def __init__(self, store: Store, on_stop: Callable[[int], None] | None) -> None:
        """on_stop: called with the signal's number when it has been passed on; None: signals are not passed on."""
        self._store, self._on_stop = store, on_stop
        self.accepted = False

    def accept(self, number: int) -> bool:
        """Return whether this signal ends nothing. For a signal handler."""
        if self.accepted or self._on_stop is None or number not in STOPS or not self._store.has([LISTENING]):
            return False
        with contextlib.suppress(StoreError):  # disk full: the signal ends the processes
            self._store.write(ASKED, str(int(number)))
            self.accepted = True
            self._on_stop(number)
        return self.accepted


class StopRequest:
    """The request to stop this process. Create it on the main thread, once per process."""

    def __init__(self, worker: Worker, say: Callable[[int, bool], None]) -> None:
        """From now on the first signal no longer ends the process.

        say: called with the signal's number, and whether the process ends at once; on any thread. Not in processes of
            `launch`: there the caller of `launch` is told.
        """
        self._worker, self._say = worker, say
        self._launched = STORE_FOLDER in os.environ
        self._number, self._heard = 0, float("inf")
        self._before = {}
        if threading.current_thread() is not threading.main_thread():
            return
        if self._launched or not worker.watch.hear_stops(say):
            handler = signal.SIG_IGN if self._launched else self._hear
            self._before = {number: signal.signal(number, handler) for number in STOPS}

    def announce(self) -> None:
        """Tell the launcher that processes can stop on request. Called by one process, after all have made a
        `StopRequest`."""
        if self._launched:
            self._worker.mark(LISTENING)

    @property
    def asked(self) -> int:
        """Return the number of the signal that asked this process to stop; 0 if there was none."""
        if self._launched and self._worker.store is not None:
            return int(self._worker.store.read(ASKED) or 0)
        return self._number or self._worker.watch.asked_to_stop

    def close(self) -> None:
        """Stop handling requests. The launcher of `launch` still handles signals."""
        self._worker.watch.hear_stops(None)
        if not self._launched:
            for number, before in self._before.items():
                signal.signal(number, before)

    def _hear(self, number: int, _: FrameType | None) -> None:
        """Handler in a process that is alone."""
        now = time.monotonic()
        if not self._number:
            self._number, self._heard = number, now
            self._say(number, False)
        elif now > self._heard + FAREWELL_SECONDS:  # an earlier one is the same request, passed on by torchrun's agent
            self._say(number, True)
            os._exit(128 + number)
