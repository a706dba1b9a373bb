"""Handlers of the hops between stages: what an edge carries for one unit, forward and back.

forward    the tensors that the stages declare; with a router loss, its totals [2E+1] fp32
back       the gradients of those that have one; with a router loss, the gradient of its probabilities [E] fp32
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from evenpipe.communication.messages import values_of_members
from evenpipe.errors import InputError
from evenpipe.model import EdgeSpec, EdgeTensor
from evenpipe.parallel.groups import Groups
from evenpipe.runtime.batch import Batch
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.row import Row
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.values import Values
from evenpipe.schedule import Transfer, TransferKind
from evenpipe.schedule.placement import Edge


class HasEdges(Protocol):
    """An end of an edge."""

    @property
    def incoming(self) -> EdgeSpec:
        """What each incoming edge of the stage carries."""
        ...

    @property
    def outgoing(self) -> EdgeSpec:
        """What each outgoing edge carries."""
        ...


def check_edges(stages: Mapping[int, HasEdges], edges: Iterable[Edge], groups: Groups) -> None:
    """Compare what both ends of every edge declare, on all processes. Collective.

    Raises:
        InputError: on every process, if they differ.
    """
    local_edges = {str(stage): (str(module.outgoing), str(module.incoming)) for stage, module in stages.items()}
    tables = values_of_members(groups.everyone, local_edges, "what edges between stages carry")
    for edge in edges:
        specs = {table[str(stage)][end] for table in tables for end, stage in enumerate(edge) if str(stage) in table}
        if len(specs) > 1:
            raise InputError(
                f"model: its stages {edge[0]} and {edge[1]} disagree about what the edge between them carries"
                f" ({'; or '.join(sorted(specs))}); expected the same model on all processes"
            )


class Hops:
    """Sends and receives for the walker. Arguments are those of `Walker`."""

    def __init__(
        self,
        stages: Mapping[int, HasEdges],
        values: Values,
        transport: Transport,
        router_losses: RouterLosses | None,
    ) -> None:
        self._values = values
        self._transport = transport
        totals = () if router_losses is None else (router_losses.totals_form,)
        gradients = () if router_losses is None else (router_losses.gradient_form,)
        self._forward = {stage: (*module.incoming.tensors, *totals) for stage, module in stages.items()}
        self._back = {stage: (*module.outgoing.gradients, *gradients) for stage, module in stages.items()}
        self.transfers: Mapping[TransferKind, Callable[[Transfer], None]] = {
            TransferKind.SEND_F: self._send,
            TransferKind.RECV_F: lambda item: self._receive(item, self._forward),
            TransferKind.SEND_B: self._send,
            TransferKind.RECV_B: lambda item: self._receive(item, self._back),
        }

    def begin(self, row: Row, batch: Batch) -> None:
        """Start a step. `sizes`: for each unit, the numbers of sequences and tokens of this process."""
        self._row, ranks = row, self._transport.tensor_ranks
        shapes = [microbatch.token_ids.shape for microbatch in batch.microbatches]
        self.sizes = [(sequences, tokens // ranks) for sequences, tokens in shapes]

    def buffer(self, form: EdgeTensor, unit: int, make: Callable[..., Tensor] = torch.empty) -> Tensor:
        """Return a new tensor of this form for a unit, with the sizes of this process."""
        return make(form.sizes(*self.sizes[unit]), dtype=form.dtype, device=self._transport.torch_device)

    def _send(self, item: Transfer) -> None:
        communicator, peer = self._transport.communicator(item), self._transport.ranks[item.members[1]]
        for tensor in self._values.give((self._row.edge(item), self._row.unit(item))):
            self._values.sent(item, communicator.send(tensor, peer, str(item)))

    def _receive(self, item: Transfer, forms: Mapping[int, tuple[EdgeTensor, ...]]) -> None:
        communicator, peer = self._transport.communicator(item), self._transport.ranks[item.members[0]]
        edge, unit = self._row.edge(item), self._row.unit(item)
        buffers = tuple(self.buffer(form, unit) for form in forms[edge[1]])
        handles = [communicator.receive(buffer, peer, str(item)) for buffer in buffers]
        self._values.arriving((edge, unit), buffers, *handles)
