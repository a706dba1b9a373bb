"""A parameter as an optimizer sees it: what this process holds of it, and who holds the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evenpipe.runtime.communication import Communicator

NEEDED_BY = "the optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class HeldParameter:
    """Rows of a parameter, or all of it."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Of the whole."""
    communicator: Communicator | None
    """Of the processes that its rows are spread over, this one among them; None: it is held whole."""


class WholeMatrix:
    """Rows that are spread over replicas by `torch.chunk`'s rule, on their way to all of them.

    Args:
        rows: those of this process, perhaps none.
        held: the parameter that they are shaped like. Every process of its communicator does this, in the same order.
    """

    def __init__(self, rows: Tensor, held: HeldParameter) -> None:
        communicator = held.communicator
        assert communicator is not None
        self._rows, self._count = held.shape[0], len(rows)
        chunk = -(-self._rows // len(communicator.members))
        self._first = min(communicator.position * chunk, self._rows)
        padded = rows.new_zeros(chunk, *rows.shape[1:])
        padded[: self._count] = rows
        self._gathered = rows.new_empty(len(communicator.members), *padded.shape)
        self._handle = communicator.all_gather(self._gathered, padded, f"whole matrix of {held.name}")

    def wait(self) -> Tensor:
        """The whole matrix, once it is there."""
        self._handle.wait(NEEDED_BY)
        return self._gathered.flatten(0, 1)[: self._rows]

    def own(self, whole: Tensor) -> Tensor:
        """This process's rows of a matrix of that shape."""
        return whole[self._first : self._first + self._count]


def sums(tensors: list[Tensor], communicator: Communicator | None, what: str) -> list[Tensor]:
    """Each tensor (of one dtype) summed over the processes, all in one message: the same bits on every one of them,
    since all gather and add in the same order. None: they are whole already."""
    if communicator is None:
        return tensors
    own = torch.cat([tensor.flatten() for tensor in tensors])
    table = own.new_empty(len(communicator.members), *own.shape)
    communicator.all_gather(table, own, what).wait(NEEDED_BY)
    parts = table.sum(0).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
