"""The whole output layer and loss of other frameworks, on the GPUs of a tensor-parallel group.

A linear layer and a cross-entropy at the end of the last stage, on all n tokens. What the losses allocate per logit:

    fp32       logits in bf16, then in fp32, and their log-softmax, which alone stays; two gradients in fp32
    bf16       the same, all in bf16
    in-place   Megatron-LM's vocabulary-parallel cross-entropy: bf16 logits become fp32 probabilities in place
    fused      Transformer Engine's: the logits become their own gradient
    chunked    a head and loss over chunks of the tokens, recomputed in the backward, as in torchtitan

In addition there are the input that the layer keeps, the tensors that sequence parallelism gathers and scatters, and
the placeholder of a weight gradient that was added elsewhere:

    forward     X of all tokens is gathered; its local rows stay; logits [tokens, V / tp]
    backward    the logits' gradient, X again, dX of all tokens, its local rows, and the placeholder [V / tp, hidden]
"""

from __future__ import annotations

from .bytes import OutputPeaks, VocabularyBytes
from .output_bench import OutputLayer

WIDE = 4
"""Bytes of an fp32 number."""

CHUNKS = 8
"""Number of chunks of the "chunked" loss."""


def per_logit(loss: str, e: int) -> tuple[int, int, int]:
    """Return, in bytes per logit of e bytes: what stays after the forward, the forward's peak, and the additional peak
    of the backward."""
    return {
        "fp32": (WIDE, e + 2 * WIDE, 2 * WIDE),
        "bf16": (e, 2 * e, 2 * e),
        "in-place": (WIDE, e + WIDE, e),
        "fused": (e, e, 0),
    }[loss]


def framework_head(layer: OutputLayer, loss: str, *, stream: int, gathers: bool) -> VocabularyBytes:
    """Return the bytes of the output layer and loss of another framework.

    Args:
        stream: bytes of the hidden states that the layer receives and whose gradient it returns.
        gathers: whether these are one rank's rows, and the layer gathers all tokens for its products.
    """
    element, rows = layer.dtype.itemsize, layer.shard.tokens
    logits, hidden, matrix = (
        layer.tokens * rows,
        layer.tokens * layer.hidden_size * element,
        rows * layer.hidden_size * element,
    )
    if loss == "chunked":
        in_chunk = logits * (element + 3 * WIDE) // CHUNKS
        peaks = OutputPeaks(
            output=logits * (element + 2 * WIDE) // CHUNKS,
            backward=in_chunk + 2 * matrix + hidden,
            gradient=hidden,
            weight=matrix,
        )
        return VocabularyBytes(stored=stream, gradient=hidden, peaks=peaks)
    stays, forward, backward = (size * logits for size in per_logit(loss, element))
    per_token, gathered = 4 * layer.tokens, hidden if gathers else 0
    # The gradient of the logits in the dtype of products, after the loss has freed its tensors.
    dx = logits * element - stays + gathered + hidden + (stream if gathers else 0)
    return VocabularyBytes(
        stored=stream + stays + per_token,
        gradient=stream,
        peaks=OutputPeaks(
            output=max(gathered + logits * element, stream + forward) + per_token,
            backward=max(backward, dx + matrix),
            gradient=max(backward, dx),
            weight=matrix,
        ),
    )
