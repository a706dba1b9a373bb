"""S, C and T: the output layer and its loss on one shard of the vocabulary, as plain functions without communication.

arXiv 2411.05288, sections 4.2 (algorithm 1, two barriers) and 4.3 (algorithm 2, one barrier), in log-odds form with
stored exponentials (see combination.py): three matrix products, and fp32 logits only in blocks of tokens.

    one barrier     S: logits, statistics, E, A = E W   | C: dX = r A + c W[target]   | T: dW += E^T (r X)
    two barriers    S: logits, statistics, E            | T: dX = r (E W) + c W[target], dW += E^T (r X)

X [tokens, hidden_size] hidden states, W [rows, hidden_size] this shard of the weight, E [tokens, rows] exponentials
without the target's (times the derivative of the soft-cap D, if there is one), r and c coefficients per token, known
after the statistics of all shards are combined. Label smoothing adds u D with a coefficient u (D = 1 without soft-cap).
The parts dX of all shards are summed by the caller, on the device of the last stage.

Ignored tokens are removed first: they cost nothing, and the content of their rows of X reaches no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from evenpipe.vocabulary.buffers import Buffers
from evenpipe.vocabulary.combination import MAXIMUM, Combined
from evenpipe.vocabulary.kernels import choose
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.products import (
    accumulator_dtype,
    column_product,
    logits_dtype,
    logits_product,
    stored_dtype,
    vocabulary_slices,
    weight_product,
)
from evenpipe.vocabulary.shards import Shard
from evenpipe.vocabulary.state import OutputState, Products, Rooms
from evenpipe.vocabulary.targets import find_targets, targets_on_device

BLOCK_LOGITS = 8 * 1024 * 1024


def rows_per_block(options: LossOptions, rows: int, *, in_place: bool, on_gpu: bool) -> int:
    """Return the tokens per block of logits, for a shard of `rows`.

    A block that is part of the kept exponentials needs no memory of its own and may be larger. A GPU reads the whole
    weight for each block: for fewer than 512 tokens that takes longer than the arithmetic (on H100 with hidden states
    of 4096 numbers, the balance is at 266 operations per byte; 256 tokens have 227, 512 tokens 410).
    """
    if options.rows_per_block is not None:
        return options.rows_per_block
    minimum = 1024 if in_place else 512 if on_gpu else 256
    return max(minimum, BLOCK_LOGITS // max(1, rows) // 256 * 256)


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
    """S: return this shard's statistics, and the state that `hidden_gradient` and `backward_shard` continue from.

    hidden: [tokens, hidden_size], the input of the head. Kept, not copied, until T (unless tokens are ignored).
    weight: [shard.rows, hidden_size], in the dtype of hidden. bias: [shard.rows], any floating dtype, or None.
    labels: [tokens] int64, aligned with hidden. On the host they cost no synchronisation with a GPU.
    one_barrier: also compute the product for `hidden_gradient`.
    gradients: False for evaluation: only the statistics are valid, and nothing is kept.
    buffers: memory to reuse; None: fresh memory, freed after T.

    Returns statistics [tokens, options.statistics], fp32 (fp64 for fp64), to be gathered from all shards for `combine`.
    Raises ValueError for shapes or dtypes that do not fit, InputError for an invalid label.
    """
    _check(hidden, weight, bias, labels, shard)
    kernels = choose(options, hidden)
    in_place = gradients and options.keep == "probabilities" and logits_dtype(hidden) == stored_dtype(hidden.dtype)
    block = rows_per_block(options, shard.tokens, in_place=in_place, on_gpu=hidden.is_cuda)
    if kernels.by_column and labels.device.type != "cpu":
        targets = targets_on_device(labels, shard, options.ignore_index)
    else:
        tokens_at_once = kernels.tokens_at_once(block, shard.tokens, hidden)
        targets = find_targets(
            labels,
            shard,
            options.ignore_index,
            hidden.device,
            block=block,
            part=tokens_at_once,
            by_column=kernels.by_column,
        )
    statistics = _neutral_statistics(targets.valid_tokens, options, hidden)
    buffers = Buffers() if buffers is None else buffers
    state = OutputState(options, shard, targets, one_barrier, buffers, kernels, targets.select(hidden), bias)
    if shard.tokens and targets.valid_tokens:
        _forward_blocks(state, weight[: shard.tokens], statistics, min(block, targets.valid_tokens), gradients)
        maximum = statistics[:, MAXIMUM]
        state.maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    if not gradients:
        state.hidden = state.bias = state.maximum = None
    if targets.valid is not None:
        spread = _neutral_statistics(targets.tokens, options, hidden)
        statistics = spread.index_copy_(0, targets.valid, statistics)
    return statistics, state


def _forward_blocks(state: OutputState, weight: Tensor, statistics: Tensor, block: int, gradients: bool) -> None:
    """Compute logits, statistics and exponentials block by block of tokens, and store the kept tensors in `state`."""
    options, hidden, buffers = state.options, state.hidden, state.buffers
    assert hidden is not None
    tokens, rows = hidden.shape[0], weight.shape[0]
    of_logits, stored = logits_dtype(hidden), stored_dtype(hidden.dtype)
    keep = gradients and options.keep == "probabilities"
    height, room = (tokens, state.targets.tokens) if keep else (block, 0)
    exponentials = buffers.take(height, rows, hidden, stored, room=room)
    # Exponentials overwrite the logits if the dtypes are equal.
    logits = None if of_logits == stored else buffers.take(block, rows, hidden, of_logits)
    with_derivative = gradients and options.needs_derivative
    derivative = buffers.take(height, rows, hidden, stored, room=room) if with_derivative else None
    if gradients and state.one_barrier:
        state.products = Products.empty(hidden, statistics.dtype, options)
    bias = None if state.bias is None else state.bias[:rows]

    for start in range(0, tokens, block):
        span = slice(start, min(tokens, start + block))
        in_block = slice(0, span.stop - start)
        kept_rows = span if keep else in_block
        e, d = exponentials[kept_rows], None if derivative is None else derivative[kept_rows]
        rooms = Rooms(e if logits is None else logits[in_block], e, d, bias)
        logits_product(hidden[span], weight, rooms.logits)
        state.kernels.exponentials(rooms, start, statistics[span], state, gradients=gradients)
        if not keep and state.products is not None:
            state.products.multiply(e, d, weight, span, add=False)
    buffers.give(logits)
    if not keep:
        buffers.give(exponentials, derivative)
        return
    state.exponentials, state.derivative = exponentials, derivative
    if state.products is not None:  # one product of all tokens, to fill a GPU
        state.products.multiply(exponentials, derivative, weight, add=False)


@torch.no_grad()
def combine(
    statistics: Tensor, token_weights: Tensor, labels: Tensor, options: LossOptions, vocabulary: int
) -> Combined:
    """The barrier: compute the loss from the statistics of all shards.

    statistics: [shards, tokens, options.statistics], as gathered from `forward_shard` on every device, in any order of
        shards that is the same everywhere.
    token_weights: [tokens], weight of each token in the step's loss (any sign; any value at ignored tokens).
    labels: [tokens] int64, best on the device of `statistics`.
    vocabulary: number of tokens over all shards.
    Nothing waits for a GPU: tensors on the host are copied there in stream order. The arithmetic is in fp64 (only on
        numbers per token and shard), the result in the dtype of `statistics`.
    """
    if statistics.dim() != 3 or statistics.shape[1:] != (labels.shape[0], options.statistics):
        raise ValueError(
            f"statistics is {list(statistics.shape)}; it must be [shards, {labels.shape[0]}, {options.statistics}]"
        )
    return choose(options, statistics).combine(statistics, token_weights, labels, options, vocabulary)


@torch.no_grad()
def hidden_gradient(state: OutputState, combined: Combined, weight: Tensor) -> Tensor:
    """C, one barrier: return this shard's part of the gradient with respect to `hidden`, from the product computed in
    S.

    With two barriers it is the first half of T, for a backward that is split into I and W: `backward_shard` then only
    adds the gradient of the shard and returns None.

    weight: as in `forward_shard`. Returns [tokens, hidden_size], fp32 (fp64 for fp64), zero at ignored tokens.
    """
    assert state.hidden is not None, "the hidden gradient follows S with gradients, and precedes T"
    if state.maximum is None:
        state.one_barrier = True
        return combined.losses.new_zeros(state.targets.tokens, weight.shape[1])
    if not state.one_barrier:
        _multiply_late(state, weight[: state.shard.tokens])
    products, state.products = state.products, None
    assert products is not None, "C runs once for each S"
    return state.kernels.hidden_gradient(state, combined, weight[: state.shard.tokens], products)


def _multiply_late(state: OutputState, weight: Tensor) -> None:
    """Compute E W (and D W), which with one barrier S does. From here on the state is as with one barrier."""
    hidden, maximum = state.hidden, state.maximum
    assert hidden is not None and maximum is not None
    state.one_barrier = True
    state.products = Products.empty(hidden, maximum.dtype, state.options)
    for columns, exponentials, derivative in _exponentials(state, weight, hidden, maximum):
        state.products.multiply(exponentials, derivative, weight[columns], add=columns.start > 0)


@torch.no_grad()
def backward_shard(
    state: OutputState,
    combined: Combined,
    weight: Tensor,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None = None,
    *,
    overwrite: bool = False,
) -> Tensor | None:
    """T: add this microbatch's gradient of the shard, and with two barriers also return the part of dX.

    weight: as in `forward_shard`.
    weight_gradient: [shard.rows, hidden_size] and bias_gradient: [shard.rows], fp32 (fp64 for fp64), added to in place;
        None if not wanted. Rows that pad the vocabulary stay unchanged.
    overwrite: do not add to weight_gradient, whose content is undefined. It may then also be in the dtype of
        exponentials (`stored_dtype`): for a gradient of only one microbatch, which a bf16 parameter keeps in bf16
        anyway.

    Returns [tokens, hidden_size], fp32 (fp64 for fp64) and zero at ignored tokens, with two barriers; None with one.
    Raises ValueError if a gradient has another dtype or shape.
    """
    dtype = combined.losses.dtype
    narrow = stored_dtype(weight.dtype) if overwrite else dtype
    _check_gradient("weight_gradient", weight_gradient, weight.shape, dtype, narrow)
    _check_gradient("bias_gradient", bias_gradient, weight.shape[:1], dtype)
    hidden, maximum = state.hidden, state.maximum
    assert hidden is not None, "T runs once, after S with gradients"
    state.hidden = None
    if maximum is None:
        if overwrite and weight_gradient is not None:
            weight_gradient[: state.shard.tokens].zero_()
        return None if state.one_barrier else combined.losses.new_zeros(state.targets.tokens, weight.shape[1])

    rows = state.shard.tokens
    weight = weight[:rows]
    weight_gradient = None if weight_gradient is None else weight_gradient[:rows]
    bias_gradient = None if bias_gradient is None else bias_gradient[:rows]
    products = None if state.one_barrier else Products.empty(hidden, dtype, state.options)

    def add(factor: Tensor, columns: slice, *, of_derivative: bool = False) -> None:
        """Add the products of a factor (E or D) with X."""
        scaled, coefficients = state.kernels.scaled_hidden(
            state, combined, hidden, factor.dtype, of_derivative=of_derivative
        )
        if weight_gradient is not None:
            weight_product(factor, scaled, weight_gradient[columns], add=of_derivative or not overwrite)
        if bias_gradient is not None:
            column_product(factor, coefficients, bias_gradient[columns])

    trains = weight_gradient is not None or bias_gradient is not None
    if products is not None or trains:
        for columns, exponentials, derivative in _exponentials(state, weight, hidden, maximum):
            if products is not None:
                products.multiply(exponentials, derivative, weight[columns], add=columns.start > 0)
            if trains:
                add(exponentials, columns)
                if derivative is not None:
                    add(derivative, columns, of_derivative=True)
    state.buffers.give(state.exponentials, state.derivative)
    state.exponentials = state.derivative = None

    if state.options.adds_constant:
        scaled, uniform = state.kernels.scaled_hidden(state, combined, hidden, dtype, of_derivative=True)
        if weight_gradient is not None:
            weight_gradient.add_(scaled.sum(0))
        if bias_gradient is not None:
            bias_gradient.add_(uniform.sum())
        del scaled  # as large as the hidden states
    state.kernels.add_label_rows(state, combined, hidden, weight_gradient, bias_gradient)
    return None if products is None else state.kernels.hidden_gradient(state, combined, weight, products)


def _check_gradient(name: str, gradient: Tensor | None, shape: torch.Size, *dtypes: torch.dtype) -> None:
    if gradient is not None and (gradient.shape != shape or gradient.dtype not in dtypes):
        accepted = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise ValueError(f"{name} is {list(gradient.shape)} {gradient.dtype}; it must be {list(shape)} {accepted}")


def _exponentials(
    state: OutputState, weight: Tensor, hidden: Tensor, maximum: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield (columns, E, D) of the shard: kept from S in one piece, or recomputed in slices of the vocabulary."""
    rows = weight.shape[0]
    if state.exponentials is not None:
        yield slice(0, rows), state.exponentials, state.derivative
        return
    buffers, tokens = state.buffers, hidden.shape[0]
    of_logits, stored = logits_dtype(hidden), stored_dtype(hidden.dtype)
    size = min(rows, max(256, BLOCK_LOGITS // tokens // 256 * 256))
    exponentials = buffers.take(tokens, size, hidden, stored)
    logits = None if of_logits == stored else buffers.take(tokens, size, hidden, of_logits)
    derivative = buffers.take(tokens, size, hidden, stored) if state.options.needs_derivative else None
    for columns in vocabulary_slices(rows, size):
        width = columns.stop - columns.start
        e, d = _narrow(exponentials, width), None if derivative is None else _narrow(derivative, width)
        bias = None if state.bias is None else state.bias[columns]
        rooms = Rooms(e if logits is None else _narrow(logits, width), e, d, bias)
        logits_product(hidden, weight[columns], rooms.logits)
        state.kernels.exponentials_again(rooms, columns.start, maximum, state)
        yield columns, e, d
    buffers.give(exponentials, logits, derivative)


def _narrow(room: Tensor, columns: int) -> Tensor:
    """Return the same rows with fewer columns; on a GPU with the same stride, else contiguous."""
    if room.is_cuda or not room.is_contiguous():
        return room[:, :columns]
    return room.view(-1)[: room.shape[0] * columns].view(room.shape[0], columns)
