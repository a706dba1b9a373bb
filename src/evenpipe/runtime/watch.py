"""The watch: notices that a process died, hangs or failed, and ends all others with one message naming the cause.

Nothing in a process can interrupt a gloo wait, and what gloo raises when a peer dies names no process; after a time-out
the blame even wanders. So each process has a thread that, every quarter of a second,

1. writes a beat into the store: a counter, and what the main thread waits for;
2. looks at the process after it in the ring: gone (same machine), or its beat unchanged for `silence_seconds`? Then it
writes the cause;
3. looks for a cause written by anyone. There is only ever one: the first. Whoever sees it ends, with exit code 3.

A ring is enough, since of any set of dead processes one stands behind a live one; so the cost does not grow with their
number. Beats are compared by change of value against the reader's own clock, and only time during which the reader
itself ran counts: machines' clocks differ, and a whole job may be suspended and continued.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from evenpipe.errors import RunError
from evenpipe.runtime.signs import Beat, Board, Cause, Waiting, cause_of, machine, processes, started

BEAT_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""How long the main thread has to notice a cause; once it has, five times as long to end in its own way."""

EXIT_CODE = 3

BROKEN = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Application timeout caused")
"""What gloo says when a peer is gone or a wait took too long."""


class Watch:
    """One per process. The main thread calls `awaiting` and `arrived` round every wait, `explain` when it fails."""

    def __init__(
        self,
        store: Any | None,
        rank: int = 0,
        world_size: int = 1,
        *,
        silence_seconds: float = 30.0,
        on_cause: Callable[[Watch], None] | None = None,
        board: Board | None = None,
    ) -> None:
        """A watch that does nothing until `start()`.

        store: reached by all processes, with a prefix of this run's own; None for a single process. Clones are used.
        silence_seconds: a process without a beat for this long is given up. Must exceed the longest operation that
            keeps Python's interpreter lock.
        on_cause: called once, on any thread, as soon as `cause` is known. Default: the message goes to stderr if the
            main thread is stuck and the watch has to end the process.
        board: where to show what this process waits for to whoever started it.
        """
        self.rank, self.world_size, self.silence_seconds = rank, world_size, silence_seconds
        self.cause: Cause | None = None
        self.waiting: Waiting | None = None
        self._store: Any = store
        self._beat_seconds = BEAT_SECONDS * max(1.0, world_size / 256)  # all beats end in one store
        self._on_cause = on_cause
        self._board = board
        self._beat = Beat(0, machine(), os.getpid(), started(os.getpid()) or "")
        self._cause_known = threading.Event()
        self._learning = threading.Lock()
        self._main_knows = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to beat. All processes start at about the same time."""
        if self._store is None or self.world_size == 1:
            return
        self._store = self._store.clone()  # one client serves one request at a time, and others may block in theirs
        self._store.set(f"beat/{self.rank}", self._beat.dump())
        self._thread = threading.Thread(
            target=self._run, args=(self._store.clone(),), name="evenpipe-watch", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Ends the watch of a process that has done its work: its silence from now on is no alarm."""
        if self._thread is None or os.getpid() != self._beat.pid:  # a forked child has no thread, and not its sockets
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if self.cause is None:
            with contextlib.suppress(RuntimeError):  # the store may have gone with the process that held it
                self._store.set(f"beat/{self.rank}", replace(self._beat, count=self._beat.count + 1, done=True).dump())

    # -- called by the main thread -----------------------------------------------------------------

    def awaiting(self, what: str, needed_by: str, communicator: str, peers: tuple[int, ...]) -> None:
        """Publishes what the main thread is about to wait for.

        Raises:
            RunError: the run is known to have failed already.
        """
        self.waiting = Waiting(what, needed_by, communicator, peers)
        if self._board is not None:
            self._board.show(self.rank, self.waiting)
        if self._cause_known.is_set():
            raise self._error()

    def arrived(self) -> None:
        """The wait is over."""
        self.waiting = None
        if self._board is not None:
            self._board.clear(self.rank)

    @contextlib.contextmanager
    def during(self, what: str, communicator: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Round a blocking call of torch.distributed: announces it, and raises what `explain` finds when it fails."""
        self.awaiting(what, "", communicator, peers)
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error) from error
        self.arrived()

    def explain(self, error: Exception) -> RunError:
        """The error to raise when a wait failed with `error`: finds the cause, or settles what it is.

        A broken connection alone does not tell who is at fault, as the peer may be a victim too. So this waits for a
        cause, up to the time after which a silent process is found, and only then blames the peer itself.
        """
        self._main_knows = True
        waiting = self.waiting
        if self._thread is None:
            return RunError(f"process {self.rank}, awaiting {waiting}: {error}")
        if "timed out" in str(error).lower() and not self._cause_known.is_set():
            self._settle(self._stuck(waiting))
        peers = () if waiting is None else waiting.peers
        deadline = time.monotonic() + self.silence_seconds + 1
        while not self._cause_known.wait(0.05):
            try:
                dead = [cause for peer in peers if (cause := self._death_of(peer, self._store))]
            except RuntimeError as lost:
                dead = [_store_lost(lost)]
            if dead:
                self._settle(dead[0])
            elif time.monotonic() > deadline:
                origin = peers[0] if peers else self.rank
                text = f"{processes(peers)} broke the connection" if peers else f"process {origin} lost a connection"
                self._settle(Cause("dead", origin, f"{text} ({error})"))
        return self._error()

    def report_exception(self, error: BaseException) -> None:
        """Tells all others why this process fails, unless there is a cause already. For its outermost handler."""
        self._main_knows = True
        if self._thread is None or self._cause_known.is_set() or os.getpid() != self._beat.pid:
            return
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in BROKEN):
            self.explain(error)  # from an operation that was not announced: this process may be a victim
        else:
            self._settle(cause_of(error, self.rank))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, store: Any) -> None:
        neighbour, last_value, silent_seconds, lost_seconds = self._after(self.rank), "", 0.0, 0.0
        last_time = time.monotonic()
        while not self._stop.wait(self._beat_seconds):
            now = time.monotonic()
            elapsed = min(now - last_time, 2 * self._beat_seconds)  # a longer gap: this process was stopped itself
            last_time = now
            try:
                self._beat = replace(self._beat, count=self._beat.count + 1, waiting=self.waiting)
                store.set(f"beat/{self.rank}", self._beat.dump())
                if store.check(["cause"]):
                    self._learn(Cause(**json.loads(store.get("cause"))))
                    break
                if neighbour == self.rank:
                    continue
                value = self._value(neighbour, store)
                silent_seconds = 0.0 if value != last_value else silent_seconds + elapsed
                last_value, lost_seconds = value, 0.0
                if value and Beat.load(value).done:
                    neighbour, last_value, silent_seconds = self._after(neighbour), "", 0.0
                elif death := self._death_of(neighbour, store):
                    self._settle(death, store)
                elif silent_seconds > self.silence_seconds:
                    self._settle(self._silence_of(neighbour, value), store)
                    self._kill(value)
            except RuntimeError as error:
                # The store went with its host. A process that computes may well come to its end; one that waits will
                # not.
                lost_seconds = lost_seconds + elapsed if self.waiting is not None else 0.0
                if lost_seconds > self.silence_seconds:
                    self._learn(_store_lost(error))
                    break
        else:
            return
        self._end()

    def _after(self, rank: int) -> int:
        return (rank + 1) % self.world_size

    def _end(self) -> None:
        """Ends the process from this thread if the main thread does not."""
        if self._stop.wait(GRACE_SECONDS) or (self._main_knows and self._stop.wait(5 * GRACE_SECONDS)):
            return
        if self._on_cause is None:
            print(f"evenpipe: {self._error()}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)

    # -- causes ------------------------------------------------------------------------------------

    def _settle(self, cause: Cause, store: Any = None) -> None:
        """Writes the cause, unless another was written before: then that one holds."""
        try:
            held = (store or self._store).compare_set("cause", "", json.dumps(asdict(cause)))
            self._learn(Cause(**json.loads(held)))
        except RuntimeError:
            self._learn(cause)

    def _learn(self, cause: Cause) -> None:
        with self._learning:
            if self._cause_known.is_set():
                return
            self.cause = cause
            if self._on_cause is not None:
                self._on_cause(self)
            self._cause_known.set()

    def _error(self) -> RunError:
        assert self.cause is not None
        self._main_knows = self._main_knows or threading.current_thread() is threading.main_thread()
        if self.cause.origin == self.rank or self.waiting is None:
            return RunError(self.cause.text)
        return RunError(f"{self.cause.text}; process {self.rank} was awaiting {self.waiting}")

    def _value(self, rank: int, store: Any) -> str:
        """The beat of a process as it stands in the store; empty before its first one. Never blocks."""
        key = f"beat/{rank}"
        return store.get(key).decode() if store.check([key]) else ""

    def _death_of(self, rank: int, store: Any) -> Cause | None:
        """A cause, if that process ran on this machine and is no more. Elsewhere only silence tells."""
        value = self._value(rank, store)
        if not value:
            return None
        beat = Beat.load(value)
        if beat.machine != self._beat.machine or started(beat.pid) == beat.started:
            return None
        if Beat.load(self._value(rank, store)).done:  # read again after the look: "done" is written before the end
            return None
        return Cause("dead", rank, f"process {rank} (pid {beat.pid}) has died: killed, out of memory or crashed")

    def _silence_of(self, rank: int, value: str) -> Cause:
        what = f"process {rank} gave no sign of life for {self.silence_seconds:g} s"
        if not value:
            return Cause("silent", rank, what)
        beat = Beat.load(value)
        doing = f"awaited {beat.waiting}" if beat.waiting else "was not waiting for any process"
        return Cause("silent", rank, f"{what} (pid {beat.pid}; it {doing})")

    def _kill(self, value: str) -> None:
        """Ends a stopped process of this machine, which would outlive the run and hold up whoever started it."""
        beat = Beat.load(value) if value else None
        if beat and beat.machine == self._beat.machine and started(beat.pid) == beat.started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGKILL)

    def _stuck(self, waiting: Waiting | None) -> Cause:
        """A wait timed out, nobody died: follows who waits for whom to the one that does not, or round the circle."""
        text, origin, seen = f"process {self.rank} timed out awaiting {waiting}", self.rank, {self.rank}
        while waiting is not None:
            # In a collective all wait for the same; of interest is who does something else.
            states = {peer: self._value(peer, self._store) for peer in waiting.peers}
            beats = {peer: Beat.load(value) for peer, value in states.items() if value}
            others = [peer for peer, beat in beats.items() if not _same(beat.waiting, waiting)]
            if not others:
                break
            origin = others[0]
            if origin in seen:
                text += f", a circle back to process {origin}"
                break
            seen.add(origin)
            waiting = beats[origin].waiting
            state = "has finished" if beats[origin].done else f"awaits {waiting}" if waiting else "does not wait"
            text += f"; process {origin} {state}"
        return Cause("stuck", origin, text)


def _store_lost(error: Exception) -> Cause:
    lines = str(error).strip().splitlines()
    holder = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "process 0"
    return Cause("dead", 0, f"{holder} has died, and with it the store of the run ({lines[0] if lines else error!r})")


def _same(one: Waiting | None, other: Waiting) -> bool:
    return one is not None and (one.what, one.communicator) == (other.what, other.communicator)
