"""Triton's kernels: one program per row, no atomics, so that every run gives the same bits.

Sums are in the dtype of the accumulators (fp32, or fp64 for fp64), the statistics of all shards are combined in fp64.
Offsets are int64: tokens times rows of a shard may be more than 2^31. Constants of a model (scale, soft-cap, smoothing)
are compiled in: as arguments Triton would round them to fp32. Matrices are given with their row stride; the numbers of
a row are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from evenpipe.vocabulary import combination, targets

# A kernel can read names of its module only if they are Triton constants.
IGNORED = tl.constexpr(targets.IGNORED)
MAXIMUM = tl.constexpr(combination.MAXIMUM)
SUM = tl.constexpr(combination.SUM)
TARGET = tl.constexpr(combination.TARGET)
TOTAL = tl.constexpr(combination.TOTAL)
COUNT = tl.constexpr(combination.COUNT)
WEIGHTED = tl.constexpr(combination.WEIGHTED)


@triton.jit
def _logits(logits, bias, offsets, in_memory, inside, TYPE: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return some numbers of a row of X W^T, with bias and scale."""
    values = tl.load(logits + offsets, mask=in_memory, other=0.0).to(TYPE)
    if HAS_BIAS:
        values += tl.load(bias + offsets, mask=inside, other=0.0).to(TYPE)
    return values * SCALE


@triton.jit
def _soft_cap(values, CAP: tl.constexpr):
    """Return CAP tanh(values / CAP), and its derivative, without subtracting from numbers close to one."""
    small = tl.exp(-2.0 * tl.abs(values) / CAP)
    capped = CAP * (1.0 - small) / (1.0 + small)
    return tl.where(values < 0.0, -capped, capped), 4.0 * small / ((1.0 + small) * (1.0 + small))


@triton.jit
def exponentials_of_rows(
    logits,
    exponentials,
    derivative,
    statistics,
    target_columns,
    bias,
    columns,
    first_column,
    width,
    logits_stride,
    exponentials_stride,
    derivative_stride,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    AGAIN: tl.constexpr,
    NUMBERS: tl.constexpr,
    SMOOTHS: tl.constexpr,
    ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORES: tl.constexpr,
    STORES_DERIVATIVE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Convert logits of a token to exp(z - maximum of the others), 0 at the target, and to its statistics.

    AGAIN: only to the same exponentials, for the columns of the shard from `first_column` on; then `statistics` holds
    only the maximum of each token over the whole shard. CAP: 0 means no soft-cap. NUMBERS: statistics per token.
    SIZE: columns at a time. width: columns that every buffer
    has memory for, at least `columns`. The content beyond `columns` is undefined, and is only touched because whole
    vectors are faster to read and write.
    """
    row = tl.program_id(0).to(tl.int64)
    TYPE = statistics.dtype.element_ty
    logits += row * logits_stride
    statistics += row * NUMBERS
    target = tl.load(target_columns + row)
    counts = target != IGNORED

    if AGAIN:
        shift = tl.load(statistics)
    else:
        highest = tl.full([SIZE], float("-inf"), TYPE)
        at_target = tl.zeros([SIZE], TYPE)
        for start in range(0, columns, SIZE):
            offsets = start + tl.arange(0, SIZE)
            inside, in_memory = offsets < columns, offsets < width
            z = _logits(logits, bias, offsets, in_memory, inside, TYPE, SCALE, HAS_BIAS)
            if CAP != 0:
                z, _slope = _soft_cap(z, CAP)
            at_target += tl.where(offsets == target, z, 0.0)
            highest = tl.maximum(highest, tl.where(inside & counts & (offsets != target), z, float("-inf")))
        maximum = tl.max(highest, 0)
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)

    total = tl.zeros([SIZE], TYPE)
    distances = tl.zeros([SIZE], TYPE)
    weighted = tl.zeros([SIZE], TYPE)
    for start in range(0, columns, SIZE):
        offsets = start + tl.arange(0, SIZE)
        inside, in_memory = offsets < columns, offsets < width
        z = _logits(logits, bias, offsets, in_memory, inside, TYPE, SCALE, HAS_BIAS)
        slope = tl.full([SIZE], 1.0, TYPE)
        if CAP != 0:
            z, slope = _soft_cap(z, CAP)
        is_other = inside & counts & (offsets + first_column != target)
        e = tl.exp(tl.where(is_other, z - shift, float("-inf")))
        total += e
        if ENTROPY:
            weighted += tl.where(e > 0.0, (z - shift) * e, 0.0)
        if SMOOTHS:
            distances += tl.where(is_other, z - shift, 0.0)
        if STORES:
            if CAP != 0:
                e *= slope
            to = exponentials + row * exponentials_stride + offsets
            tl.store(to, tl.where(is_other, e, 0.0).to(exponentials.dtype.element_ty), mask=in_memory)
        if STORES_DERIVATIVE:
            to = derivative + row * derivative_stride + offsets
            tl.store(to, tl.where(counts, slope, 0.0).to(derivative.dtype.element_ty), mask=in_memory)

    if not AGAIN:
        tl.store(statistics + MAXIMUM, maximum)
        tl.store(statistics + SUM, tl.sum(total, 0))
        tl.store(statistics + TARGET, tl.where(counts, tl.sum(at_target, 0), 0.0))
        if ENTROPY:
            tl.store(statistics + NUMBERS + WEIGHTED, tl.sum(weighted, 0))
        if SMOOTHS:
            tl.store(statistics + TOTAL, tl.sum(distances, 0))
            others = columns - tl.where(target >= 0, 1, 0)
            tl.store(statistics + COUNT, tl.where(counts, others, 0).to(TYPE))


@triton.jit
def _log_of_one_plus(x):
    """Return log(1 + x), with as many correct digits for a small x as for a large one (W. Kahan)."""
    rounded = 1.0 + x
    difference = rounded - 1.0
    safe = tl.where(difference == 0.0, 1.0, difference)
    return tl.where(difference == 0.0, x, tl.log(rounded) * (x / safe))


@triton.jit
def combine_rows(
    statistics,
    token_weights,
    labels,
    results,
    tokens,
    shards,
    vocabulary,
    ignore_index,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ENTROPY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """See combination.py. statistics: [shards, tokens, NUMBERS]; results: one row of tokens for each of losses,
    log-probabilities, log-sum-exp, maximum, others, target and, if wanted, uniform and entropies.
    """
    offsets = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    inside = offsets < tokens
    TYPE = results.dtype.element_ty
    zero = tl.zeros([SIZE], tl.float64)

    maximum = tl.full([SIZE], float("-inf"), tl.float64)
    for shard in range(0, shards):
        of_shard = statistics + (shard * tokens + offsets) * NUMBERS
        maximum = tl.maximum(maximum, tl.load(of_shard + MAXIMUM, mask=inside, other=0.0).to(tl.float64))
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)

    total, target, above, count, weighted = zero, zero, zero, zero, zero
    for shard in range(0, shards):
        of_shard = statistics + (shard * tokens + offsets) * NUMBERS
        shard_maximum = tl.load(of_shard + MAXIMUM, mask=inside, other=0.0).to(tl.float64)
        shard_total = tl.load(of_shard + SUM, mask=inside, other=0.0).to(tl.float64)
        total += shard_total * tl.exp(shard_maximum - maximum)
        if ENTROPY:
            shard_weighted = tl.load(of_shard + NUMBERS + WEIGHTED, mask=inside, other=0.0).to(tl.float64)
            lower = tl.where(shard_total > 0.0, shard_maximum - maximum, 0.0)
            weighted += (shard_weighted + lower * shard_total) * tl.exp(shard_maximum - maximum)
        target += tl.load(of_shard + TARGET, mask=inside, other=0.0).to(tl.float64)
        if SMOOTHING != 0:
            terms = tl.load(of_shard + COUNT, mask=inside, other=0.0).to(tl.float64)
            distances = tl.load(of_shard + TOTAL, mask=inside, other=0.0).to(tl.float64)
            above += distances + terms * tl.where(terms > 0.0, shard_maximum - maximum, 0.0)
            count += terms

    odds = maximum - target + tl.log(total)
    size = tl.exp(-tl.abs(odds))
    beyond = _log_of_one_plus(size)
    minus_log_probability = tl.maximum(odds, 0.0) + beyond
    large, small = 1.0 / (1.0 + size), size / (1.0 + size)
    against = tl.where(odds >= 0.0, large, small)
    towards = tl.where(odds >= 0.0, small, large)
    log_sum_exp = target + minus_log_probability
    losses = minus_log_probability
    if SMOOTHING != 0:
        losses -= SMOOTHING * (above + count * (maximum - target)) / vocabulary
    tilt = 2.0 * Z_LOSS * log_sum_exp
    if Z_LOSS != 0:
        losses += Z_LOSS * log_sum_exp * log_sum_exp

    valid = inside & (tl.load(labels + offsets, mask=inside, other=ignore_index) != ignore_index)
    weights = tl.load(token_weights + offsets, mask=inside, other=0.0).to(tl.float64) * SCALE
    safe = tl.where(total > 0.0, total, 1.0)
    others = tl.where(total > 0.0, weights * (1.0 + tilt) * against / safe, 0.0)
    at_target = weights * (tilt * towards - against + SMOOTHING)
    if CAP != 0:
        at_target *= 1.0 - (target / CAP) * (target / CAP)

    tl.store(results + offsets, tl.where(valid, losses, 0.0).to(TYPE), mask=inside)
    tl.store(results + tokens + offsets, tl.where(valid, -minus_log_probability, 0.0).to(TYPE), mask=inside)
    tl.store(results + 2 * tokens + offsets, tl.where(valid, log_sum_exp, 0.0).to(TYPE), mask=inside)
    tl.store(results + 3 * tokens + offsets, tl.where(valid, maximum, 0.0).to(TYPE), mask=inside)
    tl.store(results + 4 * tokens + offsets, tl.where(valid, others, 0.0).to(TYPE), mask=inside)
    tl.store(results + 5 * tokens + offsets, tl.where(valid, at_target, 0.0).to(TYPE), mask=inside)
    if SMOOTHING != 0:
        uniform = -SMOOTHING * weights / vocabulary
        tl.store(results + 6 * tokens + offsets, tl.where(valid, uniform, 0.0).to(TYPE), mask=inside)
    if ENTROPY:
        no_target = tl.maximum(-odds, 0.0) + beyond
        entropy = against * (no_target + tl.log(safe) - weighted / safe) + towards * minus_log_probability
        last = 7 if SMOOTHING != 0 else 6
        counts = valid & (total > 0.0)
        tl.store(results + last * tokens + offsets, tl.where(counts, entropy, 0.0).to(TYPE), mask=inside)


@triton.jit
def _token_of(row, valid, HAS_VALID: tl.constexpr):
    """Return the position of a valid token among all."""
    if HAS_VALID:
        return tl.load(valid + row)
    else:
        return row


@triton.jit
def _of_exponentials(row, token, others, maximum, own_maximum):
    """Return r, the factor on a shard's exponentials of a token."""
    return tl.load(others + token) * tl.exp(tl.load(own_maximum + row) - tl.load(maximum + token))


@triton.jit
def hidden_gradient_of_rows(
    product,
    derivative_product,
    weight,
    weight_sum,
    gradient,
    valid,
    target_columns,
    own_maximum,
    others,
    maximum,
    target_coefficients,
    uniform,
    hidden_size,
    weight_stride,
    HAS_VALID: tl.constexpr,
    HAS_DERIVATIVE: tl.constexpr,
    HAS_CONSTANT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """dX = r A + u (D W, or the sum of W's rows) + c W[target], of a token and SIZE of its numbers."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = offsets < hidden_size
    token = _token_of(row, valid, HAS_VALID)
    r = _of_exponentials(row, token, others, maximum, own_maximum)
    values = r * tl.load(product + row * hidden_size + offsets, mask=inside, other=0.0)
    if HAS_DERIVATIVE:
        of_derivative = tl.load(derivative_product + row * hidden_size + offsets, mask=inside, other=0.0)
        values += tl.load(uniform + token) * of_derivative
    if HAS_CONSTANT:
        values += tl.load(uniform + token) * tl.load(weight_sum + offsets, mask=inside, other=0.0)
    target = tl.load(target_columns + row)
    if target >= 0:
        of_target = tl.load(weight + target * weight_stride + offsets, mask=inside, other=0.0)
        values += tl.load(target_coefficients + token) * of_target.to(values.dtype)
    tl.store(gradient + token * hidden_size + offsets, values, mask=inside)


@triton.jit
def scaled_rows(
    hidden,
    scaled,
    coefficients,
    valid,
    target_columns,
    own_maximum,
    others,
    maximum,
    hidden_size,
    hidden_stride,
    HAS_VALID: tl.constexpr,
    OF_DERIVATIVE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """r X of a token and SIZE of its numbers, and r; with OF_DERIVATIVE u X and u, where `others` is u."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = offsets < hidden_size
    token = _token_of(row, valid, HAS_VALID)
    if OF_DERIVATIVE:
        coefficient = tl.load(others + token)
    else:
        coefficient = _of_exponentials(row, token, others, maximum, own_maximum)
    x = tl.load(hidden + row * hidden_stride + offsets, mask=inside, other=0.0).to(coefficient.dtype)
    # The hidden states of an ignored token must reach nothing: 0 times NaN is NaN.
    x = tl.where(tl.load(target_columns + row) == IGNORED, 0.0, x * coefficient)
    tl.store(scaled + row * hidden_size + offsets, x.to(scaled.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(coefficients + row, coefficient)


@triton.jit(do_not_specialize=["entries"])
def add_label_rows(
    hidden,
    weight_gradient,
    bias_gradient,
    entry_rows,
    entry_columns,
    valid,
    target_coefficients,
    entries,
    hidden_size,
    hidden_stride,
    gradient_stride,
    HAS_VALID: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Add c X of all tokens with one target to its row of the gradient, SIZE numbers of it.

    entry_rows, entry_columns: [entries], sorted by columns and then by rows. The program of a column's first entry adds
    them all up, ENTRIES at a time: in text one token in twenty has the same target. The others, and the program of a
    negative column, do nothing.
    """
    entry = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = offsets < hidden_size
    column = tl.load(entry_columns + entry)
    previous_column = tl.load(entry_columns + entry - 1, mask=entry > 0, other=-1)
    if (column >= 0) & (column != previous_column):
        TYPE = target_coefficients.dtype.element_ty
        sums = tl.zeros([SIZE], TYPE)
        coefficients = tl.zeros([1], TYPE)
        matches = ENTRIES
        while matches == ENTRIES:
            some = entry + tl.arange(0, ENTRIES)
            same = tl.load(entry_columns + some, mask=some < entries, other=-1) == column
            row = tl.load(entry_rows + some, mask=same, other=0)
            coefficient = tl.load(target_coefficients + _token_of(row, valid, HAS_VALID), mask=same, other=0.0)
            if HAS_WEIGHT:
                addresses = row[:, None] * hidden_stride + offsets[None, :]
                x = tl.load(hidden + addresses, mask=same[:, None] & inside[None, :], other=0.0)
                sums += tl.sum(coefficient[:, None] * x.to(TYPE), 0)
            coefficients += tl.sum(coefficient, 0)
            matches = tl.sum(same.to(tl.int32), 0)
            entry += ENTRIES
        if HAS_WEIGHT:
            to = weight_gradient + column * gradient_stride + offsets
            old = tl.load(to, mask=inside, other=0.0).to(TYPE)
            tl.store(to, (old + sums).to(weight_gradient.dtype.element_ty), mask=inside)
        if HAS_BIAS:
            if tl.program_id(1) == 0:
                first = bias_gradient + column + tl.arange(0, 1)
                tl.store(first, tl.load(first) + coefficients)
