"""Operations of torch on rows of logits.

On a CPU the steps from logits to exponentials process a few rows at a time, which stay in the processor's cache: for a
whole block each operation would read and write main memory. Setting the few target columns by index is cheaper than
masking a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from evenpipe.vocabulary.combination import COUNT, MAXIMUM, SUM, TARGET, TOTAL, WEIGHTED, Combined, combine_plainly
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.state import OutputState, Products, Rooms
from evenpipe.vocabulary.targets import Owned

LOG2_E = 1.0 / math.log(2.0)
CACHED_LOGITS = 256 * 1024
"""Logits that are processed at a time on a CPU: 1 MiB in fp32, the second-level cache of a core."""


def cached_rows(rows: int, columns: int) -> int:
    """Return how many rows of this many columns are processed at a time on a CPU."""
    return max(1, min(rows, CACHED_LOGITS // max(1, columns)))


class Kernels:
    """Letters as in output.py. Tokens are valid ones; tensors with [tokens] in `Combined` count all."""

    by_column = False
    """Whether it needs targets by column (see `Targets`)."""

    def tokens_at_once(self, tokens: int, columns: int, like: Tensor) -> int:
        """Return how many of a block's tokens `exponentials` processes at a time: all on a GPU, where every operation
        is a separate launch."""
        return cached_rows(tokens, columns) if like.device.type == "cpu" else tokens

    def exponentials(
        self, rooms: Rooms, first: int, statistics: Tensor, state: OutputState, *, gradients: bool
    ) -> None:
        """Convert a block of logits, of tokens from `first` on, to statistics [tokens, k] and, for gradients,
        exponentials."""
        for rows, values in _parts_of_logits(rooms, state, statistics.dtype, gradients=gradients):
            owned = state.targets.owned_between(first + rows.start, first + rows.stop)
            _exponentiate_(values, owned, state.options, statistics[rows])

    def exponentials_again(self, rooms: Rooms, first_column: int, maximum: Tensor, state: OutputState) -> None:
        """Convert logits of all tokens and the shard's columns from `first_column` on to the same exponentials again.

        maximum: [tokens], of the whole shard.
        """
        for rows, values in _parts_of_logits(rooms, state, maximum.dtype, gradients=True):
            _exp_(values.sub_(maximum[rows, None]))
        owned, columns = state.targets.owned, rooms.exponentials.shape[1]
        shifted = owned.columns - first_column
        in_columns = (shifted >= 0) & (shifted < columns)
        at_target = (owned.rows, shifted.clamp_(0, columns - 1))
        rooms.exponentials[at_target] = torch.where(in_columns, 0.0, rooms.exponentials[at_target])

    combine = staticmethod(combine_plainly)

    def hidden_gradient(self, state: OutputState, combined: Combined, weight: Tensor, products: Products) -> Tensor:
        """Compute dX = r A + u (D W) + c W[target], [all tokens, hidden_size], zero at ignored ones; may overwrite
        A."""
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
        """Return r X (or u X) in the dtype of exponentials, and r (or u), [tokens]."""
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
        """Add c X to the rows of the targets in the gradient of the weight, and c to that of the bias."""
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


def _parts_of_logits(
    rooms: Rooms, state: OutputState, dtype: torch.dtype, *, gradients: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield parts of the tokens, and their logits with bias, scale and soft-cap, in the accumulator dtype.

    With `gradients`, the caller converts these to exponentials, which are then stored in their place, as is the
    derivative of the soft-cap.
    """
    options, buffers, (tokens, columns) = state.options, state.buffers, rooms.logits.shape
    size = state.kernels.tokens_at_once(tokens, columns, rooms.logits)
    widened = None if rooms.logits.dtype == dtype else buffers.take(size, columns, rooms.logits, dtype)
    with_slope = gradients and options.soft_cap is not None
    slopes = buffers.take(size, columns, rooms.logits, dtype) if with_slope else None
    bias = None if rooms.bias is None else rooms.bias.to(dtype)
    for start in range(0, tokens, size):
        rows = slice(start, min(tokens, start + size))
        values, exponentials = rooms.logits[rows], rooms.exponentials[rows]
        if widened is not None:
            values = widened[: len(values)].copy_(values)
        if bias is not None:
            values.add_(bias)
        if options.logit_scale != 1.0:
            values.mul_(options.logit_scale)
        slope = None if slopes is None else slopes[: len(values)]
        if options.soft_cap is not None:
            _soft_cap_(values, options.soft_cap, slope)
        yield rows, values
        if slope is not None:
            values.mul_(slope)
            if rooms.derivative is not None:
                rooms.derivative[rows] = slope
        if gradients and values.data_ptr() != exponentials.data_ptr():
            exponentials.copy_(values)
    buffers.give(widened, slopes)


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
