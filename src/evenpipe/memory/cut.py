"""The share of one GPU in a microbatch and a layer under tensor and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.memory.pieces import Piece
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
    blocks: bool = False
    """With sequence parallelism, blocks gather their input, and not every product: `Framework.gathers`."""
    keeps_input: bool = False
    """The stage's input stays until the end of its backward: `Framework.holds_transferred`."""
    repeats: bool = False
    """The forward is that of R: blocks keep what they gathered, and a carry is there already."""
    piece: Piece | None = None
    """What our own attention gets of each sequence, whatever `sequence` and `cp` say; None: another framework's, or a
    whole sequence."""

    @property
    def gathers_blocks(self) -> bool:
        """Whether blocks gather their input from other GPUs."""
        return self.blocks and self.sequence_parallel and self.tp > 1


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
    blocks: bool = False
    """Blocks gather the residual stream of other GPUs, and not every product."""
    repeats: bool = False
    """The forward is that of R."""
    piece: Piece | None = None
    """Of each sequence, for our own attention."""

    @property
    def context_parallel(self) -> int:
        """GPUs that share a sequence, in another framework."""
        return 1 if self.piece is not None else self.batch * self.context // self.tokens

    @property
    def carried(self) -> bool:
        """Whether sequences are cut into slices."""
        return self.piece is not None and self.piece.carried

    @property
    def begins_carry(self) -> bool:
        """Whether the forward begins the carry."""
        return self.piece is not None and self.piece.carried and self.piece.is_first and not self.repeats

    @property
    def stream(self) -> int:
        return self.stream_tokens * self.hidden

    @property
    def gathered(self) -> int:
        """For `Operations.linear`: elements that a product gathers, 0 if all are here."""
        return 0 if self.blocks or self.stream_tokens == self.tokens else self.tokens * self.hidden

    @property
    def whole(self) -> int:
        """Elements of what blocks gather, and of what goes in at the first stage; else those of the stream."""
        return self.tokens * self.hidden if self.blocks else self.stream


def sizes_of(shape: LayerShape, portion: Portion) -> Sizes:
    """Return the sizes of one GPU.

    Raises:
        InputError: a size is not divisible.
    """
    tp, batch, piece = portion.tp, portion.microbatch_size, portion.piece
    if piece is None:
        row = divided(portion.sequence, portion.cp, "sequence over context parallelism")
    else:
        row = piece.tokens
    tokens = batch * row
    heads = divided(shape.attention.heads, tp, "heads over tensor parallelism")
    key_value_heads = shape.attention.key_value_heads
    if key_value_heads < tp:
        divided(tp, key_value_heads, "tensor parallelism over heads of keys and values")
        key_value_heads = tp  # every GPU holds one whole head; some hold the same one
    parts = tp if portion.sequence_parallel else 1
    if portion.gathers_blocks:
        divided(row, tp, "tokens of a sequence over tensor parallelism")
    return Sizes(
        batch=batch,
        tokens=tokens,
        context=portion.sequence if piece is None else piece.length,
        hidden=shape.hidden_size,
        heads=heads,
        key_value_heads=divided(key_value_heads, tp, "heads of keys and values over tensor parallelism"),
        mlp=divided(shape.mlp.size, tp, "size of the MLP over tensor parallelism"),
        element=portion.element,
        stream_tokens=divided(tokens, parts, "tokens over sequence parallelism"),
        blocks=portion.gathers_blocks,
        repeats=portion.repeats,
        piece=piece,
    )


def divided(size: int, parts: int, what: str) -> int:
    """Return size / parts.

    Raises:
        InputError: it is not a whole number.
    """
    if size % parts:
        raise InputError(f"{what}: {size} cannot be cut into {parts} equal parts")
    return size // parts
