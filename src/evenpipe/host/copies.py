"""Copies between device and host that run beside compute, in the order of their requests.

A request returns a ticket, and the requester waits for it when the copy must be over. A late copy delays only that
wait: memory is freed after it.

    StreamCopies    on a GPU: separate streams; waiting is an event in the compute stream
    FileCopies      on the CPU: threads that write to a file and read it

A slot may be reused as soon as its copy back is requested: copies to the host wait for earlier requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import UntypedStorage

from evenpipe.communication import clock
from evenpipe.errors import RunError
from evenpipe.host.pool import FileSlab, HostPool, PinnedSlab, Slot

Move = tuple[UntypedStorage, Slot]
"""Memory of the device, and its slot on the host."""


@dataclass(slots=True)
class Ticket:
    """Copies that were requested together.

    over: tells whether they are over. stamps: when they began and ended, by the clock of `Recording`; on a GPU two
    events.
    """

    over: Any
    stamps: list[Any]


class FileCopies:
    """Threads that write to the pool's files and read them, one for both directions or one for each.

    They only know addresses: the requester keeps the memory until the copies are over.
    """

    def __init__(self, pool: HostPool, streams: int = 1) -> None:
        threads = [ThreadPoolExecutor(1, f"evenpipe-copies-{number}") for number in range(streams)]
        self._pool, self._out, self._back = pool, threads[0], threads[-1]
        self._last_back: Ticket | None = None

    def out(self, moves: Sequence[Move]) -> Ticket:
        """Copy to the host, after the work queued on the device."""
        return self._submit(self._out, FileSlab.write, moves, self._last_back)

    def back(self, moves: Sequence[Move], after: Ticket) -> Ticket:
        """Copy to the device, after the copies that brought the data to the host."""
        self._last_back = self._submit(self._back, FileSlab.read, moves, after)
        return self._last_back

    def wait(self, ticket: Ticket) -> None:
        """Make later work of the device wait for these copies. Raises RunError if the file could not be written or
        read."""
        try:
            ticket.over.result()
        except OSError as error:
            raise RunError(f"activations could not be moved to the host or back: {error}") from error

    def close(self) -> None:
        for threads in {self._out, self._back}:
            threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, threads: ThreadPoolExecutor, move: _Move, moves: Sequence[Move], after: Ticket | None) -> Ticket:
        addresses = [(slot, storage.data_ptr(), storage.nbytes()) for storage, slot in moves]
        stamps: list[float] = []
        out_is_over = None if after is None else after.over
        return Ticket(threads.submit(self._copy, move, addresses, out_is_over, stamps), stamps)

    def _copy(
        self, move: _Move, addresses: list[tuple[Slot, int, int]], out_is_over: Future[None] | None, stamps: list[float]
    ) -> None:
        if out_is_over is not None:
            out_is_over.result()
        stamps.append(clock.now())
        for slot, address, size in addresses:
            slab = self._pool.slabs[slot.slab]
            assert isinstance(slab, FileSlab)
            move(slab, slot, address, size)
        stamps.append(clock.now())


_Move = Callable[[FileSlab, Slot, int, int], None]


class StreamCopies:
    """Streams beside the compute stream, one for both directions or one for each.

    Only the compute stream allocates and frees device memory, which makes its reuse exact: a copy begins after an event
    there, and the memory is freed or used only after waiting for the copy.
    """

    def __init__(self, pool: HostPool, torch_device: torch.device, streams: int = 1) -> None:
        made = [torch.cuda.Stream(torch_device) for _ in range(streams)]
        self._pool, self._out, self._back = pool, made[0], made[-1]
        self._last_back: Any = None

    def out(self, moves: Sequence[Move]) -> Ticket:
        if self._last_back is not None:
            self._out.wait_event(self._last_back)
        return self._copy(self._out, moves, to_host=True)

    def back(self, moves: Sequence[Move], after: Ticket) -> Ticket:
        self._back.wait_event(after.over)
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
                on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                on_host = slab.view(slot, storage.nbytes())
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)
            events[1].record(stream)
        return Ticket(events[1], events)


Copies = FileCopies | StreamCopies
