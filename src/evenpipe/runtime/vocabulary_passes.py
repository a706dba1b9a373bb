"""Handlers of the passes of a sharded vocabulary (E, G, S, C, T), and of the transfers between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from evenpipe.communication.communicator import Communicator
from evenpipe.communication.communicators import Communicators
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.row import Row
from evenpipe.runtime.values import Values
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.schedule import Kind, Pass, Transfer, TransferKind


class VocabularyPasses:
    """The walker's work on this device's rows of the vocabulary. Arguments are those of `Walker`."""

    def __init__(
        self,
        values: Values,
        embedding: EmbeddingShard | None,
        output: OutputShard | None,
        *,
        device: int,
        communicators: Communicators | None,
        ranks: Sequence[int],
        hidden_size: int,
        hidden_dtype: torch.dtype,
        torch_device: torch.device,
    ) -> None:
        self._values = values
        self._embedding = embedding
        self._output = output
        self._device = device
        self._communicators = communicators
        self._ranks = ranks
        self._hidden_size = hidden_size
        self._hidden_dtype = hidden_dtype
        self._torch_device = torch_device
        self.passes: Mapping[Kind, Callable[[Pass], None]] = {
            Kind.E: self._embed,
            Kind.G: self._embedding_gradient,
            Kind.S: self._output_forward,
            Kind.C: self._combine,
            Kind.T: self._output_backward,
        }
        self.transfers: Mapping[TransferKind, Callable[[Transfer], None]] = {
            TransferKind.X: self._broadcast_hidden,
            TransferKind.STATISTICS: self._gather_statistics,
            TransferKind.DX: self._reduce_gradient,
            TransferKind.ROWS: self._exchange_rows,
            TransferKind.ROW_GRADIENTS: self._exchange_row_gradients,
        }

    def begin(self, row: Row, batch: Batch) -> None:
        """Start a step."""
        self._row = row
        self._gradients = row.gradients
        self._barriers = row.program.barriers
        self._alone = row.program.placement.devices == 1
        self._microbatches = batch.microbatches

    def end(self) -> None:
        """End a step."""
        self._microbatches = ()

    def _microbatch(self, item: Pass) -> tuple[int, Microbatch]:
        unit = self._row.unit(item)
        return unit, self._microbatches[unit]

    def _communicator(self, item: Transfer) -> Communicator:
        assert self._communicators is not None
        return self._communicators[item.communicator]

    def _root(self, item: Transfer) -> int:
        """Return the global rank of a transfer's root."""
        assert item.root is not None
        return self._ranks[item.root]

    def _buffer(self, rows: int) -> Tensor:
        return torch.empty((rows, self._hidden_size), dtype=self._hidden_dtype, device=self._torch_device)

    # --- embedding -------------------------------------------------------------------------------------------

    def _embed(self, item: Pass) -> None:
        assert self._embedding is not None
        unit, _ = self._microbatch(item)
        self._values.ready()
        self._values.put((TransferKind.ROWS, unit), self._embedding.rows(unit))

    def _exchange_rows(self, item: Transfer) -> None:
        """Every device sends its rows to the first stage's; empty messages are not sent."""
        assert self._embedding is not None
        unit = self._row.unit(item)
        key = (TransferKind.ROWS, unit)
        counts = self._embedding.counts(unit)
        communicator = self._communicator(item)
        (rows,) = self._values.give(key)
        if self._device == item.root:
            own, rows = rows, self._buffer(sum(counts))
            rows[communicator.own_rows(counts)] = own
            handle = communicator.gather_rows(rows, counts, self._root(item), str(item))
            self._values.arriving(key, (rows,), handle)
        else:
            self._values.sent(item, communicator.gather_rows(rows, counts, self._root(item), str(item)))

    def _exchange_row_gradients(self, item: Transfer) -> None:
        """The first stage's device sends each owner the gradients of its rows."""
        assert self._embedding is not None
        unit = self._row.unit(item)
        key = (TransferKind.ROW_GRADIENTS, unit)
        counts = self._embedding.counts(unit)
        communicator = self._communicator(item)
        if self._device == item.root:
            (rows,) = self._values.give(key)
            self._values.put(key, rows[communicator.own_rows(counts)])
            self._values.sent(item, communicator.scatter_rows(rows, counts, self._root(item), str(item)))
        else:
            buffer = self._buffer(counts[self._device])
            handle = communicator.scatter_rows(buffer, counts, self._root(item), str(item))
            self._values.arriving(key, (buffer,), handle)

    def _embedding_gradient(self, item: Pass) -> None:
        assert self._embedding is not None
        unit, _ = self._microbatch(item)
        (gradient,) = self._values.take((TransferKind.ROW_GRADIENTS, unit))
        self._values.ready()
        self._embedding.add_gradient(gradient, unit)

    # --- output layer ----------------------------------------------------------------------------------------

    def _broadcast_hidden(self, item: Transfer) -> None:
        unit = self._row.unit(item)
        key = (TransferKind.X, unit)
        if self._device == item.root:
            (hidden,) = self._values.give(key)
        else:
            hidden = self._buffer(self._microbatches[unit].tokens)
        self._values.arriving(key, (hidden,), self._communicator(item).broadcast(hidden, self._root(item), str(item)))

    def _output_forward(self, item: Pass) -> None:
        assert self._output is not None
        unit, microbatch = self._microbatch(item)
        (hidden,) = self._values.take((TransferKind.X, unit))
        self._values.ready()
        statistics = self._output.forward(hidden, microbatch, unit, gradients=self._gradients)
        self._values.put((TransferKind.STATISTICS, unit), statistics)

    def _gather_statistics(self, item: Transfer) -> None:
        key = (TransferKind.STATISTICS, self._row.unit(item))
        (own,) = self._values.give(key)
        table = own.new_empty((len(item.members), *own.shape))
        self._values.arriving(key, (table,), self._communicator(item).all_gather(table, own, str(item)))

    def _open_barrier(self, unit: int, microbatch: Microbatch) -> None:
        """Wait for the statistics of all shards and finish the loss."""
        assert self._output is not None
        (table,) = self._values.take((TransferKind.STATISTICS, unit))
        if self._alone:
            table = table.unsqueeze(0)
        self._values.ready()
        self._output.combine(table, microbatch, unit, gradients=self._gradients)

    def _combine(self, item: Pass) -> None:
        assert self._output is not None
        unit, microbatch = self._microbatch(item)
        self._open_barrier(unit, microbatch)
        if self._gradients:
            self._values.put((TransferKind.DX, unit), self._output.hidden_gradient(unit))

    def _output_backward(self, item: Pass) -> None:
        assert self._output is not None
        unit, microbatch = self._microbatch(item)
        if self._barriers == 2:
            self._open_barrier(unit, microbatch)
        else:
            self._values.ready()
        part = self._output.backward(unit)
        if part is not None:
            self._values.put((TransferKind.DX, unit), part)

    def _reduce_gradient(self, item: Transfer) -> None:
        """Add the parts of all shards on the last stage's device. The part is scratch: reduce may destroy it."""
        key = (TransferKind.DX, self._row.unit(item))
        (part,) = self._values.give(key)
        handle = self._communicator(item).reduce(part, self._root(item), str(item))
        if self._device == item.root:
            self._values.arriving(key, (part,), handle)
        else:
            self._values.sent(item, handle)
