"""The tensor ranks of a device: they exchange rows within passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenpipe.communication.communicator import Communicator, Handle
from evenpipe.parallel.running import Ranks, Running


class TensorRanks(Ranks):
    """An `Exchange` of `tensor.exchange` between processes."""

    def __init__(self, communicator: Communicator, running: Running) -> None:
        super().__init__(communicator, running)
        self.overlap: Any = None
        """The `Overlap` of transfers with products; None to run them sequentially."""
        self.arrived: Tensor | None = None
        """All rows of the last gather that overlapped with products."""

    @property
    def repeats(self) -> bool:
        """Whether the backward of this pass follows immediately (R)."""
        return self.running.repeats

    def gather(self, rows: Tensor) -> Tensor:
        """Return [n, ...]: the rows [n/t, ...] of all ranks, rank by rank."""
        gathered: Tensor = self.start_gather(rows).wait()
        return gathered

    def start_gather(self, rows: Tensor) -> Handle:
        """Begin `gather`."""
        handle = self.communicator.all_gather(rows, f"rows of {self.running.text}")
        return handle.returning(handle.result.flatten(0, 1))

    def scatter(self, partial: Tensor) -> Tensor:
        """Return this rank's rows [n/t, ...] of the sum over ranks of [n, ...]."""
        local_rows: Tensor = self.start_scatter(partial).wait()
        return local_rows

    def start_scatter(self, partial: Tensor) -> Handle:
        """Begin `scatter`."""
        parts = partial.view(self.size, -1, *partial.shape[1:]).clone()  # the sum overwrites it, not its source
        local_rows = torch.empty_like(parts[0])
        return self.communicator.reduce_scatter(local_rows, parts, f"sum of {self.running.text}")

    def shift(self, rows: Tensor, buffer: Tensor, label: str) -> Handle:
        """Begin to send rows to the next rank, and to receive those of the previous rank into the buffer."""
        return self.communicator.shift(rows, buffer, f"{label} of {self.running.text}").returning(buffer)

    def started(self, label: str) -> None:
        """Report an exchange that torch has started itself to the watch."""
        self.communicator.started(f"{label} of {self.running.text}").wait()

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks, as a new tensor."""
        total = partial.clone(memory_format=torch.contiguous_format)
        self.communicator.all_reduce(total, f"sum of {self.running.text}").wait()
        return total

    def table(self, local: Tensor) -> Tensor:
        """Return [t, ...]: the tensors of all ranks, stacked."""
        table: Tensor = self.communicator.all_gather(local, f"statistics of {self.running.text}").wait()
        return table
