"""The vocabulary layers of a device during a step: E and G, S, C and T on its rows.

`evenpipe.vocabulary` has the mathematics as plain functions; this module adds the parameters, and keeps the state of
each microbatch between passes. The walker does the communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.parallel.parameters import Matrix
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.tensor.exchange import Exchange
from evenpipe.vocabulary import (
    Buffers,
    Combined,
    LossOptions,
    OutputState,
    Routes,
    Shard,
    add_row_gradients,
    backward_shard,
    combine,
    forward_shard,
    gather_rows,
    hidden_gradient,
    merge,
    pick_row_gradients,
    place_rows,
    route,
)
from evenpipe.vocabulary.copies import to_device


class EmbeddingShard:
    """This device's rows of the input embedding, and the routes of the step's token ids.

    Every tensor rank exchanges the rows of its own column of the grid with the first stage. There the ranks sum what
    they received: each row arrives in a single column, so the other columns add zeros.
    """

    def __init__(
        self,
        matrix: Matrix,
        shards: Sequence[Shard],
        index: int,
        padding_index: int | None,
        exchange: Exchange | None = None,
    ) -> None:
        """
        Args:
            shards: device by device, and in each by tensor rank.
            index: of this process's shard.
            exchange: of the tensor ranks of the device; None for a single rank.
        """
        self._matrix = matrix
        self._shards = shards
        self.index = index
        self._padding_index = padding_index
        self._exchange = exchange
        ranks, rank = (1, 0) if exchange is None else (exchange.size, exchange.rank)
        self._column = range(rank, len(shards), ranks)
        self._token_ids: list[Tensor] = []
        self._routes: dict[int, Routes] = {}

    def begin(self, batch: Batch) -> None:
        self._token_ids = [microbatch.token_ids for microbatch in batch.microbatches]

    def end(self) -> None:
        """Release the step's routes."""
        self._token_ids = []
        self._routes.clear()

    def _routes_of(self, microbatch: int) -> Routes:
        """Return the routes of a microbatch. They are computed when it is reached, while earlier kernels run."""
        if microbatch not in self._routes:
            ids, device = self._token_ids[microbatch], self._matrix.parameter.device
            self._routes[microbatch] = route(ids, self._shards, device, padding_index=self._padding_index)
        return self._routes[microbatch]

    def counts(self, microbatch: int) -> tuple[int, ...]:
        """Return the number of rows from each device's shard in this column: the sizes of all messages, known on every
        device."""
        counts = self._routes_of(microbatch).counts
        return tuple(counts[shard] for shard in self._column)

    def rows(self, microbatch: int) -> Tensor:
        """E: return [own count, hidden_size]."""
        return gather_rows(self._matrix.weight, self._routes_of(microbatch), self.index)

    def place(self, rows: Tensor, microbatch: int) -> Tensor:
        """At the first stage: put the rows of this column's shards, shard by shard, at the tokens' positions.

        Returns [n, hidden_size], with the rows of all columns.
        """
        routes, counts = self._routes_of(microbatch), self.counts(microbatch)
        if self._exchange is None:
            return place_rows(rows.split(counts), routes)
        return self._exchange.sum(place_rows(rows.split(counts), routes, self._column))

    def pick(self, gradient: Tensor, microbatch: int) -> Tensor:
        """At the first stage: return the gradient of the placed rows [n, hidden_size] in the layout of `place`'s
        argument. Each tensor rank has a partial gradient of every row."""
        if self._exchange is None:
            return pick_row_gradients(gradient, self._routes_of(microbatch))
        return pick_row_gradients(self._exchange.sum(gradient), self._routes_of(microbatch), self._column)

    def add_gradient(self, rows_gradient: Tensor, microbatch: int) -> None:
        """G: add [own count, hidden_size] to the gradient of this process's rows."""
        if self._matrix.trainable:
            add_row_gradients(self._matrix.gradient(), rows_gradient, self._routes_of(microbatch), self.index)


class OutputShard:
    """This device's rows of the output layer: S, the combination at the barrier, C and T, and the loss."""

    def __init__(
        self,
        matrix: Matrix,
        bias: Matrix | None,
        shard: Shard,
        options: LossOptions,
        *,
        one_barrier: bool,
        exchange: Exchange | None = None,
    ) -> None:
        self._matrix = matrix
        self._bias = bias
        self._shard = shard
        self._options = options
        self._one_barrier = one_barrier
        self._exchange = exchange
        self._buffers = Buffers()
        self._buffers_serve: tuple[int, bool] | None = None
        self._targets: dict[int, Tensor] = {}
        self._states: dict[int, OutputState] = {}
        self._combined: dict[int, Combined] = {}
        self._losses: dict[int, Tensor] = {}
        self._entropies: dict[int, Tensor] = {}
        self.log_probabilities: dict[int, Tensor] = {}
        """Evaluation only: per microbatch [n], the log-probability of each position's target."""

    @property
    def room(self) -> list[Tensor]:
        """Return buffers of the last step that the next one reuses."""
        return self._buffers.free

    @property
    def loss(self) -> Tensor | None:
        """The step's loss so far, a scalar: bitwise identical on all devices that hold an output shard, whatever order
        they process microbatches in."""
        return _sum_in_order(self._losses)

    @property
    def entropy(self) -> Tensor | None:
        """The entropy likewise, if the loss options ask for it."""
        return _sum_in_order(self._entropies)

    @property
    def left(self) -> tuple[int, ...]:
        """Return microbatches whose S has run, but not all later passes."""
        return tuple({*self._targets, *self._states, *self._combined})

    def clear(self) -> None:
        """Release the results of the last step, or of a failed one."""
        self._targets.clear()
        self._states.clear()
        self._combined.clear()
        self._losses.clear()
        self._entropies.clear()
        self.log_probabilities = {}

    def forward(self, hidden: Tensor, microbatch: Microbatch, index: int, *, gradients: bool) -> Tensor:
        """S: return statistics [n, options.statistics] of this device's shards.

        hidden: [n, hidden_size], kept until T; a tensor rank has its own rows of it.

        A batch of another size, or a change between training and evaluation, discards the free buffers.
        """
        if self._exchange is not None:
            hidden = self._exchange.gather(hidden)
        serve = (hidden.shape[0], gradients)
        if serve != self._buffers_serve:
            self._buffers.clear()
            self._buffers_serve = serve
        # S needs targets on the host, for the sizes of its index lists; combine needs them on the statistics' device.
        self._targets[index] = to_device(microbatch.targets, hidden.device)
        statistics, state = forward_shard(
            hidden,
            self._matrix.weight,
            None if self._bias is None else self._bias.weight,
            microbatch.targets,
            self._shard,
            self._options,
            self._one_barrier,
            gradients=gradients,
            buffers=self._buffers,
        )
        if gradients:
            self._states[index] = state
        return statistics if self._exchange is None else merge(self._exchange.table(statistics), self._options)

    def combine(self, table: Tensor, microbatch: Microbatch, index: int, *, gradients: bool) -> None:
        """Begin C, or T with two barriers: compute the loss of the microbatch from [shards, n, options.statistics]."""
        targets = self._targets.pop(index)
        combined = combine(table, microbatch.weights, targets, self._options, self._shard.vocabulary)
        weights = microbatch.weights.to(combined.losses.dtype)
        self._losses[index] = torch.dot(combined.losses, weights)
        if combined.entropies is not None:
            self._entropies[index] = torch.dot(combined.entropies, weights)
        if gradients:
            self._combined[index] = combined
        else:
            self.log_probabilities[index] = combined.log_probabilities

    def hidden_gradient(self, index: int) -> Tensor:
        """C with one barrier: return this device's partial gradient of the hidden states, laid out as S's input."""
        partial = hidden_gradient(self._states[index], self._combined[index], self._matrix.weight)
        return partial if self._exchange is None else self._exchange.scatter(partial)

    def backward(self, index: int) -> Tensor | None:
        """T: add to the gradients of the rows. With two barriers, also return the result of `hidden_gradient`."""
        partial = backward_shard(
            self._states.pop(index),
            self._combined.pop(index),
            self._matrix.weight,
            self._matrix.gradient() if self._matrix.trainable else None,
            self._bias.gradient() if self._bias is not None and self._bias.trainable else None,
        )
        return partial if partial is None or self._exchange is None else self._exchange.scatter(partial)


def _sum_in_order(by_microbatch: dict[int, Tensor]) -> Tensor | None:
    total = None
    for index in sorted(by_microbatch):
        total = by_microbatch[index] if total is None else total + by_microbatch[index]
    return total
