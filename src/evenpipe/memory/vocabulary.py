"""Bytes of the embedding and the output layer: closed forms of what E, G, S, C and T allocate.

They follow `evenpipe/vocabulary` line by line: every term is a tensor there. The symbols are those of `letters`.
Without a device's share of the tokens, tokens are assumed to be spread evenly over the vocabulary. Real text is not:
small ids are frequent, and the first shard owns most of them.
"""

from __future__ import annotations

from dataclasses import replace

from evenpipe.memory.bytes import EmbeddingBytes, OutputPeaks, VocabularyBytes
from evenpipe.memory.heads import framework_head
from evenpipe.memory.letters import Letters, Machine, VocabularyShape
from evenpipe.schedule import Kind, Placement, VocabularyMode
from evenpipe.vocabulary import split
from evenpipe.vocabulary.kernels.plain import cached_rows

INDEX = 8
"""Bytes of an index or a token id."""
FP64 = 8
"""Bytes of fp64, in which the loss is finished."""


def vocabulary_bytes(
    mode: str,
    device: int,
    placement: Placement,
    shape: VocabularyShape,
    *,
    loss: str = "evenpipe",
    stream: int | None = None,
    gathers: bool = False,
    machine: Machine = "gpu",
    tensor_parallel: int = 1,
    own_rows: bool = False,
    token_share: float | None = None,
) -> VocabularyBytes:
    """Return the bytes of one device and one microbatch, without those of parameters.

    Args:
        mode: of the vocabulary; if it is whole ("first-last", "redistribute"), only the devices of the first and last
            stage have bytes, and the loss may be that of another framework. Sharded modes always use our own.
        loss: as `Kernels.loss`.
        stream, gathers: for another framework, as in `heads`; stream None: of all tokens.
        tensor_parallel: ranks that share a device's rows.
        own_rows: each of them has its part of the hidden states, and S gathers them; counted is the first rank.
        token_share: share of tokens whose rows and labels are in this device's shard; None: its share of the rows.
    """
    combining, ranks = VocabularyMode.of(mode).combining, tensor_parallel if own_rows else 1
    if combining is not None:
        parts = placement.devices * tensor_parallel
        shard = split(shape.rows, parts)[device * tensor_parallel]
        letters = Letters.of(shape, shard, placement.devices, token_share, machine, ranks=ranks)
        return _sharded(letters, one_barrier=combining is Kind.C, is_first=device == placement.first_device)
    share = token_share if own_rows and tensor_parallel > 1 else 1.0
    letters = Letters.of(shape, split(shape.rows, tensor_parallel)[0], 1, share, machine, ranks=ranks)
    found = VocabularyBytes()
    if device == placement.last_device and loss == "evenpipe":
        found = _whole(letters)
    elif device == placement.last_device:
        hidden = letters.n * letters.h * letters.e
        found = framework_head(letters, loss, stream=hidden if stream is None else stream, gathers=gathers)
    if device == placement.first_device:
        own = _embedding(letters)
        looked_up = own.rows if letters.t > 1 else 0  # by every tensor rank, and likewise the gradients
        embedding = EmbeddingBytes(backward_peak=own.backward_peak + looked_up, looked_up=looked_up)
        found = replace(found, embedding=_with_ranks(embedding, letters, looked_up))
    return found


def batch_bytes(tokens: int, *, machine: Machine = "gpu", shards: int = 1) -> int:
    """Return the bytes of the inputs of one step on one device, which stay from its beginning to its end.

    Token weights in fp32; the tokens sorted by owner if every device holds a part of the embedding; and on a CPU token
    ids, labels and targets, which otherwise stay in host memory.

    Args:
        tokens: of the whole step, all microbatches.
        shards: of the embedding.
    """
    indices = 2 * (shards > 1) + 3 * (machine != "gpu")
    return tokens * (4 + INDEX * indices)


def _with_ranks(embedding: EmbeddingBytes, x: Letters, picked: int) -> EmbeddingBytes:
    """Add the peaks while tensor ranks put their rows of the embedding together at the first stage, and sum their
    gradients, of which each keeps `picked` bytes."""
    if x.t == 1:
        return embedding
    whole = x.n * x.h * x.e
    return replace(embedding, placing_peak=2 * whole, picking_peak=whole + picked)


# --- E, G, S, C and T ---------------------------------------------------------------------------------------------


def _left(x: Letters, *, one_barrier: bool) -> VocabularyBytes:
    """Return the bytes left by S: `stored`, `product`, `handed_on`, `room`, and freed rooms as a peak."""
    if not x.R or not x.v:
        return VocabularyBytes(stored=_indices(x) + _copied_hidden(x))
    factors = 2 if x.options.needs_derivative else 1
    exponentials = x.n * x.distance(x.R) * x.q * factors if x.keeps else 0
    product = x.v * x.h * x.a * factors if one_barrier else 0
    rooms = x.rooms(x.b, x.R)
    if not x.fused and not x.keeps:  # the same suffices for T
        rooms = max(rooms, x.rooms(x.v, x.again))
    maximum = x.v * x.a
    return VocabularyBytes(
        stored=_indices(x) + _copied_hidden(x) + maximum + exponentials + product,
        product=product,
        handed_on=0 if x.fused else exponentials,
        room=0 if x.fused else rooms,
        peaks=OutputPeaks(output=rooms if x.fused else 0),
    )


def _indices(x: Letters) -> int:
    """Indices of tokens with labels, and of those whose label this shard owns: rows and columns; for kernels a column
    for all."""
    return INDEX * ((x.v if x.v < x.n else 0) + 2 * x.o + (x.v if x.fused else 0))


def _copied_hidden(x: Letters) -> int:
    """X of the tokens that have labels; if all have one it is X itself, which stays."""
    return x.v * x.h * x.e


def _first_half(x: Letters, *, one_barrier: bool) -> VocabularyBytes:
    left = _left(x, one_barrier=one_barrier)
    statistics = x.n * x.k * x.a
    beside = left.peaks.output  # freed rooms
    rows = cached_rows(x.b, x.R)
    per_row = 0 if x.fused else 2 * rows * x.a + INDEX * (x.o * rows // max(1, x.v))  # maximum, sum, owned targets
    if x.options.entropy and not x.fused:  # terms added to every exponential
        per_row += rows * x.R * x.a
    blocks = max(x.of_logits(x.b, x.R), per_row, x.of_hidden(x.v if x.keeps else x.b) if one_barrier else 0)
    gathered = x.n * x.h * x.e if x.t > 1 and x.v < x.n else 0
    stored = left.stored if x.v < x.n or x.t > 1 else left.stored - _copied_hidden(x)
    stored += gathered
    maximum = x.v * x.a if x.R and x.v else 0
    in_blocks = stored - maximum + x.v * x.k * x.a + beside + blocks + (x.R * x.a if x.shape.bias else 0)
    spread = stored + x.v * x.k * x.a + (statistics if x.v < x.n else 0)
    merged = stored + _merge(x) if x.t > 1 else 0
    return replace(left, own_statistics=statistics, peaks=OutputPeaks(output=max(in_blocks, spread, merged)))


def _merge(x: Letters) -> int:
    """Return the peak of merging the statistics of tensor ranks (`combination.merge`), with those of this one."""
    tables = (x.t + 1) * x.n * x.k * x.a + (x.t * x.n * x.k * FP64 if x.a != FP64 else 0)
    products = 2 if x.options.label_smoothing or x.options.entropy else 1
    # Maximum, which ranks have others, offsets and factors; the result, and the current sum.
    return tables + x.n * (FP64 + x.t + 2 * x.t * FP64 + (x.k + products * x.t + 1) * FP64)


def _scatter(x: Letters) -> int:
    """Return the peak of summing dX over tensor ranks: it, a copy, and own rows of the sum."""
    whole = x.n * x.h * x.a
    return 2 * whole + whole // x.t if x.t > 1 else 0


def _combine(x: Letters) -> tuple[int, int]:
    """Return (peak, bytes that stay): `combination.py`, in fp64 numbers per token and shard."""
    vectors = 6 + (x.options.label_smoothing > 0) + x.options.entropy
    if x.fused:
        return vectors * x.n * x.a, vectors * x.n * x.a
    table = x.P * x.n * x.k * FP64
    # The exponential of every shard's maximum and its product with the sum, besides the maximum over all shards.
    over_shards = (1 + 2 * x.P) * FP64
    # Maximum, total, target, odds, negative log-probability, against, towards, log-sum-exp, tilt, weights, the two
    # coefficients; all but the last result; the current one in fp64, and whether a token counts.
    over_tokens = 12 * FP64 + (vectors - 1) * x.a + FP64 + x.a + 1
    if x.options.label_smoothing:  # the other statistics of every shard, their sum, the losses, and the last product
        over_tokens += (x.P + 3) * FP64
    if x.options.entropy:  # itself; and the others of every shard, besides eight vectors
        over_tokens = max(over_tokens + FP64, (8 + 2 * x.P + (x.P + 2) * (x.options.label_smoothing > 0)) * FP64)
    return table + x.n * max(over_shards, over_tokens), vectors * x.n * x.a


def _hidden_gradient(x: Letters) -> int:
    """Return the peak of computing dX from the product, besides the product."""
    spread = x.n * x.h * x.a if x.v < x.n else 0
    if x.fused:
        return spread + (x.h * x.a if x.options.adds_constant else 0)
    of_targets = x.o * (x.a + x.h * (x.e + x.a)) + x.v * x.a
    uniform = x.v * x.a if x.options.label_smoothing else 0
    return uniform + max(4 * x.v * x.a, of_targets, x.o * x.a + spread)


def _second_half(x: Letters, *, makes_hidden_gradient: bool) -> int:
    """Return the peak of adding to the weight gradient, with two barriers also of computing dX."""
    if not x.R or not x.v:
        return x.n * x.h * x.a if makes_hidden_gradient else 0
    factors = 2 if x.options.needs_derivative else 1
    product = x.v * x.h * x.a * factors if makes_hidden_gradient else 0
    coefficients = x.v * x.a
    scaled = x.v * x.h * x.q
    cast = x.v * x.h * x.a + scaled if not x.fused and x.q != x.a else scaled
    of_weight = coefficients + max(cast, scaled + x.of_weight())
    constant = coefficients + x.v * x.h * x.a if x.options.adds_constant else 0
    of_targets = 0 if x.fused else coefficients + x.o * (x.a + x.h * (x.e + x.a))
    rooms = 0 if x.keeps or not x.fused else x.rooms(x.v, x.again)
    of_hidden = x.of_hidden(x.v) if makes_hidden_gradient else 0
    of_logits = 0 if x.keeps else x.of_logits(x.v, x.again)
    above = max(rooms + max(of_weight, of_hidden, of_logits), constant, of_targets)
    if makes_hidden_gradient:
        above = max(above, _hidden_gradient(x))
    return product + above


def _sharded(x: Letters, *, one_barrier: bool, is_first: bool) -> VocabularyBytes:
    """Sharded modes: separate passes on every device."""
    left = _first_half(x, one_barrier=one_barrier)
    combine_peak, combined = _combine(x)
    hidden = x.n * x.h * x.e // x.t
    after = left.stored - left.handed_on + combined  # freed by then
    embedding = _embedding(x)
    if is_first:
        embedding = _with_ranks(replace(embedding, all_rows=hidden), x, hidden)
    return replace(
        left,
        embedding=embedding,
        hidden=hidden,
        combined=combined,
        peaks=replace(
            left.peaks,
            combine=combine_peak,
            gradient=max(_hidden_gradient(x), _scatter(x) - left.product) if one_barrier else 0,
            backward=max(
                _second_half(x, makes_hidden_gradient=not one_barrier), 0 if one_barrier else _scatter(x) - after
            ),
        ),
        statistics=x.P * left.own_statistics,
        gradient=x.n * x.h * x.a // x.t,
    )


def _whole(x: Letters) -> VocabularyBytes:
    """All rows on the last stage's device: S and the loss in its F, T in its B, or dX in I and the rest in W."""
    left = _first_half(x, one_barrier=False)
    combine_peak, combined = _combine(x)
    product = x.v * x.h * x.a * (2 if x.options.needs_derivative else 1)
    return replace(
        left,
        combined=combined,
        peaks=replace(
            left.peaks,
            combine=combine_peak,
            gradient=max(product + max(x.of_hidden(x.v), _hidden_gradient(x)), _scatter(x)),
            backward=max(_second_half(x, makes_hidden_gradient=True), _scatter(x) - left.stored + left.handed_on),
            weight=_second_half(x, makes_hidden_gradient=False),
        ),
        gradient=x.n * x.h * x.a // x.t,
    )


def _embedding(x: Letters) -> EmbeddingBytes:
    """E and G on this shard's rows; if the embedding is whole, in the first stage's F and B."""
    rows = x.c * x.h * x.e
    shifted = INDEX * x.c
    wide = x.c * x.h * x.shape.gradient_element if x.e != x.shape.gradient_element else 0
    return EmbeddingBytes(rows=rows, forward_peak=rows + (shifted if x.start else 0), backward_peak=shifted + wide)
