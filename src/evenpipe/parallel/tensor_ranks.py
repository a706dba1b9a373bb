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
        """The `Overlap` of transfers and products; None: one after the other."""
        self.arrived: Tensor | None = None
        """All rows of the last gather that products ran beside."""

    @property
    def repeats(self) -> bool:
        """The backward of this pass follows at once (R)."""
        return self.running.repeats

    def gather(self, rows: Tensor) -> Tensor:
        """Return [n, ...]: the rows [n/t, ...] of all ranks, one rank after the other."""
        gathered: Tensor = self.start_gather(rows).wait()
        return gathered

    def start_gather(self, rows: Tensor) -> Handle:
        """Begin `gather`."""
        handle = self.communicator.all_gather(rows, f"rows of {self.running.text}")
        return handle.giving(handle.result.flatten(0, 1))

    def scatter(self, partial: Tensor) -> Tensor:
        """Return the own rows [n/t, ...] of the sum over ranks of [n, ...]."""
        local_rows: Tensor = self.start_scatter(partial).wait()
        return local_rows

    def start_scatter(self, partial: Tensor) -> Handle:
        """Begin `scatter`."""
        parts = partial.view(self.size, -1, *partial.shape[1:]).clone()  # may still be used, and is destroyed
        local_rows = torch.empty_like(parts[0])
        return self.communicator.reduce_scatter(local_rows, parts, f"sum of {self.running.text}")

    def pass_on(self, rows: Tensor, buffer: Tensor, label: str) -> Handle:
        """Begin to send rows to the next rank, and to fill the buffer with those of the previous one."""
        return self.communicator.pass_on(rows, buffer, f"{label} of {self.running.text}").giving(buffer)

    def started(self, label: str) -> None:
        """Let the watch know of an exchange that torch has started by itself."""
        self.communicator.started(f"{label} of {self.running.text}").wait()

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks, a new tensor."""
        total = partial.clone(memory_format=torch.contiguous_format)
        self.communicator.all_reduce(total, f"sum of {self.running.text}").wait()
        return total

    def table(self, local: Tensor) -> Tensor:
        """Return [t, ...]: what each rank has."""
        table: Tensor = self.communicator.all_gather(local, f"statistics of {self.running.text}").wait()
        return table
