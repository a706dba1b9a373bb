"""The tensor ranks of a device as one of them, alone, for tensors without memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from evenpipe.tensor.exchange import Overlap


class _UnderWay(NamedTuple):
    """A transfer and the tensors that it holds, as a communicator's handle does."""

    result: Tensor
    held: list[Tensor]

    def wait(self) -> Tensor:
        self.held.clear()
        return self.result


class FirstRank:
    """An `Exchange` of `tensor.exchange` that allocates what `parallel.tensor_ranks` allocates, and transfers nothing:
    results have no meaning."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.repeats = False
        self.overlap: Overlap | None = None
        self.arrived: Tensor | None = None

    def gather(self, rows: Tensor) -> Tensor:
        return self.start_gather(rows).wait()

    def start_gather(self, rows: Tensor) -> _UnderWay:
        return _UnderWay(self.table(rows).flatten(0, 1), [rows])

    def scatter(self, partial: Tensor) -> Tensor:
        return self.start_scatter(partial).wait()

    def start_scatter(self, partial: Tensor) -> _UnderWay:
        parts = partial.view(self.size, -1, *partial.shape[1:]).clone()
        return _UnderWay(torch.empty_like(parts[0]), [parts])

    def sum(self, partial: Tensor) -> Tensor:
        return partial.clone(memory_format=torch.contiguous_format)

    def table(self, own: Tensor) -> Tensor:
        return own.new_empty((self.size, *own.shape))
