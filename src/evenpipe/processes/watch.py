"""The watch notices that a process died, hangs or failed, and ends all others with one message that names the cause.

Nothing in a process can interrupt a gloo wait, and gloo's error names no process when a peer dies, and may blame the
wrong one after a timeout. So each process has a thread that, every quarter of a second,

1. writes a beat to the store: a counter, and what the main thread waits for;
2. checks the next process in the ring: if it has died (same machine), or its beat is unchanged for `silence_seconds`,
   it writes the cause;
3. looks for a cause written by any process. There is only one, the first. A process of evenpipe (`owner`) that sees it
   ends with exit code 3; in any other, it is raised where the main thread waits.

A ring suffices, because in any set of dead processes one follows a live one, so the cost does not grow with the number
of processes. The reader measures by its own clock how long a beat is unchanged, and counts only time during which it
ran itself: machines' clocks differ, and a whole job may be suspended and continued.

The watch itself must not wait forever. A store that does not answer for `silence_seconds`, because its machine was cut
off, is a cause; so is a wait that exceeds its own limit, whatever the library does.

Under torchrun there are three more cases. Its agent sends SIGTERM to all processes as soon as it has seen one fail,
often before the others know which one: so the watch handles that signal, looks for the cause, prints it, and ends. If
there is no cause, and the program can stop on request (`stopping`), the signal was such a request. If a process ends
without an error while others need it (also by `sys.exit`), they name it. And if the agent itself has died, each process
ends itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from evenpipe.errors import InputError, RunError
from evenpipe.given import plain_lines
from evenpipe.processes.bell import STOPS, Bell
from evenpipe.processes.names import position_of, process, processes, show_positions
from evenpipe.processes.owner import Owner
from evenpipe.processes.peers import Peers
from evenpipe.processes.pending_waits import PendingWaits
from evenpipe.processes.proof import AWAITED, find_strangers
from evenpipe.processes.signs import LAUNCHER, Beat, Board, Cause, Waiting, cause_of, machine_id, start_time
from evenpipe.processes.store import Store, StoreError, StoreSilentError

BEAT_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""How long the main thread has to notice a cause."""
OWN_END_SECONDS = 2.0
"""How long it then has to end on its own. With `LATE_SECONDS`, a process ends at most four seconds after the limit of
its wait, whatever hangs."""

FAREWELL_SECONDS = 1.5
"""How long after SIGTERM a process looks for the cause before it treats that signal as the cause, or as a request. A
second signal within that time is the same one: torchrun's agent forwards a signal that a terminal sent to all
processes."""

TOO_LONG = re.compile("[Tt]imed out|wait timeout|Application timeout")
"""Messages of gloo and of the store when a wait took too long."""

BROKEN = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Application timeout caused")
"""gloo's messages when a peer has died or a wait took too long."""

LAUNCHER_DIED = Cause("dead", LAUNCHER, "the launcher of this process has died: killed, out of memory or crashed")


class Watch:
    """One per process. The main thread calls `begin_wait` and `end_wait` around every wait, `explain` when it fails."""

    def __init__(
        self,
        store: Store | None,
        rank: int = 0,
        world_size: int = 1,
        *,
        silence_seconds: float = 30.0,
        timeout_seconds: float = float("inf"),
        owner: Owner | None = None,
        board: Board | None = None,
    ) -> None:
        """A watch that does nothing until `start()`. Create it before processes meet: it opens a new connection to the
        store, which takes seconds if a name server does not answer, and holds the GIL meanwhile.

        store: of this run, reached by all its processes; None for a single process.
        silence_seconds: a process without a beat for this long counts as dead, and so does a store without an answer.
            Must exceed the longest operation that holds the GIL.
        timeout_seconds: default limit of an announced wait.
        owner: may end the process and handle signals. None: neither, in a process that evenpipe does not run.
        board: shows the launcher the position and the wait of this process.
        """
        self.rank, self.world_size, self.silence_seconds = rank, world_size, silence_seconds
        self.others = tuple(peer for peer in range(world_size) if peer != rank)
        self.cause: Cause | None = None
        self.timeout_seconds = timeout_seconds
        self._store = store
        self._store_of_thread = None if store is None else store.clone()
        self._peers: Peers | None = None
        self._board = board
        self._pending_waits = PendingWaits(rank, board)
        self._owner = owner
        self._beat_seconds = BEAT_SECONDS * max(1.0, world_size / 256)  # all beats go to one store
        self._beat = Beat(0, machine_id(), os.getpid(), start_time(os.getpid()) or "")
        self._silent: StoreSilentError | None = None
        """Set while the store does not answer the watch's thread."""
        self._cause_known = threading.Event()
        self._learning = threading.Lock()
        self._main_knows = False
        self.stop_signal = 0
        """The signal that asked this process to stop, after `handle_stop_signals`; 0 for none."""
        self._on_signal: Callable[[int, bool], None] | None = None
        self._stop = threading.Event()
        self._bell: Bell | None = None
        self._thread: threading.Thread | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._interrupts: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start to send beats. All processes start at about the same time."""
        if self._store is None or self.world_size == 1:
            return
        assert self._store_of_thread is not None
        store = self._store_of_thread
        # All processes on all machines access the store at the same time.
        with self._store.longer_limit(self.silence_seconds), store.longer_limit(self.silence_seconds):
            self._store.write(f"beat/{self.rank}", self._beat.dump())
            self._peers = Peers(self._store, self._beat, self.rank, self.world_size)
            peers = Peers(store, self._beat, self.rank, self.world_size)
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, args=(store, peers), name="evenpipe-watch", daemon=True)
        self._thread.start()

    def handle_sigterm(self) -> None:
        """Under torchrun, make an owned process look for the cause on SIGTERM, and end with it, unless the program
        handles that signal itself."""
        if self._bell is not None and self._owner is not None and self._owner.under_torchrun:
            self._bell.ring_on(signal.SIGTERM)

    def finish(self) -> None:
        """End the watch of a process that has done its work: its silence is no alarm from now on."""
        # A forked child has no thread, and does not own its sockets.
        if self._thread is None or os.getpid() != self._beat.pid:
            return
        self._stop.set()
        assert self._bell is not None
        self._bell.ring()
        self._thread.join(None if self._silent is None else BEAT_SECONDS)
        if self._thread.is_alive():  # it waits for the store, and so would this thread
            return
        self._bell.close()
        self._thread = None
        if self.cause is None:
            assert self._store is not None
            with contextlib.suppress(StoreError):  # the store may have ended with the process that held it
                beat = replace(self._beat, count=self._beat.count + 1, done=True)
                self._store.write(f"beat/{self.rank}", beat.dump())
        for store in (self._store, self._store_of_thread):
            if store is not None:
                store.close()

    def handle_stop_signals(self, on_signal: Callable[[int, bool], None] | None) -> bool:
        """Treat the first of the signals STOPS as a request, stored in `stop_signal`, and end the process at once at a
        second one. Return False if the watch does nothing.

        on_signal: called with the signal and whether it ends the process, on the watch's thread. None: no more
            requests.
        """
        self._on_signal = on_signal
        if self._bell is None:
            return False
        if on_signal is not None:
            self._bell.ring_on(*STOPS)
        return True

    # -- called by the main thread -----------------------------------------------------------------

    def begin_wait(
        self,
        label: str,
        needed_by: str,
        communicator: str,
        peers: tuple[int, ...],
        limit_seconds: float | None = None,
    ) -> None:
        """Announce what the main thread is about to wait for.

        limit_seconds: of the wait; default: `timeout_seconds`.

        Raises:
            RunError: the run has failed, as the watch knows already.
        """
        limit_seconds = self.timeout_seconds if limit_seconds is None else limit_seconds
        self._pending_waits.begin(Waiting(label, needed_by, communicator, peers), limit_seconds)
        self.raise_cause()

    def raise_cause(self) -> None:
        """Raise RunError if the watch knows that the run has failed. For a wait that polls."""
        if self._cause_known.is_set():
            raise self._error()

    def end_wait(self) -> None:
        """End the announced wait."""
        self._pending_waits.end()

    def end_wait_when(self, is_done: Callable[[], bool], limit_seconds: float) -> None:
        """Let the main thread continue while a GPU waits, at most this long; no library raises there. The wait is over
        when `is_done()` is True; the watch's thread calls it, so it must neither raise, nor wait, nor call CUDA.

        If the GPU has failed, it stays False. The main thread notices that failure at its next CUDA call, long before
        the limit, and reports it as the cause.
        """
        self._pending_waits.move_to_device(None if self._thread is None else is_done, limit_seconds)

    @property
    def waiting(self) -> Waiting | None:
        """Return the wait of the main thread, or else of the GPU: its first pending transfer."""
        return self._pending_waits.first

    def on_failure(self, record: Callable[[], None]) -> None:
        """Call `record` when the run has failed, before this process ends, on the thread of the watch. Its exceptions
        are ignored."""
        self._on_failure.append(record)

    def interrupt_with(self, interrupt: Callable[[], None]) -> Callable[[], None]:
        """Call `interrupt` when the run has failed and evenpipe does not end this process, so that waits of its main
        thread end and raise the cause. Return a function that cancels this.

        interrupt: called on the thread of the watch, at most once.
        """
        self._interrupts.append(interrupt)
        return lambda: self._interrupts.remove(interrupt)

    @contextlib.contextmanager
    def during(self, label: str, communicator: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Wrap a blocking call of torch.distributed: announce it, and raise the result of `explain` if it fails."""
        self.begin_wait(label, "", communicator, peers)
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error) from error
        except InputError:  # about the received data
            self.end_wait()
            raise
        self.end_wait()

    def show_positions(self, positions: Mapping[int, str]) -> Callable[[], None]:
        """Add the positions of processes to messages, as `names.show_positions`."""
        close = show_positions(positions)
        if self._board is not None:
            self._board.show_position(self.rank, position_of(self.rank))
        return close

    def check_members(self, group: dist.ProcessGroup, name: str, members: Sequence[int]) -> None:
        """Check that the connections of a new gloo group lead to processes of this run. Collective over the group.

        members: global ranks.

        Raises:
            RunError: a stranger has connected in the place of a process.
        """
        secret = None if self._store is None else self._store.secret()
        if secret is None:
            return
        with self.during(f"{AWAITED} {name}", name, tuple(member for member in members if member != self.rank)):
            strangers = find_strangers(group, self.rank, members, secret)
        if strangers:
            raise RunError(
                f"communicator {name}: a program that is not part of this run has connected to "
                f"{process(self.rank, self._beat.pid)} in the place of {processes(strangers)}; check who else uses "
                "this machine"
            )

    def explain(self, error: Exception) -> RunError:
        """Return the error to raise when a wait failed with `error`, after finding the cause or settling it.

        A broken connection alone does not tell who is at fault, because the peer may be a victim too. So this waits for
        a cause, up to the time after which a silent process is found, and only then blames the peer itself.
        """
        self._main_knows = True
        waiting = self.waiting
        if self._thread is None:
            return RunError(f"{process(self.rank)}, awaiting {waiting}: {error}")
        assert self._peers is not None
        if TOO_LONG.search(str(error)) and not self._cause_known.is_set():
            self._settle_stuck(self._peers, waiting, self._store)
        ranks = () if waiting is None else waiting.peers
        deadline = time.monotonic() + self.silence_seconds + 1
        while not self._cause_known.wait(0.05):
            now = time.monotonic()
            try:
                cause = self._peers.first_death(ranks)
                # One of several peers may have completed its part.
                if cause is None and (len(ranks) == 1 or now > deadline):
                    cause = self._peers.departure(ranks)
            except StoreSilentError as silent:
                cause = self._lost(silent) if now > deadline else None
            except StoreError as lost:
                cause = self._lost(lost)
            if cause is not None:
                self._settle(cause, self._store)
            elif now > deadline:
                origin = ranks[0] if ranks else self.rank
                text = f"{processes(ranks)} broke the connection" if ranks else f"{process(origin)} lost a connection"
                self._settle(Cause("dead", origin, f"{text} ({error})"), self._store)
        return self._error()

    def report_exception(self, error: BaseException) -> None:
        """Tell the others why this process fails. If there is a cause already, `error` is a consequence, and the cause
        is printed with it. For the outermost handler."""
        self._main_knows = True
        if self._thread is None or os.getpid() != self._beat.pid:
            return
        if not self._cause_known.is_set():
            if isinstance(error, RuntimeError) and any(sign in str(error) for sign in BROKEN):
                self.explain(error)  # from an unannounced operation: this process may be a victim
            else:
                self._settle(cause_of(error, self.rank), self._store)
        assert self.cause is not None
        reported = self._owner is not None and self._owner.on_cause is not None
        if not reported and self.cause.origin != self.rank and self.cause.text not in str(error):
            print(plain_lines(f"evenpipe: {self._error()}"), file=sys.stderr, flush=True)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, store: Store, peers: Peers) -> None:
        neighbour, last_value, silent_seconds, lost_seconds = self._after(self.rank), "", 0.0, 0.0
        longest: tuple[Waiting, float] | None = None
        waited_seconds = 0.0
        last_time, farewell, number = time.monotonic(), float("inf"), 0
        assert self._bell is not None
        while not self._cause_known.is_set():
            rung = self._bell.wait(self._beat_seconds if farewell == float("inf") else 0.05)
            signalled = next((number for number in STOPS if number in rung), 0)
            if self._stop.is_set() and not self._cause_known.is_set():
                return
            now = time.monotonic()
            elapsed = min(now - last_time, 2 * self._beat_seconds)  # a longer gap: this process was stopped itself
            last_time = now
            if signalled and self.stop_signal and self._on_signal is not None:
                self._on_signal(signalled, True)
                if self._owner is not None:
                    self._owner.kill_siblings()
                os._exit(128 + signalled)
            if signalled and farewell == float("inf"):
                number, farewell = signalled, now + FAREWELL_SECONDS
            previous, longest = longest, self._pending_waits.first_with_limit()
            same = longest is not None and previous is not None and longest[0] is previous[0]
            waited_seconds = waited_seconds + elapsed if same else 0.0
            try:
                if longest is not None and waited_seconds > longest[1]:
                    self._settle_stuck(peers, longest[0], store)
                    break
                self._beat = replace(self._beat, count=self._beat.count + 1, waiting=self.waiting)
                store.write(f"beat/{self.rank}", self._beat.dump())
                self._silent = None
                if (text := store.read("cause")) is not None:
                    self._learn(Cause.load(text, self.world_size))
                    break
                if farewell != float("inf"):
                    cause = peers.first_death(peers.local_ranks())
                    if cause is None and now > farewell:
                        cause = peers.departure(peers.local_ranks())
                        if cause is None and self._on_signal is not None:
                            self.stop_signal, farewell = number, float("inf")
                            self._on_signal(number, False)
                        elif cause is None:
                            how = f"was ended by signal {number} ({signal.Signals(number).name})"
                            cause = Cause("dead", self.rank, f"{process(self.rank, self._beat.pid)} {how}")
                    if cause is not None:
                        self._settle(cause, store)
                    continue
                if self._is_orphan():
                    self._settle(LAUNCHER_DIED, store)
                if neighbour == self.rank:
                    continue
                value, beat = peers.beat(neighbour)
                silent_seconds = 0.0 if value != last_value else silent_seconds + elapsed
                last_value, lost_seconds = value, 0.0
                if beat is not None and beat.done:
                    neighbour, last_value, silent_seconds = self._after(neighbour), "", 0.0
                elif death := peers.death_of(neighbour):
                    self._settle(death, store)
                elif silent_seconds > self.silence_seconds:
                    self._settle(peers.silence_of(neighbour, self.silence_seconds), store)
                    if self._owner is not None:
                        self._owner.kill_siblings(neighbour)
            except StoreError as error:
                # The store ended with its host, or its host cannot be reached. A process that computes may still
                # complete; one that waits cannot, and one whose launcher has died should not.
                if isinstance(error, StoreSilentError):
                    self._silent = error
                    elapsed, last_time = elapsed + error.seconds, time.monotonic()
                    waited_seconds += error.seconds
                lost_seconds = lost_seconds + elapsed if self.waiting is not None else 0.0
                if self._is_orphan() or farewell != float("inf") or lost_seconds > self.silence_seconds:
                    self._learn(self._lost(error))
        for record in self._on_failure:
            with contextlib.suppress(Exception):
                record()
        if self._owner is not None:
            self._owner.kill_siblings()
            self._end(self._owner)
            return
        for interrupt in tuple(self._interrupts):
            interrupt()

    def _after(self, rank: int) -> int:
        return (rank + 1) % self.world_size

    def _end(self, owner: Owner) -> None:
        """End the process from this thread if the main thread does not."""
        if self._stop.wait(GRACE_SECONDS) or (self._main_knows and self._stop.wait(OWN_END_SECONDS)):
            return
        owner.end(self._error())

    # -- causes ------------------------------------------------------------------------------------

    def _settle(self, cause: Cause, store: Store | None) -> None:
        """Write the cause, unless one was written before, which then counts.

        store: the client of this thread.
        """
        assert store is not None
        try:
            self._learn(Cause.load(store.write_once("cause", cause.dump(self.rank)), self.world_size))
        except StoreError:
            self._learn(cause)

    def _settle_stuck(self, peers: Peers, waiting: Waiting | None, store: Store | None) -> None:
        """Settle the cause of a wait that lasted too long. If the store does not answer, its origin stays unknown."""
        try:
            if self._silent is not None:
                raise self._silent
            self._settle(peers.find_stuck(waiting), store)
        except StoreError as error:
            peer = waiting.peers[0] if waiting is not None and waiting.peers else self.rank
            self._learn(Cause("stuck", peer, f"{process(self.rank)} timed out awaiting {waiting}, and {error}"))

    def _learn(self, cause: Cause) -> None:
        with self._learning:
            if self._cause_known.is_set():
                return
            self.cause = cause
            if self._owner is not None and self._owner.on_cause is not None:
                self._owner.on_cause(cause)
            self._cause_known.set()
        if self._bell is not None:
            self._bell.ring()

    def _error(self) -> RunError:
        assert self.cause is not None
        self._main_knows = self._main_knows or threading.current_thread() is threading.main_thread()
        if self.cause.origin == self.rank or self.waiting is None:
            return RunError(str(self.cause))
        return RunError(f"{self.cause}; {process(self.rank)} was awaiting {self.waiting}")

    def _is_orphan(self) -> bool:
        return self._owner is not None and self._owner.is_orphan()

    def _lost(self, error: StoreError) -> Cause:
        """Return the cause for a store that is lost, or has not answered for too long."""
        if self._is_orphan():
            return LAUNCHER_DIED
        if isinstance(error, StoreSilentError):
            text = f"the launcher cannot be reached: {error.address} has not answered for {self.silence_seconds:g} s"
            return Cause("silent", LAUNCHER, f"{text} (its machine is down, or the network to it)")
        lines = str(error).strip().splitlines()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        text = f"and with it the store of the run ({lines[0] if lines else error!r})"
        return Cause("dead", LAUNCHER if agent else 0, f"{'the launcher' if agent else 'process 0'} has died, {text}")
