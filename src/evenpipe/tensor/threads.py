"""Tensor ranks as threads of a process, for checks: they exchange tensors through a barrier.

On a CPU, autograd runs a backward on the calling thread, so each rank stays on its thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from evenpipe.model.fp64 import InFp64
from evenpipe.tensor.exchange import Overlap
from evenpipe.work import Done

Result = TypeVar("Result")

SECONDS = 600.0
"""Longest wait for another thread."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.table: list[Any] = [None] * size


class ThreadExchange:
    """The `Exchange` of a thread with the other threads of a meeting."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.size, self.rank, self.repeats = len(meeting.table), rank, False
        self.overlap: Overlap | None = None
        self.arrived: Tensor | None = None
        self._meeting = meeting

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat(self._met("gather", rows))

    def start_gather(self, rows: Tensor) -> Done:
        return Done(self.gather(rows))

    def start_scatter(self, partial: Tensor) -> Done:
        return Done(self.scatter(partial))

    def shift(self, rows: Tensor, buffer: Tensor, label: str) -> Done:
        return Done(buffer.copy_(self._met(label, rows.clone())[self.rank - 1]))

    def table(self, local: Tensor) -> Tensor:
        return torch.stack(self._met("table", local))

    def scatter(self, partial: Tensor) -> Tensor:
        parts = [tensor.chunk(self.size)[self.rank] for tensor in self._met("scatter", partial)]
        return torch.stack(parts).sum(0)

    def sum(self, partial: Tensor) -> Tensor:
        return torch.stack(self._met("sum", partial)).sum(0)

    def leave(self) -> None:
        """Let the other ranks fail instead of waiting for this one."""
        self._meeting.barrier.abort()

    def _met(self, label: str, tensor: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.table[self.rank] = (label, tensor.detach())
        meeting.barrier.wait(SECONDS)
        entries = list(meeting.table)
        meeting.barrier.wait(SECONDS)
        assert {(name, received.shape) for name, received in entries} == {(label, tensor.shape)}, (
            "ranks exchange different things"
        )
        return [received for _, received in entries]


def thread_exchanges(size: int) -> list[ThreadExchange]:
    """Return the exchanges of `size` ranks with each other."""
    meeting = _Meeting(size)
    return [ThreadExchange(meeting, rank) for rank in range(size)]


def in_threads(exchanges: Sequence[ThreadExchange], work: Callable[[int], Result]) -> list[Result]:
    """Run `work(rank)` for all ranks concurrently, with the caller's grad mode, and `InFp64` if the caller is in it;
    return the results. Raises the first error.

    `work` must not change state that threads share, such as torch's default dtype.
    """
    results: list[Any] = [None] * len(exchanges)
    errors: list[BaseException] = []
    grad, fp64 = torch.is_grad_enabled(), InFp64.is_entered()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad), InFp64() if fp64 else contextlib.nullcontext():
                results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)  # the first error is the cause: other ranks then wait for this one in vain
            exchanges[rank].leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
