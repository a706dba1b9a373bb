"""A tensor on its way from the process that computed it to all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from evenpipe.communication.communicator import Handle


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor that is being sent by the process that computed it; every process has it after `value()`.

    It may have parts from several processes, one per row: then it is the sum of the rows in `summed`.
    """

    tensor: Tensor
    handle: Handle | None
    summed: Sequence[int] | None = None

    def value(self) -> Tensor:
        if self.handle is not None:
            self.handle.wait("the caller")
        return self.tensor if self.summed is None else self.tensor[list(self.summed)].sum(0)
