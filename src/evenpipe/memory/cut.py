"""The share of one GPU in a microbatch and a layer under tensor and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.model.shape import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One GPU's part of a microbatch."""

    microbatch_size: int
    """Sequences."""
    sequence: int
    """Tokens of a sequence, before context parallelism."""
    element: int = 4
    """Bytes of an activation."""
    tp: int = 1
    sequence_parallel: bool = True
    """As in `Parallelism`, like `tp` and `cp`."""
    cp: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one microbatch on one GPU."""

    batch: int
    tokens: int
    """Tokens of this GPU: those of the microbatch divided by context parallelism."""
    context: int
    """Tokens that a token may attend to."""
    hidden: int
    heads: int
    key_value_heads: int
    mlp: int
    element: int
    stream_tokens: int
    """Tokens of the residual stream on this GPU."""
    context_parallel: int

    @property
    def stream(self) -> int:
        return self.stream_tokens * self.hidden

    @property
    def gathered(self) -> int:
        """For `Operations.linear`: elements to gather, 0 if all are here."""
        return 0 if self.stream_tokens == self.tokens else self.tokens * self.hidden


def sizes_of(shape: LayerShape, portion: Portion) -> Sizes:
    """Return the sizes of one GPU.

    Raises:
        InputError: a size is not divisible.
    """
    tp, batch = portion.tp, portion.microbatch_size
    tokens = batch * divided(portion.sequence, portion.cp, "sequence over context parallelism")
    heads = divided(shape.attention.heads, tp, "heads over tensor parallelism")
    key_value_heads = shape.attention.key_value_heads
    if key_value_heads < tp:
        divided(tp, key_value_heads, "tensor parallelism over heads of keys and values")
        key_value_heads = tp  # every GPU holds one whole head; some hold the same one
    parts = tp if portion.sequence_parallel else 1
    return Sizes(
        batch=batch,
        tokens=tokens,
        context=portion.sequence,
        hidden=shape.hidden_size,
        heads=heads,
        key_value_heads=divided(key_value_heads, tp, "heads of keys and values over tensor parallelism"),
        mlp=divided(shape.mlp.size, tp, "size of the MLP over tensor parallelism"),
        element=portion.element,
        stream_tokens=divided(tokens, parts, "tokens over sequence parallelism"),
        context_parallel=portion.cp,
    )


def divided(size: int, parts: int, what: str) -> int:
    """Return size / parts.

    Raises:
        InputError: it is not a whole number.
    """
    if size % parts:
        raise InputError(f"{what}: {size} cannot be cut into {parts} equal parts")
    return size // parts
