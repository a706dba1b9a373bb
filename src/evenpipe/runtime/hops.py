"""Handlers of the hops between stages: what travels along an edge for one unit, and back.

forward    hidden [sequences, tokens, hidden_size]; with a router loss its totals [2E+1] fp32
back       the gradient of that; with a router loss the gradient of its probabilities [E] fp32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from evenpipe.communication.communicators import Communicators
from evenpipe.runtime.batch import Batch
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.row import Row
from evenpipe.runtime.values import Values
from evenpipe.schedule import Transfer, TransferKind
from evenpipe.schedule.placement import Edge


class Hops:
    """Sends and receives for the walker. Arguments are those of `Walker`."""

    def __init__(
        self,
        values: Values,
        *,
        communicators: Communicators | None,
        ranks: Sequence[int],
        hidden_dtype: torch.dtype,
        torch_device: torch.device,
        router_losses: RouterLosses | None,
    ) -> None:
        self._values = values
        self._communicators = communicators
        self._ranks = ranks
        self._hidden_dtype = hidden_dtype
        self._torch_device = torch_device
        self._router_losses = router_losses
        self.transfers: Mapping[TransferKind, Callable[[Transfer], None]] = {
            TransferKind.SEND_F: lambda item: self._send(item, self._row.after[item.stage]),
            TransferKind.RECV_F: lambda item: self._receive(item, self._row.before[item.stage]),
            TransferKind.SEND_B: lambda item: self._send(item, self._row.before[item.stage][::-1]),
            TransferKind.RECV_B: lambda item: self._receive(item, self._row.after[item.stage][::-1]),
        }

    def begin(self, row: Row, batch: Batch, hidden_size: int) -> None:
        """Start a step."""
        self._row = row
        self._shapes = [(*microbatch.token_ids.shape, hidden_size) for microbatch in batch.microbatches]

    def sends(self, edge: Edge, unit: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of each tensor that travels along an edge, or back, for one unit."""
        hidden = (self._shapes[unit], self._hidden_dtype)
        if self._router_losses is None:
            return (hidden,)
        return hidden, ((self._router_losses.size(forward=edge[0] < edge[1]),), torch.float32)

    def _send(self, item: Transfer, edge: Edge) -> None:
        assert self._communicators is not None
        communicator, peer = self._communicators[item.communicator], self._ranks[item.members[1]]
        for tensor in self._values.give((edge, self._row.unit(item))):
            self._values.sent(item, communicator.send(tensor, peer, str(item)))

    def _receive(self, item: Transfer, edge: Edge) -> None:
        assert self._communicators is not None
        communicator, peer = self._communicators[item.communicator], self._ranks[item.members[0]]
        unit = self._row.unit(item)
        buffers = tuple(
            torch.empty(shape, dtype=dtype, device=self._torch_device) for shape, dtype in self.sends(edge, unit)
        )
        handles = [communicator.receive(buffer, peer, str(item)) for buffer in buffers]
        self._values.arriving((edge, unit), buffers, *handles)
