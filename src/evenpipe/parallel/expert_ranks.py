"""The members of an expert group: the same device in neighbouring replicas, which share its experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.communication.communicator import Communicator, Handle
from evenpipe.parallel.running import Ranks, Running


class ExpertRanks(Ranks):
    """An `Exchange` of `experts.layout` between processes."""

    def __init__(self, communicator: Communicator, running: Running) -> None:
        super().__init__(communicator, running)
        self.layer = ""
        """Name of the experts that are running."""

    @property
    def _where(self) -> str:
        return f"of {self.layer} in {self.running.text}"

    def counts(self, numbers: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Exchange [members, numbers]: each member gets its row. Return this member's table and the received rows.
        Waits for the device."""
        table = torch.empty((2, *numbers.shape), dtype=numbers.dtype, device=numbers.device)
        table[0] = numbers
        self.communicator.all_to_all(table[1], table[0], f"numbers of rows {self._where}").wait(self.running.text)
        sent, received = table.tolist()
        return sent, received

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str) -> Handle:
        """Send rows [sum of sent, ...], sorted by member, and receive `output` [sum of received, ...], sorted likewise.
        Neither may be changed before the wait."""
        handle = self.communicator.exchange(output, rows, received, sent, f"{label} {self._where}")
        return handle.returning(None, needed_by=self.running.text)
