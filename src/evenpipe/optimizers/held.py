"""Parameters for optimizers that need whole matrices: the local rows, and the processes with the other rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenpipe.communication.communicator import Communicator
from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.model.placement import TensorPlacement, chunk

NEEDED_BY = "the optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class HeldParameter:
    """Rows of a parameter, or all of it."""

    name: str
    parameter: nn.Parameter
    placement: TensorPlacement
    communicator: Communicator | None
    """Communicator of all processes with rows of the parameter; None: this process has all rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.placement.shape

    @property
    def has_rows(self) -> bool:
        """Whether this process has the whole parameter, or each member of the communicator has other rows of it."""
        cuts, communicator = self.placement.cuts, self.communicator
        if not cuts:
            return True
        parts = math.prod(cut.parts for cut in cuts)
        return (
            communicator is not None and len(communicator.members) == parts and not any(cut.dimension for cut in cuts)
        )

    def refuse(self, optimizer: str) -> InputError:
        """Return the error of an optimizer that cannot train this part."""
        axes = {axis for cut in self.placement.cuts for axis in cut.axes}
        expected = "tp = 1" if "tp" in axes else "data_parallel = 'replicate'"
        return InputError(
            f"{optimizer}: it needs whole matrices, or rows of them, and this process has another part of {self.name}"
            f" {list(self.shape)}; expected {expected} with it, or an optimizer that works element by element"
        )


class HoldsParameters(Protocol):
    """A `Pipeline`, as these optimizers see it."""

    description: Description

    def held_parameters(self) -> Iterator[HeldParameter]:
        """Iterate over this process's part of each parameter, in the same order on all processes."""


def groups_by_decay(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: only parameters with two or more dimensions have weight decay."""
    parameters = list(parameters)
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2]},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure that torch lets callers pass to `step`, and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Visit:
    """Gathers a matrix, whose rows are spread over replicas by `torch.chunk`'s rule, on one of them for a while.

    Every process of the communicator makes the same visits in the same order, with its own rows, possibly none, of a
    matrix with the shape of the parameter; `host` is the index, among the communicator's members, of the one.
    """

    def __init__(self, rows: Tensor, held: HeldParameter, host: int) -> None:
        communicator = held.communicator
        assert communicator is not None
        self._communicator, self._root, self._name = communicator, communicator.members[host], held.name
        members = len(communicator.members)
        self._counts = [len(chunk(held.shape[0], member, members)) for member in range(members)]
        self._tensor = rows.contiguous()
        self.is_here = communicator.rank == self._root
        """Whether this process is the host."""
        if self.is_here:
            self._tensor = rows.new_empty(held.shape)
            self._tensor[communicator.own_rows(self._counts)] = rows
        self._handle = communicator.gather_rows(self._tensor, self._counts, self._root, f"rows of {self._name}")

    def arrived(self) -> Tensor:
        """Wait; return the whole matrix on the host, and the sent rows on the others."""
        self._handle.wait(NEEDED_BY)
        return self._tensor

    def go_back(self, tensor: Tensor) -> None:
        """Scatter a matrix of that shape from the host; on the others, `tensor` receives their rows."""
        self._tensor = tensor.contiguous()
        self._handle = self._communicator.scatter_rows(
            self._tensor, self._counts, self._root, f"update of {self._name}"
        )

    def rows(self) -> Tensor:
        """Wait; return this process's rows of the scattered matrix."""
        self._handle.wait(NEEDED_BY)
        return self._tensor[self._communicator.own_rows(self._counts)] if self.is_here else self._tensor


def sums(tensors: list[Tensor], communicator: Communicator | None, label: str) -> list[Tensor]:
    """Return each tensor summed over the processes, with one message for all; they must have the same dtype. All
    processes gather and add in the same order, so they get the same bits. Without a communicator, return `tensors`."""
    if communicator is None:
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    parts = communicator.all_gather(flat, label).wait(NEEDED_BY).sum(0).split([tensor.numel() for tensor in tensors])
    return [total.view(tensor.shape) for total, tensor in zip(parts, tensors, strict=True)]
