"""S, C and T: the output layer and its loss on one shard of the vocabulary, as plain functions without communication.

arXiv 2411.05288, sections 4.2 (algorithm 1, two barriers) and 4.3 (algorithm 2, one barrier), in log-odds form with
stored exponentials (see combination.py): three matrix products in all, and fp32 logits only in blocks of tokens.

    one barrier     S: logits, statistics, E, A = E W   | C: dX = r A + c W[target]   | T: dW += E^T (r X)
    two barriers    S: logits, statistics, E            | T: dX = r (E W) + c W[target], dW += E^T (r X)

X [tokens, hidden_size] hidden states, W [rows, hidden_size] this shard of the weight, E [tokens, rows] exponentials
without the target's (times the derivative of the soft-cap D, if there is one), r and c coefficients per token, known
once the statistics of all shards are combined. Label smoothing adds u D with a coefficient u (D = 1 without soft-cap).
The parts dX of all shards are summed by the caller, on the device of the last stage.

Ignored tokens are left out at the door: they cost nothing, and whatever stands in their rows of X reaches no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from evenpipe.vocabulary.buffers import Buffers
from evenpipe.vocabulary.combination import MAXIMUM, Combined
from evenpipe.vocabulary.exponentials import exponentiate_, exponentiate_again_
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.products import (
    accumulator_dtype,
    column_product,
    hidden_product,
    logits_product,
    stored_dtype,
    vocabulary_slices,
    weight_product,
)
from evenpipe.vocabulary.shards import Shard
from evenpipe.vocabulary.targets import Targets, find_targets

BLOCK_LOGITS = 8 * 1024 * 1024


@dataclass(slots=True)
class OutputState:
    """What S leaves for C and T of the same microbatch on the same shard. All tensors hold valid tokens only.

    C takes the products out, T the rest: each runs once, and memory goes as soon as it can.
    """

    options: LossOptions
    shard: Shard
    targets: Targets
    one_barrier: bool
    buffers: Buffers
    hidden: Tensor | None
    """X."""
    bias: Tensor | None
    maximum: Tensor | None = None
    """[tokens], this shard's maximum without the target, 0 where there is none. None: nothing to do for this shard."""
    exponentials: Tensor | None = None
    """E, unless nothing is kept."""
    derivative: Tensor | None = None
    """D, only with both soft-cap and label smoothing, unless nothing is kept."""
    product: Tensor | None = None
    """A = E W, one barrier only."""
    derivative_product: Tensor | None = None
    """D W, one barrier with both soft-cap and label smoothing only."""

    @property
    def needs_derivative(self) -> bool:
        """Is D needed by itself, not only as a factor of E?"""
        return self.options.soft_cap is not None and self.options.label_smoothing > 0.0

    @property
    def adds_constant(self) -> bool:
        """Does label smoothing add the same number to the gradient of every logit of a token?"""
        return self.options.soft_cap is None and self.options.label_smoothing > 0.0


def _rows_per_block(options: LossOptions, rows: int, in_place: bool) -> int:
    """Tokens per block. A block that is part of the kept exponentials needs no room of its own and may be larger."""
    if options.rows_per_block is not None:
        return options.rows_per_block
    return max(1024 if in_place else 256, BLOCK_LOGITS // max(1, rows) // 256 * 256)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shard: Shard) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [tokens, hidden_size] and weight [rows, hidden_size],"
            f" not {list(hidden.shape)} and {list(weight.shape)}."
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must have one dtype, not {hidden.dtype} and {weight.dtype}.")
    if weight.shape[0] != shard.rows:
        raise ValueError(f"weight must have the shard's {shard.rows} rows, not {weight.shape[0]}.")
    if bias is not None and bias.shape != (shard.rows,):
        raise ValueError(f"bias must have the shape [{shard.rows}], not {list(bias.shape)}.")
    if labels.shape != (hidden.shape[0],):
        raise ValueError(f"labels must have the shape [{hidden.shape[0]}], not {list(labels.shape)}.")


def _neutral_statistics(tokens: int, options: LossOptions, like: Tensor) -> Tensor:
    statistics = torch.zeros(tokens, options.statistics, dtype=accumulator_dtype(like.dtype), device=like.device)
    statistics[:, MAXIMUM] = -torch.inf
    return statistics


@torch.no_grad()
def forward_shard(  # noqa: PLR0917 - the arguments of a linear layer and its loss, in their usual order
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shard: Shard,
    options: LossOptions,
    one_barrier: bool,
    gradients: bool = True,
    buffers: Buffers | None = None,
) -> tuple[Tensor, OutputState]:
    """S: this shard's statistics, and the state that `hidden_gradient` and `backward_shard` continue from.

    hidden: [tokens, hidden_size], what the head receives. Kept, not copied, until T (unless tokens are ignored).
    weight: [shard.rows, hidden_size], in the dtype of hidden. bias: [shard.rows], any floating dtype, or None.
    labels: [tokens] int64, aligned with hidden. On the host they cost no synchronisation with a GPU.
    one_barrier: also compute what `hidden_gradient` needs.
    gradients: False for evaluation: only the statistics are of use, and nothing is kept.
    buffers: memory to use again and again; None: fresh memory, given up after T.

    Returns statistics [tokens, options.statistics], fp32 (fp64 for fp64), to be gathered from all shards for `combine`.
    Raises ValueError for shapes or dtypes that do not fit, InputError for a label that is no token.
    """
    _check(hidden, weight, bias, labels, shard)
    in_place = gradients and options.keep == "probabilities" and hidden.dtype == accumulator_dtype(hidden.dtype)
    block = _rows_per_block(options, shard.tokens, in_place)
    targets = find_targets(labels, shard, options.ignore_index, block, hidden.device)
    statistics = _neutral_statistics(targets.valid_tokens, options, hidden)
    buffers = Buffers() if buffers is None else buffers
    state = OutputState(options, shard, targets, one_barrier, buffers, targets.select(hidden), bias)
    if shard.tokens and targets.valid_tokens:
        _forward_blocks(state, weight[: shard.tokens], statistics, gradients)
        maximum = statistics[:, MAXIMUM]
        state.maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    if not gradients:
        state.hidden = state.bias = state.maximum = None
    if targets.valid is not None:
        spread = _neutral_statistics(targets.tokens, options, hidden)
        statistics = spread.index_copy_(0, targets.valid, statistics)
    return statistics, state


def _forward_blocks(state: OutputState, weight: Tensor, statistics: Tensor, gradients: bool) -> None:
    """Block after block of tokens: logits, statistics, exponentials. What is kept of them goes into `state`."""
    options, targets, hidden, buffers = state.options, state.targets, state.hidden, state.buffers
    assert hidden is not None
    tokens, rows = hidden.shape[0], weight.shape[0]
    dtype, stored = statistics.dtype, stored_dtype(hidden.dtype)

    keep = gradients and options.keep == "probabilities"
    if keep:
        stored_room = buffers.take(tokens, rows, hidden, stored, room=targets.tokens)
        state.exponentials = stored_room
        if state.needs_derivative:
            state.derivative = buffers.take(tokens, rows, hidden, stored, room=targets.tokens)
    else:
        stored_room = buffers.take(targets.block, rows, hidden, stored)
    if gradients and state.one_barrier:
        state.product = hidden.new_zeros(tokens, hidden.shape[1], dtype=dtype)
        if state.needs_derivative:
            state.derivative_product = torch.zeros_like(state.product)

    # Exponentials are made in `logits_room` and end up in `stored_room`, at once where the dtypes are one.
    logits_room = None if stored == dtype else buffers.take(targets.block, rows, hidden, dtype)
    with_derivative = gradients and options.soft_cap is not None
    derivative_room = buffers.take(targets.block, rows, hidden, dtype) if with_derivative else None
    shift = _shift(state, slice(0, rows), dtype)

    for number, start in enumerate(range(0, tokens, targets.block)):
        span = slice(start, min(tokens, start + targets.block))
        size = span.stop - span.start
        exponentials = stored_room[span] if keep else stored_room[:size]
        logits = exponentials if logits_room is None else logits_room[:size]
        derivative = None if derivative_room is None else derivative_room[:size]
        logits_product(hidden[span], weight, options.logit_scale, logits, rounded=exponentials)
        if shift is not None:
            logits.add_(shift)
        exponentiate_(logits, targets.owned_in_block(number), options, statistics[span], derivative)
        if not gradients:
            continue
        if derivative is not None:
            logits.mul_(derivative)
        if logits is not exponentials:
            exponentials.copy_(logits)
        if state.derivative is not None and derivative is not None:
            state.derivative[span] = derivative
        if state.product is not None:
            hidden_product(exponentials, weight, state.product[span])
        if state.derivative_product is not None and derivative is not None:
            hidden_product(derivative.to(stored), weight, state.derivative_product[span])
    buffers.give(None if keep else stored_room)
    buffers.give(logits_room)
    buffers.give(derivative_room)


def _shift(state: OutputState, columns: slice, dtype: torch.dtype) -> Tensor | None:
    """What the bias adds to the scaled logits of these columns of the shard."""
    return None if state.bias is None else state.bias[columns].to(dtype) * state.options.logit_scale


@torch.no_grad()
def hidden_gradient(state: OutputState, combined: Combined, weight: Tensor) -> Tensor:
    """C, one barrier: this shard's part of the gradient with respect to `hidden`, from the product that S made.

    With two barriers it is the first half of T, for a backward that is split into I and W: `backward_shard` then only
    adds the gradient of the shard and returns None.

    weight: as in `forward_shard`. Returns [tokens, hidden_size], fp32 (fp64 for fp64), zero at ignored tokens.
    """
    assert state.hidden is not None, "the hidden gradient follows S with gradients, and precedes T"
    if state.maximum is None:
        state.one_barrier = True
        return combined.losses.new_zeros(state.targets.tokens, weight.shape[1])
    if not state.one_barrier:
        _multiply_by_weight(state, weight[: state.shard.tokens])
    product, derivative_product = state.product, state.derivative_product
    state.product = state.derivative_product = None
    assert product is not None, "C runs once for each S"
    return _finish_hidden_gradient(state, combined, weight, product, derivative_product)


def _multiply_by_weight(state: OutputState, weight: Tensor) -> None:
    """E W (and D W) by themselves, which S makes with one barrier. From here on the state is as with one."""
    hidden, maximum = state.hidden, state.maximum
    assert hidden is not None and maximum is not None
    state.one_barrier = True
    state.product = hidden.new_zeros(hidden.shape, dtype=maximum.dtype)
    if state.needs_derivative:
        state.derivative_product = torch.zeros_like(state.product)
    for columns, exponentials, derivative in _exponentials(state, weight, hidden, maximum):
        hidden_product(exponentials, weight[columns], state.product)
        if derivative is not None and state.derivative_product is not None:
            hidden_product(derivative, weight[columns], state.derivative_product)


@torch.no_grad()
def backward_shard(
    state: OutputState,
    combined: Combined,
    weight: Tensor,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None = None,
) -> Tensor | None:
    """T: add this microbatch's gradient of the shard, and with two barriers return the part of dX as well.

    weight: as in `forward_shard`. weight_gradient: [shard.rows, hidden_size] and bias_gradient: [shard.rows], fp32
    (fp64 for fp64), added to in place; None where none is wanted. Rows that pad the vocabulary are left as they are.

    Returns [tokens, hidden_size], fp32 (fp64 for fp64) and zero at ignored tokens, with two barriers; None with one.
    Raises ValueError when a gradient has another dtype or shape.
    """
    dtype = combined.losses.dtype
    _check_gradient("weight_gradient", weight_gradient, weight.shape, dtype)
    _check_gradient("bias_gradient", bias_gradient, weight.shape[:1], dtype)
    hidden, maximum = state.hidden, state.maximum
    assert hidden is not None, "T runs once, after S with gradients"
    state.hidden = None
    if maximum is None:
        return None if state.one_barrier else combined.losses.new_zeros(state.targets.tokens, weight.shape[1])

    rows = state.shard.tokens
    weight = weight[:rows]
    weight_gradient = None if weight_gradient is None else weight_gradient[:rows]
    bias_gradient = None if bias_gradient is None else bias_gradient[:rows]
    others = _others(state, combined)
    uniform = None if combined.uniform is None else state.targets.select(combined.uniform)
    product = None if state.one_barrier else hidden.new_zeros(hidden.shape, dtype=dtype)
    derivative_product = torch.zeros_like(product) if product is not None and state.needs_derivative else None

    def add(factor: Tensor, coefficients: Tensor, columns: slice, total: Tensor | None) -> None:
        """The products of one factor (E or D) with W and with X."""
        if total is not None:
            hidden_product(factor, weight[columns], total)
        if weight_gradient is not None:
            scaled = (hidden * coefficients[:, None]).to(factor.dtype)
            weight_product(factor, scaled, weight_gradient[columns])
        if bias_gradient is not None:
            column_product(factor, coefficients, bias_gradient[columns])

    if product is not None or weight_gradient is not None or bias_gradient is not None:
        for columns, exponentials, derivative in _exponentials(state, weight, hidden, maximum):
            add(exponentials, others, columns, product)
            if derivative is not None and uniform is not None:
                add(derivative, uniform, columns, derivative_product)
    state.buffers.give(state.exponentials)
    state.buffers.give(state.derivative)
    state.exponentials = state.derivative = None

    owned = state.targets.owned
    target = state.targets.select(combined.target)[owned.rows]
    if weight_gradient is not None:
        if state.adds_constant and uniform is not None:
            weight_gradient.add_(uniform @ hidden.to(dtype))
        weight_gradient.index_add_(0, owned.columns, hidden[owned.rows] * target[:, None])
    if bias_gradient is not None:
        if state.adds_constant and uniform is not None:
            bias_gradient.add_(uniform.sum())
        bias_gradient.index_add_(0, owned.columns, target)
    if product is None:
        return None
    return _finish_hidden_gradient(state, combined, weight, product, derivative_product)


def _check_gradient(name: str, gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
    if gradient is not None and (gradient.shape != shape or gradient.dtype != dtype):
        raise ValueError(f"{name} must be {list(shape)} in {dtype}, not {list(gradient.shape)} in {gradient.dtype}.")


def _others(state: OutputState, combined: Combined) -> Tensor:
    """r: what multiplies this shard's exponentials, [valid tokens]."""
    assert state.maximum is not None
    maximum = state.targets.select(combined.maximum)
    return state.targets.select(combined.others) * torch.exp(state.maximum - maximum)


def _finish_hidden_gradient(
    state: OutputState, combined: Combined, weight: Tensor, product: Tensor, derivative_product: Tensor | None
) -> Tensor:
    """dX = r A + u (D W) + c W[target], in place in A."""
    weight = weight[: state.shard.tokens]
    product.mul_(_others(state, combined)[:, None])
    if combined.uniform is not None:
        uniform = state.targets.select(combined.uniform)
        if derivative_product is not None:
            product.addcmul_(derivative_product, uniform[:, None])
        elif state.adds_constant:
            product.addr_(uniform, weight.sum(0, dtype=product.dtype))
    owned = state.targets.owned
    target = state.targets.select(combined.target)[owned.rows]
    product.index_add_(0, owned.rows, weight[owned.columns] * target[:, None])
    return state.targets.spread(product)


def _exponentials(
    state: OutputState, weight: Tensor, hidden: Tensor, maximum: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """(columns, E, D) of the shard: kept from S in one piece, or computed again in slices of the vocabulary."""
    rows = weight.shape[0]
    if state.exponentials is not None:
        yield slice(0, rows), state.exponentials, state.derivative
        return
    options, buffers, tokens = state.options, state.buffers, hidden.shape[0]
    dtype, stored = maximum.dtype, stored_dtype(hidden.dtype)
    size = min(rows, max(256, BLOCK_LOGITS // tokens // 256 * 256))
    stored_room = buffers.take(tokens, size, hidden, stored)
    logits_room = stored_room if stored == dtype else buffers.take(tokens, size, hidden, dtype)
    derivative_room = None if options.soft_cap is None else buffers.take(tokens, size, hidden, dtype)
    for columns in vocabulary_slices(rows, size):
        width = columns.stop - columns.start
        exponentials = _narrow(stored_room, width)
        logits = exponentials if logits_room is stored_room else _narrow(logits_room, width)
        derivative = None if derivative_room is None else _narrow(derivative_room, width)
        logits_product(hidden, weight[columns], options.logit_scale, logits, rounded=exponentials)
        shift = _shift(state, columns, dtype)
        if shift is not None:
            logits.add_(shift)
        exponentiate_again_(logits, columns.start, state.targets.owned, maximum, options=options, derivative=derivative)
        if derivative is not None:
            logits.mul_(derivative)
        if logits is not exponentials:
            exponentials.copy_(logits)
        yield (
            columns,
            exponentials,
            derivative.to(stored) if state.needs_derivative and derivative is not None else None,
        )
    buffers.give(stored_room)
    buffers.give(derivative_room)
    if logits_room is not stored_room:
        buffers.give(logits_room)


def _narrow(room: Tensor, columns: int) -> Tensor:
    """The same rows with fewer columns, contiguous."""
    return room.view(-1)[: room.shape[0] * columns].view(room.shape[0], columns)
