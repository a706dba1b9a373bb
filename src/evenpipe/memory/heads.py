"""The whole output layer and loss of other frameworks on the GPUs of one tensor-parallel group.

`vocabulary.py` has only the losses. This file adds the input that the layer keeps, the tensors that sequence
parallelism gathers and scatters, and the placeholder of a weight gradient that was added elsewhere:

    forward     X of all tokens is gathered; its given part stays; logits [tokens, V / tp]
    backward    the logits' gradient, X again, dX of all tokens, its part, and the placeholder [V / tp, hidden]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .bytes import OutputPeaks, VocabularyBytes
from .framework import Framework
from .vocabulary import per_logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Sizes of the output layer on one GPU."""

    tokens: int
    """Tokens of a microbatch, before sequence parallelism."""
    rows: int
    """Rows of the matrix on this GPU."""
    hidden_size: int
    element: int
    hidden: int
    """Bytes of the hidden states that the layer receives and whose gradient it returns."""
    gathers: bool
    """It receives parts, but products need all."""


def whole_head(found: VocabularyBytes, head: Head, loss: str, framework: Framework) -> VocabularyBytes:
    """Return `found` with the output layer of another framework instead."""
    if loss == "chunked":
        return replace(found, stored=found.stored + head.hidden)
    logits = head.tokens * head.rows
    stays, forward, backward = (size * logits for size in per_logit(loss, head.element))
    whole = head.tokens * head.hidden_size * head.element
    gathered = whole if head.gathers and framework.gathered_head else 0
    per_token = 4 * head.tokens
    placeholder = head.rows * head.hidden_size * head.element
    # The gradient of the logits in the dtype of products, after the loss has freed its tensors.
    gradient = logits * head.element - stays
    products = gradient + gathered + whole + placeholder + (head.hidden if gathered else 0)
    dx = gradient + gathered + whole + (head.hidden if gathered else 0)
    return replace(
        found,
        stored=head.hidden + stays + per_token,
        gradient=head.hidden,
        peaks=OutputPeaks(
            output=max(gathered + logits * head.element, head.hidden + forward) + per_token,
            backward=max(backward, products),
            gradient=max(backward, dx),
            weight=placeholder,
        ),
    )
