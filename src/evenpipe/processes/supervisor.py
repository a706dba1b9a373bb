"""The parent of local processes: waits for them, notices one that fails or is stopped, and ends the others.

The processes watch each other (`watch`) and settle which one was at fault; only the parent can

- kill a stopped process (SIGSTOP), which ignores SIGTERM, as soon as another one has failed, or after the silence
  limit, even before its watch began or after its work was done;
- kill the last working process if it gives no sign of life after its peers have finished;
- after a failure, give the others `FAREWELL_SECONDS` to end on their own, then send SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from evenpipe.processes.signs import Beat, is_stopped
from evenpipe.processes.store import Store

LOOK_SECONDS = 0.25
FAREWELL_SECONDS = 1.0
"""Time from the first failure to SIGTERM."""
TERMINATION_SECONDS = 7.0
"""Time from SIGTERM to SIGKILL: the watch ends a process with its own handler, blocked in a wait, within four
seconds."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the first process that failed ended."""

    rank: int
    pid: int
    exit_code: int
    """As in multiprocessing: -9 for SIGKILL."""
    why: str = ""
    """Set if the parent killed it: "was stopped for 30 s"."""


class Beats:
    """The beats of the processes, as the parent sees them."""

    def __init__(self, store: Store, processes: int) -> None:
        self._store = store
        self._last = [""] * processes

    def is_silent(self, rank: int) -> bool:
        """Return whether that process has begun to beat, has not finished, and has not beaten since the last call.

        False after the run has failed: the processes then end, and stop beating.
        """
        text = self._store.read(f"beat/{rank}") or ""
        previous, self._last[rank] = self._last[rank], text
        beat = Beat.load(text, len(self._last))
        return text == previous and beat is not None and not beat.done and not self._store.has(["cause"])


def supervise(processes: Sequence[BaseProcess], beats: Beats, *, silence_seconds: float) -> Ending | None:
    """Wait until all processes have ended; return how the first failed one ended, or None if none failed.

    processes: started, by rank.
    silence_seconds: how long a process may be stopped or silent. Only time during which the parent runs counts.
    """
    first: Ending | None = None
    killed: tuple[int, str] | None = None
    alive = dict(enumerate(processes))
    stopped, silent = dict.fromkeys(alive, 0.0), dict.fromkeys(alive, 0.0)
    last_time = time.monotonic()
    terminate = kill = float("inf")
    while alive:
        wait([process.sentinel for process in alive.values()], LOOK_SECONDS)
        now = time.monotonic()
        elapsed, last_time = min(now - last_time, 2 * LOOK_SECONDS), now
        ended = {rank: process for rank, process in alive.items() if process.exitcode is not None}
        for rank in ended:
            del alive[rank]
        failed = [rank for rank, process in ended.items() if process.exitcode]
        if first is None and failed:
            # If several end at once, a killed or crashed one is the cause, and the others end because of it.
            rank = min(failed, key=lambda rank: (ended[rank].exitcode or 0) > 0)
            pid, exit_code = ended[rank].pid, ended[rank].exitcode
            assert pid is not None and exit_code is not None
            first = Ending(rank, pid, exit_code, killed[1] if killed is not None and killed[0] == rank else "")
            terminate, kill = now + FAREWELL_SECONDS, now + FAREWELL_SECONDS + TERMINATION_SECONDS
        for rank, process in alive.items():
            assert process.pid is not None
            stopped[rank] = stopped[rank] + elapsed if is_stopped(process.pid) else 0.0
            silent[rank] = silent[rank] + elapsed if first is None and beats.is_silent(rank) else 0.0
            if stopped[rank] and (first is not None or killed is not None):
                send(process, signal.SIGKILL)
            elif max(stopped[rank], silent[rank]) > silence_seconds + 4 * LOOK_SECONDS:  # its peers are quicker
                state = "was stopped" if stopped[rank] else "gave no sign of life"
                killed = rank, f"{state} for {silence_seconds:g} s"
                send(process, signal.SIGKILL)
            elif now > terminate:
                send(process, signal.SIGKILL if now > kill else signal.SIGTERM)
        if now > terminate:
            terminate = kill  # one SIGTERM each
    return first


def end(processes: Sequence[BaseProcess], seconds: float) -> None:
    """End all started processes, by SIGTERM and after `seconds` by SIGKILL; return when they have ended."""
    started = [process for process in processes if process.pid is not None]
    deadline = time.monotonic() + seconds
    for process in started:
        send(process, signal.SIGKILL if is_stopped(process.pid or 0) else signal.SIGTERM)
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        send(process, signal.SIGKILL)
    for process in started:
        process.join()


def send(process: BaseProcess, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended."""
    if process.exitcode is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
