"""A tensor on its way from the process that computed it to all others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from evenpipe.communication.communicator import Handle


class Shared:
    """A tensor that is being sent by the process that computed it; every process has it after `value()`.

    It may have parts from several processes, one per row: then it is the sum of the rows in `summed`.
    """

    def __init__(self, tensor: Tensor, handle: Handle | None, summed: Sequence[int] | None = None) -> None:
        self._tensor = tensor
        self._handle = handle
        self._summed = summed

    def value(self) -> Tensor:
        if self._handle is not None:
            self._handle.wait("the caller")
        return self._tensor if self._summed is None else self._tensor[list(self._summed)].sum(0)
