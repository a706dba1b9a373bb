"""Bytes of the embedding and the output layer of a device for a microbatch.

Tokens are assumed to be spread evenly over the vocabulary. Real text is not: small ids are frequent, and the first
shard owns most of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from evenpipe.schedule import Kind, Placement, VocabularyMode
from evenpipe.vocabulary import LossOptions, Shard, split

from .bytes import EmbeddingBytes, VocabularyBytes
from .heads import framework_head
from .output_bench import Machine, OutputLayer, Passes, output_bytes

WHOLE: tuple[Passes, ...] = ("F B", "F I W")
"""Passes with an output layer that is part of the last stage: with a whole backward, and with a split one."""
INDEX = 8
"""Bytes of an index or a token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShape:
    """One model's vocabulary layers and one microbatch."""

    rows: int
    """Rows of the whole embedding and output layer."""
    hidden_size: int
    sequences: int
    """Sequences per microbatch."""
    tokens: int
    """Tokens of a sequence on this GPU."""
    labelled: int | None = None
    """Tokens of a microbatch that have a label; None: all but the last of each sequence."""
    dtype: torch.dtype = torch.bfloat16
    """Of hidden states."""
    gradient_element: int = 4
    """Bytes of the gradients of parameters."""
    options: LossOptions = field(default_factory=LossOptions)
    bias: bool = False
    """Whether the output layer has a bias."""

    @property
    def all_tokens(self) -> int:
        """Tokens of a microbatch on this GPU."""
        return self.sequences * self.tokens

    @property
    def hidden(self) -> int:
        """Bytes of their hidden states."""
        return self.all_tokens * self.hidden_size * self.dtype.itemsize


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
) -> VocabularyBytes:
    """Return the bytes of a device for a microbatch, without those of parameters.

    Args:
        mode: mode of the vocabulary. If it is whole ("first-last", "redistribute"), only the devices of the first and
            last stage have bytes, and the loss may be that of another framework. Sharded modes always use our loss.
        loss: as `Kernels.loss`.
        stream, gathers: for another framework, as in `heads`; stream None: bytes of all tokens.
        tensor_parallel: number of ranks that share a device's rows.
        own_rows: whether each of them holds a part of the hidden states, which S gathers; the bytes are those of the
            first rank.
    """
    combining, ranks = VocabularyMode.of(mode).combining, tensor_parallel if own_rows else 1
    layer = partial(_layer, shape, ranks=ranks, machine=machine)
    if combining is not None:
        shard = split(shape.rows, placement.devices * tensor_parallel)[device * tensor_parallel]
        share, is_first = shard.tokens / shape.rows, device == placement.first_device
        vocabulary = output_bytes(layer("S C T" if combining is Kind.C else "S T", shard, placement.devices, share))
        embedding = _embedding(shape, shard, share)
        if is_first:
            local_hidden = shape.hidden // ranks
            embedding = _with_ranks(replace(embedding, all_rows=local_hidden), shape, ranks, local_hidden)
        return replace(vocabulary, embedding=embedding)
    shard = split(shape.rows, tensor_parallel)[0]
    share = shard.tokens / shape.rows if ranks > 1 else 1.0
    vocabulary = VocabularyBytes()
    if device == placement.last_device and loss == "evenpipe":
        vocabulary, split_backward = (output_bytes(layer(passes, shard, 1, share)) for passes in WHOLE)
        peaks = replace(vocabulary.peaks, gradient=split_backward.peaks.gradient, weight=split_backward.peaks.weight)
        vocabulary = replace(vocabulary, peaks=peaks)
    elif device == placement.last_device:
        stream = shape.hidden if stream is None else stream
        vocabulary = framework_head(layer("F B", shard, 1, share), loss, stream=stream, gathers=gathers)
    if device == placement.first_device:
        lookup = _embedding(shape, shard, share)
        looked_up = lookup.rows if ranks > 1 else 0  # by every tensor rank, and likewise the gradients
        embedding = EmbeddingBytes(backward_peak=lookup.backward_peak + looked_up, looked_up=looked_up)
        vocabulary = replace(vocabulary, embedding=_with_ranks(embedding, shape, ranks, looked_up))
    return vocabulary


def batch_bytes(tokens: int, *, machine: Machine = "gpu", shards: int = 1) -> int:
    """Return the bytes of the inputs of a step on one device, which live throughout the step.

    Token weights in fp32; the tokens sorted by owner if every device holds a part of the embedding; and on a CPU token
    ids, labels and targets, which otherwise stay in host memory.

    Args:
        tokens: tokens of all microbatches of the step.
        shards: number of shards of the embedding.
    """
    indices = 2 * (shards > 1) + 3 * (machine != "gpu")
    return tokens * (4 + INDEX * indices)


def _layer(
    shape: VocabularyShape, passes: Passes, shard: Shard, shards: int, share: float, *, ranks: int, machine: Machine
) -> OutputLayer:
    """Return one shard of the output layer. share: share of tokens whose label is in the shard."""
    tokens = shape.all_tokens
    labelled = tokens - shape.sequences if shape.labelled is None else shape.labelled
    return OutputLayer(
        passes=passes,
        shard=shard,
        shards=shards,
        ranks=ranks,
        tokens=tokens,
        labelled=labelled,
        owned=round(labelled * share) if shard.tokens else 0,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        bias=shape.bias,
        options=shape.options,
        machine=machine,
    )


def _embedding(shape: VocabularyShape, shard: Shard, share: float) -> EmbeddingBytes:
    """Return the bytes of E and G on a shard's rows; if the embedding is whole, in the first stage's F and B."""
    tokens = round(shape.all_tokens * share)
    rows, shifted = tokens * shape.hidden_size * shape.dtype.itemsize, INDEX * tokens
    wide = tokens * shape.hidden_size * shape.gradient_element if shape.dtype.itemsize != shape.gradient_element else 0
    return EmbeddingBytes(rows=rows, forward_peak=rows + (shifted if shard.start else 0), backward_peak=shifted + wide)


def _with_ranks(embedding: EmbeddingBytes, shape: VocabularyShape, ranks: int, picked: int) -> EmbeddingBytes:
    """Add the peaks while tensor ranks combine their rows of the embedding at the first stage, and while they sum the
    gradients of these rows, of which each rank keeps `picked` bytes."""
    if ranks == 1:
        return embedding
    return replace(embedding, placing_peak=2 * shape.hidden, picking_peak=shape.hidden + picked)
