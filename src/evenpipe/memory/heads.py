"""The whole output layer and loss of other frameworks on the GPUs of one tensor-parallel group.

`vocabulary.py` has the losses alone. Here stand the input that the layer keeps, what sequence parallelism gathers and
scatters, and the place of a weight gradient that was added elsewhere:

    forward     X of all tokens is gathered; its part that was given stays; logits [tokens, V / tp]
    backward    the logits' gradient, X again, dX of all tokens, its part, and the placeholder [V / tp, hidden]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .bytes import VocabularyBytes
from .framework import Framework
from .vocabulary import per_logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Sizes of the output layer on one GPU."""

    tokens: int
    """Of a microbatch, before sequence parallelism."""
    rows: int
    """Of the matrix, here."""
    hidden_size: int
    element: int
    hidden: int
    """Bytes of the hidden states that the layer is given and whose gradient it hands on."""
    gathers: bool
    """Given are parts, and products need all."""


def whole_head(found: VocabularyBytes, head: Head, loss: str, framework: Framework) -> VocabularyBytes:
    """`found` with the output layer of another framework instead."""
    if loss == "chunked":
        return replace(found, stored=found.stored + head.hidden)
    logits = head.tokens * head.rows
    stays, forward, backward = (size * logits for size in per_logit(loss, head.element))
    whole = head.tokens * head.hidden_size * head.element
    gathered = whole if head.gathers and framework.gathered_head else 0
    per_token = 4 * head.tokens
    placeholder = head.rows * head.hidden_size * head.element
    # The gradient of the logits in the dtype of products, once what the loss kept is gone.
    gradient = logits * head.element - stays
    products = gradient + gathered + whole + placeholder + (head.hidden if gathered else 0)
    dx = gradient + gathered + whole + (head.hidden if gathered else 0)
    return replace(
        found,
        stored=head.hidden + stays + per_token,
        output_peak=max(gathered + logits * head.element, head.hidden + forward) + per_token,
        backward_peak=max(backward, products),
        gradient_peak=max(backward, dx),
        weight_peak=placeholder,
        gradient=head.hidden,
    )
