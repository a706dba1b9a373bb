"""Operations of torch on rows of logits.

On a CPU the steps from logits to exponentials process a few rows at a time, which stay in the processor's cache: for a
whole block each operation would read and write main memory. Setting the few target columns by index is cheaper than
masking a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evenpipe.vocabulary.combination import COUNT, MAXIMUM, SUM, TARGET, TOTAL, WEIGHTED, Combined, combine_plainly
from evenpipe.vocabulary.kernels import Rooms
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.state import OutputState, Products
from evenpipe.vocabulary.targets import Owned

LOG2_E = 1.0 / math.log(2.0)
CACHED_LOGITS = 256 * 1024
"""Logits that are processed at a time on a CPU: 1 MiB in fp32, the second-level cache of a core."""


def cached_rows(rows: int, columns: int) -> int:
    """Return how many rows of this many columns are processed at a time on a CPU."""
    return max(1, min(rows, CACHED_LOGITS // max(1, columns)))


class PlainKernels:
    """See `evenpipe.vocabulary.kernels.Kernels`."""

    by_column = False

    def tokens_at_once(self, tokens: int, columns: int, like: Tensor) -> int:
        """All on a GPU, where every operation is a separate launch."""
        return cached_rows(tokens, columns) if like.device.type == "cpu" else tokens

    def exponentials(
        self, rooms: Rooms, first: int, statistics: Tensor, state: OutputState, *, gradients: bool
    ) -> None:
        """Part by part of the block."""
        tokens = rooms.logits.shape[0]
        with _Work(rooms, state, statistics.dtype, gradients=gradients) as work:
            for start in range(0, tokens, work.size):
                part = slice(start, min(tokens, start + work.size))
                values, slope = work.logits_of(part)
                owned = state.targets.owned_between(first + part.start, first + part.stop)
                _exponentiate_(values, owned, state.options, statistics[part])
                if gradients:
                    work.store(values, slope, part)

    def exponentials_again(self, rooms: Rooms, first_column: int, maximum: Tensor, state: OutputState) -> None:
        """Part by part, with zeros at the targets at the end."""
        tokens, columns = rooms.exponentials.shape
        with _Work(rooms, state, maximum.dtype, gradients=True) as work:
            for start in range(0, tokens, work.size):
                part = slice(start, min(tokens, start + work.size))
                values, slope = work.logits_of(part)
                _exp_(values.sub_(maximum[part, None]))
                work.store(values, slope, part)
        owned = state.targets.owned
        shifted = owned.columns - first_column
        here = (shifted >= 0) & (shifted < columns)
        at_target = (owned.rows, shifted.clamp_(0, columns - 1))
        rooms.exponentials[at_target] = torch.where(here, 0.0, rooms.exponentials[at_target])

    def combine(
        self, statistics: Tensor, token_weights: Tensor, labels: Tensor, options: LossOptions, vocabulary: int
    ) -> Combined:
        """In fp64, only on numbers per token and shard."""
        return combine_plainly(statistics, token_weights, labels, options, vocabulary)

    def hidden_gradient(self, state: OutputState, combined: Combined, weight: Tensor, products: Products) -> Tensor:
        """In place in A."""
        product = products.exponentials
        product.mul_(_others(state, combined)[:, None])
        if combined.uniform is not None:
            uniform = state.targets.select(combined.uniform)
            if products.derivative is not None:
                product.addcmul_(products.derivative, uniform[:, None])
            elif state.options.adds_constant:
                product.addr_(uniform, weight.sum(0, dtype=product.dtype))
        owned = state.targets.owned
        target = state.targets.select(combined.target)[owned.rows]
        product.index_add_(0, owned.rows, weight[owned.columns] * target[:, None])
        return state.targets.spread(product)

    def scaled_hidden(
        self, state: OutputState, combined: Combined, hidden: Tensor, dtype: torch.dtype, *, of_derivative: bool
    ) -> tuple[Tensor, Tensor]:
        """Multiplied in the accumulator dtype."""
        if of_derivative:
            assert combined.uniform is not None
            coefficients = state.targets.select(combined.uniform)
        else:
            coefficients = _others(state, combined)
        return (hidden * coefficients[:, None]).to(dtype), coefficients

    def add_label_rows(
        self,
        state: OutputState,
        combined: Combined,
        hidden: Tensor,
        weight_gradient: Tensor | None,
        bias_gradient: Tensor | None,
    ) -> None:
        """By index; on a CPU in the order of tokens."""
        owned = state.targets.owned
        target = state.targets.select(combined.target)[owned.rows]
        if weight_gradient is not None:
            added = hidden[owned.rows] * target[:, None]
            if added.dtype == weight_gradient.dtype:
                weight_gradient.index_add_(0, owned.columns, added)
            else:  # the sum of a row is rounded once, however many tokens have it as their target
                columns, number = torch.unique(owned.columns, return_inverse=True)
                sums = weight_gradient[columns].to(added.dtype).index_add_(0, number, added)
                weight_gradient[columns] = sums.to(weight_gradient.dtype)
        if bias_gradient is not None:
            bias_gradient.index_add_(0, owned.columns, target)


def _others(state: OutputState, combined: Combined) -> Tensor:
    """Return r, the factor on this shard's exponentials, [valid tokens]."""
    assert state.maximum is not None
    maximum = state.targets.select(combined.maximum)
    return state.targets.select(combined.others) * torch.exp(state.maximum - maximum)


class _Work:
    """Memory for a part of a block: logits in the accumulator dtype, and the derivative of the soft-cap."""

    def __init__(self, rooms: Rooms, state: OutputState, dtype: torch.dtype, *, gradients: bool) -> None:
        like, buffers = rooms.logits, state.buffers
        tokens, columns = like.shape
        self.size = state.kernels.tokens_at_once(tokens, columns, like)
        self._rooms, self._options, self._buffers = rooms, state.options, buffers
        with_slope = gradients and state.options.soft_cap is not None
        self._values = None if like.dtype == dtype else buffers.take(self.size, columns, like, dtype)
        self._slope = buffers.take(self.size, columns, like, dtype) if with_slope else None
        self._shift = None if rooms.bias is None else rooms.bias.to(dtype)

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.give(self._values)
        self._buffers.give(self._slope)

    def logits_of(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return logits of some tokens with bias, scale and soft-cap; and the derivative of the soft-cap."""
        values = self._rooms.logits[part]
        size = values.shape[0]
        if self._values is not None:
            values = self._values[:size].copy_(values)
        if self._shift is not None:
            values.add_(self._shift)
        if self._options.logit_scale != 1.0:
            values.mul_(self._options.logit_scale)
        slope = None if self._slope is None else self._slope[:size]
        if self._options.soft_cap is not None:
            _soft_cap_(values, self._options.soft_cap, slope)
        return values, slope

    def store(self, values: Tensor, slope: Tensor | None, part: slice) -> None:
        """Store them in their place, in the dtype of kept exponentials."""
        exponentials = self._rooms.exponentials[part]
        if slope is not None:
            values.mul_(slope)
            if self._rooms.derivative is not None:
                self._rooms.derivative[part] = slope
        if values.data_ptr() != exponentials.data_ptr():
            exponentials.copy_(values)


def _soft_cap_(logits: Tensor, soft_cap: float, derivative: Tensor | None) -> None:
    """logits <- soft_cap tanh(logits / soft_cap), and its derivative 1 - tanh^2 into `derivative`."""
    logits.div_(soft_cap).tanh_()
    if derivative is not None:
        torch.mul(logits, logits, out=derivative).neg_().add_(1.0)
    logits.mul_(soft_cap)


def _exp_(values: Tensor) -> None:
    """values <- exp(values). On a CPU a multiplication and exp2 take half the time of exp."""
    if values.device.type == "cpu":
        values.mul_(LOG2_E).exp2_()
    else:
        values.exp_()


def _exponentiate_(logits: Tensor, owned: Owned, options: LossOptions, statistics: Tensor) -> None:
    """logits [tokens, rows >= 1] (scaled and capped) <- exp(z - maximum of the others), 0 at the target.

    statistics: [tokens, options.statistics], written.
    """
    at_target = (owned.rows, owned.columns)
    statistics[:, TARGET] = 0.0
    statistics[owned.rows, TARGET] = logits[at_target]
    logits[at_target] = -torch.inf
    maximum = logits.amax(1)
    statistics[:, MAXIMUM] = maximum
    maximum.masked_fill_(maximum == -torch.inf, 0.0)
    if options.label_smoothing:
        logits[at_target] = maximum[owned.rows]
        logits.sub_(maximum[:, None])
        statistics[:, TOTAL] = logits.sum(1)
        statistics[:, COUNT] = logits.shape[1]
        statistics[owned.rows, COUNT] = logits.shape[1] - 1.0
        logits[at_target] = -torch.inf
    else:
        logits.sub_(maximum[:, None])
    _exp_(logits)
    statistics[:, SUM] = logits.sum(1)
    if options.entropy:
        statistics[:, WEIGHTED] = torch.special.entr(logits).sum(1).neg_()
