"""Handlers of the passes of a sharded vocabulary (E, G, S, C, T), and of the transfers between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.row import Row
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.values import Values
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.schedule import Kind, Pass, Transfer, TransferKind


class VocabularyPasses:
    """The part of the walker that works on this device's rows of the vocabulary. Arguments are those of `Walker`."""

    def __init__(
        self,
        values: Values,
        embedding: EmbeddingShard | None,
        output: OutputShard | None,
        transport: Transport,
        *,
        device: int,
    ) -> None:
        self._values = values
        self._embedding = embedding
        self._output = output
        self._transport = transport
        self._device = device
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
        self._combining = row.program.vocabulary.combining
        self._is_single_device = row.program.placement.devices == 1
        self._microbatches = batch.microbatches

    def end(self) -> None:
        """End a step."""
        self._microbatches = ()

    def _microbatch(self, item: Pass) -> tuple[int, Microbatch]:
        unit = self._row.unit(item)
        return unit, self._microbatches[unit]

    # --- embedding -------------------------------------------------------------------------------------------

    def _embed(self, item: Pass) -> None:
        assert self._embedding is not None
        unit, _ = self._microbatch(item)
        self._values.ready()
        self._values.put((TransferKind.ROWS, unit), self._embedding.rows(unit))

    def _exchange_rows(self, item: Transfer) -> None:
        """Every device sends its rows to the device of the first stage; empty messages are not sent."""
        assert self._embedding is not None
        unit = self._row.unit(item)
        key = (TransferKind.ROWS, unit)
        counts = self._embedding.counts(unit)
        communicator = self._transport.communicator(item)
        (rows,) = self._values.give(key)
        if self._device == item.root:
            local_rows, rows = rows, self._transport.rows(sum(counts))
            rows[communicator.own_rows(counts)] = local_rows
            handle = communicator.gather_rows(rows, counts, self._transport.root(item), str(item))
            self._values.arriving(key, (rows,), handle)
        else:
            self._values.sent(item, communicator.gather_rows(rows, counts, self._transport.root(item), str(item)))

    def _exchange_row_gradients(self, item: Transfer) -> None:
        """The device of the first stage sends each owner the gradients of its rows."""
        assert self._embedding is not None
        unit = self._row.unit(item)
        key = (TransferKind.ROW_GRADIENTS, unit)
        counts = self._embedding.counts(unit)
        communicator = self._transport.communicator(item)
        if self._device == item.root:
            (rows,) = self._values.give(key)
            self._values.put(key, rows[communicator.own_rows(counts)])
            self._values.sent(item, communicator.scatter_rows(rows, counts, self._transport.root(item), str(item)))
        else:
            buffer = self._transport.rows(counts[self._device])
            handle = communicator.scatter_rows(buffer, counts, self._transport.root(item), str(item))
            self._values.arriving(key, (buffer,), handle)

    def _embedding_gradient(self, item: Pass) -> None:
        assert self._embedding is not None
        unit, _ = self._microbatch(item)
        (gradient,) = self._values.take((TransferKind.ROW_GRADIENTS, unit))
        self._values.ready()
        self._embedding.add_gradient(gradient, unit)

    # --- output layer ----------------------------------------------------------------------------------------

    def _broadcast_hidden(self, item: Transfer) -> None:
        """The device of the last stage sends the output layer's input; its own S does not wait for the broadcast."""
        unit = self._row.unit(item)
        key = (TransferKind.X, unit)
        communicator, root = self._transport.communicator(item), self._transport.root(item)
        if self._device == item.root:
            (hidden,) = self._values.give(key)
            self._values.put(key, hidden)
            self._values.sent(item, communicator.broadcast(hidden, root, str(item)))
        else:
            hidden = self._transport.rows(self._microbatches[unit].tokens // self._transport.tensor_ranks)
            self._values.arriving(key, (hidden,), communicator.broadcast(hidden, root, str(item)))

    def _output_forward(self, item: Pass) -> None:
        assert self._output is not None
        unit, microbatch = self._microbatch(item)
        (hidden,) = self._values.take((TransferKind.X, unit))
        self._values.ready()
        statistics = self._output.forward(hidden, microbatch, unit, gradients=self._gradients)
        self._values.put((TransferKind.STATISTICS, unit), statistics)

    def _gather_statistics(self, item: Transfer) -> None:
        key = (TransferKind.STATISTICS, self._row.unit(item))
        (local,) = self._values.give(key)
        table = local.new_empty((len(item.members), *local.shape))
        self._values.arriving(key, (table,), self._transport.communicator(item).all_gather(local, str(item), table))

    def _open_barrier(self, unit: int, microbatch: Microbatch) -> None:
        """Wait for the statistics of all shards and compute the loss."""
        assert self._output is not None
        (table,) = self._values.take((TransferKind.STATISTICS, unit))
        if self._is_single_device:
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
        if self._combining is Kind.T:
            self._open_barrier(unit, microbatch)
        else:
            self._values.ready()
        gradient = self._output.backward(unit)
        if gradient is not None:
            self._values.put((TransferKind.DX, unit), gradient)

    def _reduce_gradient(self, item: Transfer) -> None:
        """Sum the partial gradients of all shards on the last stage's device. The reduce may overwrite its input."""
        key = (TransferKind.DX, self._row.unit(item))
        (gradient,) = self._values.give(key)
        handle = self._transport.communicator(item).reduce(gradient, self._transport.root(item), str(item))
        if self._device == item.root:
            self._values.arriving(key, (gradient,), handle)
        else:
            self._values.sent(item, handle)
