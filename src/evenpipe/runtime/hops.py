"""Handlers of the hops between stages: what travels along an edge for one unit, and back.

forward    hidden [sequences, tokens, hidden_size]; with a router loss its totals [2E+1] fp32
           (a tensor rank sends its rows, [sequences, tokens / ranks, hidden_size])
back       the gradient of that; with a router loss the gradient of its probabilities [E] fp32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from evenpipe.runtime.batch import Batch
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.row import Row
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.values import Values
from evenpipe.schedule import Transfer, TransferKind
from evenpipe.schedule.placement import Edge


class Part(NamedTuple):
    """One tensor of what travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Hops:
    """Sends and receives for the walker. Arguments are those of `Walker`."""

    def __init__(self, values: Values, transport: Transport, router_losses: RouterLosses | None) -> None:
        self._values = values
        self._transport = transport
        self._router_losses = router_losses
        self.transfers: Mapping[TransferKind, Callable[[Transfer], None]] = {
            TransferKind.SEND_F: lambda item: self._send(item, self._row.after[item.stage]),
            TransferKind.RECV_F: lambda item: self._receive(item, self._row.before[item.stage]),
            TransferKind.SEND_B: lambda item: self._send(item, self._row.before[item.stage][::-1]),
            TransferKind.RECV_B: lambda item: self._receive(item, self._row.after[item.stage][::-1]),
        }

    def begin(self, row: Row, batch: Batch) -> None:
        """Start a step. `whole`: shapes of the hidden states of all tokens, by unit; `shapes`: of this process's
        rows."""
        self._row = row
        size, ranks = self._transport.hidden_size, self._transport.tensor_ranks
        self.whole = [(*microbatch.token_ids.shape, size) for microbatch in batch.microbatches]
        self.shapes = [(sequences, tokens // ranks, size) for sequences, tokens, _ in self.whole]

    def sends(self, edge: Edge, unit: int) -> tuple[Part, ...]:
        """Return what travels along an edge, or back, for one unit."""
        back = edge[0] > edge[1]
        parts = [Part("hidden gradient" if back else "hidden", self.shapes[unit], self._transport.hidden_dtype)]
        if self._router_losses is not None:
            size = (self._router_losses.size(forward=not back),)
            parts.append(Part("router gradient" if back else "router totals", size, torch.float32))
        return tuple(parts)

    def _send(self, item: Transfer, edge: Edge) -> None:
        communicator, peer = self._transport.communicator(item), self._transport.ranks[item.members[1]]
        for tensor in self._values.give((edge, self._row.unit(item))):
            self._values.sent(item, communicator.send(tensor, peer, str(item)))

    def _receive(self, item: Transfer, edge: Edge) -> None:
        communicator, peer = self._transport.communicator(item), self._transport.ranks[item.members[0]]
        unit, torch_device = self._row.unit(item), self._transport.torch_device
        buffers = tuple(
            torch.empty(part.shape, dtype=part.dtype, device=torch_device) for part in self.sends(edge, unit)
        )
        handles = [communicator.receive(buffer, peer, str(item)) for buffer in buffers]
        self._values.arriving((edge, unit), buffers, *handles)
