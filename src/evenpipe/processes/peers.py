"""Information about other processes: from their heartbeats in the store, and for those on the same machine from the
kernel. Each finding is a `Cause`; `watch` decides which one is valid."""

from __future__ import annotations

from collections.abc import Iterable

from evenpipe.processes.names import process
from evenpipe.processes.signs import Beat, Cause, Waiting, start_time
from evenpipe.processes.store import Store


class Peers:
    """The other processes, as seen from this one."""

    def __init__(self, store: Store, own_beat: Beat, rank: int, world_size: int, *, key: str = "beat") -> None:
        """Announce this process to the others on its machine. Every method raises StoreError if the store is lost.

        key: of the beats in the store.
        """
        self._store = store
        self._own_beat = own_beat
        self._rank = rank
        self._world_size = world_size
        self._key = key
        self._local_key = f"on {own_beat.machine}"  # for any `key`: a process may die before its first beat
        store.append(self._local_key, f" {rank}")

    def beat(self, rank: int) -> tuple[str, Beat | None]:
        """Return the beat of a process as text and parsed. Before its first beat, return the one written when processes
        met; None before that, and if the text is not a beat."""
        for key in (f"{self._key}/{rank}", f"here/{rank}"):
            if (text := self._store.read(key)) is not None:
                beat = Beat.load(text, self._world_size)
                return ("", None) if beat is None else (text, beat)
        return "", None

    def local_ranks(self) -> list[int]:
        """Return the other processes on this machine."""
        written = (self._store.read(self._local_key) or "").split()
        ranks = {int(rank) for rank in written if rank.isdecimal() and len(rank) < 10}
        return sorted(rank for rank in ranks if rank < self._world_size and rank != self._rank)

    def death_of(self, rank: int) -> Cause | None:
        """Return a cause if that process ran on this machine and has died. On other machines only silence shows it."""
        beat = self.beat(rank)[1]
        if beat is None or beat.machine != self._own_beat.machine or start_time(beat.pid) == beat.started:
            return None
        latest = self.beat(rank)[1]
        if latest is None or latest.done:  # read after the check: "done" is written before the end
            return None
        return Cause("dead", rank, f"{process(rank, beat.pid)} has died: killed, out of memory or crashed")

    def first_death(self, ranks: Iterable[int]) -> Cause | None:
        """Return the cause for the first dead process of `ranks`, if any."""
        return next((cause for rank in ranks if (cause := self.death_of(rank)) is not None), None)

    def departure(self, ranks: Iterable[int]) -> Cause | None:
        """Return a cause if one of `ranks` has ended without an error although others still need it."""
        for rank in ranks:
            beat = self.beat(rank)[1]
            if beat is not None and beat.done:
                return Cause("left", rank, f"{process(rank, beat.pid)} has ended while others still needed it")
        return None

    def silence_of(self, rank: int, seconds: float) -> Cause:
        """Return the cause for a process that has not beaten for this long."""
        reason = f"{process(rank)} gave no sign of life for {seconds:g} s"
        beat = self.beat(rank)[1]
        if beat is None:
            return Cause("silent", rank, reason)
        doing = f"awaited {beat.waiting}" if beat.waiting else "was not waiting for any process"
        return Cause("silent", rank, f"{reason} (pid {beat.pid}; it {doing})")

    def find_stuck(self, waiting: Waiting | None) -> Cause:
        """After a timeout without a death, follow who waits for whom to the nearest process that does not wait, or
        around the first cycle if all do."""
        begin = f"{process(self._rank)} timed out awaiting {waiting}"
        origin, circle, seen = self._rank, "", {self._rank}
        paths = [(waiting, begin)]
        while paths:
            waiting, text = paths.pop(0)
            if waiting is None:
                continue
            for peer in waiting.peers:
                beat = self.beat(peer)[1]
                # All members of a collective wait for the same operation: look for one that does something else.
                if beat is None:
                    continue
                peer_waiting = beat.waiting
                if peer_waiting and (peer_waiting.label, peer_waiting.communicator) == (
                    waiting.label,
                    waiting.communicator,
                ):
                    continue
                if beat.done or beat.waiting is None:
                    state = "has finished" if beat.done else "does not wait"
                    return Cause("stuck", peer, f"{text}; {process(peer)} {state}")
                if peer not in seen:
                    seen.add(peer)
                    paths.append((beat.waiting, f"{text}; {process(peer)} awaits {beat.waiting}"))
                elif not circle:
                    origin, circle = peer, f"{text}, a circle back to {process(peer)}"
        return Cause("stuck", origin, circle or begin)
