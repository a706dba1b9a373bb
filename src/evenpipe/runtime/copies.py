"""Copies between device and host that run beside compute, in the order in which they are asked for.

Whoever asks gets a ticket, and waits for it where the copy must be over. A copy that is late delays whoever waits, and
nothing else: memory is given back behind that.

    StreamCopies    on a GPU: streams of their own; waiting is an event in the stream that computes
    FileCopies      on the CPU: threads that write to a file and read it

A slot may be taken again as soon as its copy back was asked for: copies to the host wait for those that were asked for
before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import UntypedStorage

from evenpipe.errors import RunError
from evenpipe.runtime import clock
from evenpipe.runtime.host_pool import FileSlab, HostPool, PinnedSlab, Slot

Move = tuple[UntypedStorage, Slot]
"""Memory of the device, and where its bytes are on the host."""


@dataclass(slots=True)
class Ticket:
    """Copies that were asked for together.

    over: what tells that they are. stamps: when they began and ended, by the clock of `Recording`; on a GPU two events.
    """

    over: Any
    stamps: list[Any]


class Copies(Protocol):
    """What moves bytes."""

    def out(self, moves: Sequence[Move]) -> Ticket:
        """To the host, once the device has computed what it was given so far."""
        ...

    def back(self, moves: Sequence[Move], behind: Ticket) -> Ticket:
        """To the device, behind the copies that brought them to the host."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """What the device computes from here on comes behind these copies."""
        ...

    def close(self) -> None:
        """No more copies."""
        ...


class FileCopies:
    """Threads that write to the pool's files and read them, one for both directions or one for each.

    They know addresses only: whoever asks keeps the memory until the copies are over.
    """

    def __init__(self, pool: HostPool, streams: int = 1) -> None:
        threads = [ThreadPoolExecutor(1, f"evenpipe-copies-{number}") for number in range(streams)]
        self._pool, self._out, self._back = pool, threads[0], threads[-1]
        self._last_back: Ticket | None = None

    def out(self, moves: Sequence[Move]) -> Ticket:
        return self._submit(self._out, FileSlab.write, moves, self._last_back)

    def back(self, moves: Sequence[Move], behind: Ticket) -> Ticket:
        self._last_back = self._submit(self._back, FileSlab.read, moves, behind)
        return self._last_back

    def wait(self, ticket: Ticket) -> None:
        """Raises RunError where the file could not be written or read."""
        try:
            ticket.over.result()
        except OSError as error:
            raise RunError(f"activations could not be moved to the host or back: {error}") from error

    def close(self) -> None:
        for threads in {self._out, self._back}:
            threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, threads: ThreadPoolExecutor, move: _Move, moves: Sequence[Move], behind: Ticket | None) -> Ticket:
        addresses = [(slot, storage.data_ptr(), storage.nbytes()) for storage, slot in moves]
        stamps: list[float] = []
        after = None if behind is None else behind.over
        return Ticket(threads.submit(self._copy, move, addresses, after, stamps), stamps)

    def _copy(
        self, move: _Move, addresses: list[tuple[Slot, int, int]], after: Future[None] | None, stamps: list[float]
    ) -> None:
        if after is not None:
            after.result()
        stamps.append(clock.now())
        for slot, address, size in addresses:
            slab = self._pool.slabs[slot.slab]
            assert isinstance(slab, FileSlab)
            move(slab, slot, address, size)
        stamps.append(clock.now())


_Move = Callable[[FileSlab, Slot, int, int], None]


class StreamCopies:
    """Streams beside the one that computes, one for both directions or one for each.

    Memory of the device is taken and given back by the stream that computes alone, which makes its reuse exact: a copy
    begins behind an event there, and whoever frees or uses the memory has waited for the copy.
    """

    def __init__(self, pool: HostPool, torch_device: torch.device, streams: int = 1) -> None:
        made = [torch.cuda.Stream(torch_device) for _ in range(streams)]
        self._pool, self._out, self._back = pool, made[0], made[-1]
        self._last_back: Any = None

    def out(self, moves: Sequence[Move]) -> Ticket:
        if self._last_back is not None:
            self._out.wait_event(self._last_back)
        return self._copy(self._out, moves, to_host=True)

    def back(self, moves: Sequence[Move], behind: Ticket) -> Ticket:
        self._back.wait_event(behind.over)
        ticket = self._copy(self._back, moves, to_host=False)
        self._last_back = None if self._out is self._back else ticket.over
        return ticket

    def wait(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self._out.device).wait_event(ticket.over)

    def close(self) -> None:
        self._out.synchronize()
        self._back.synchronize()

    def _copy(self, stream: torch.cuda.Stream, moves: Sequence[Move], *, to_host: bool) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with torch.cuda.stream(stream):
            events[0].record(stream)
            for storage, slot in moves:
                slab = self._pool.slabs[slot.slab]
                assert isinstance(slab, PinnedSlab)
                there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                here = slab.view(slot, storage.nbytes())
                target, source = (here, there) if to_host else (there, here)
                target.copy_(source, non_blocking=True)
            events[1].record(stream)
        return Ticket(events[1], events)
