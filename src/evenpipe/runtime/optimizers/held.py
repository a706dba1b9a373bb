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


class Visit:
    """A matrix whose rows are spread over replicas by `torch.chunk`'s rule, whole on one of them for a while.

    Every process of the communicator does the same, in the same order.

    Args:
        rows: those of this process, perhaps none.
        held: the parameter that they are shaped like.
        host: where it is whole, by its place among the members.
    """

    def __init__(self, rows: Tensor, held: HeldParameter, host: int) -> None:
        communicator = held.communicator
        assert communicator is not None
        self._communicator, self._root, self._name = communicator, communicator.members[host], held.name
        count, members = held.shape[0], len(communicator.members)
        chunk = -(-count // members)
        self._counts = [max(0, min(chunk, count - member * chunk)) for member in range(members)]
        self._tensor = rows.contiguous()
        self.is_here = communicator.rank == self._root
        """Whether this process is the host."""
        if self.is_here:
            self._tensor = rows.new_empty(held.shape)
            self._tensor[communicator.own_rows(self._counts)] = rows
        self._handle = communicator.gather_rows(self._tensor, self._counts, self._root, f"rows of {self._name}")

    def arrived(self) -> Tensor:
        """The whole matrix on the host, once it is there; on the others the rows that have left."""
        self._handle.wait(NEEDED_BY)
        return self._tensor

    def go_back(self, tensor: Tensor) -> None:
        """On the host: a matrix of that shape, whose rows go to the others; on them: where their rows go."""
        self._tensor = tensor.contiguous()
        self._handle = self._communicator.scatter_rows(
            self._tensor, self._counts, self._root, f"update of {self._name}"
        )

    def rows(self) -> Tensor:
        """This process's rows of what has come back."""
        self._handle.wait(NEEDED_BY)
        return self._tensor[self._communicator.own_rows(self._counts)] if self.is_here else self._tensor


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
