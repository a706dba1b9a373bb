"""The words of a schedule: passes (compute) and transfers (communication), and their text form.

    2F0     forward of stage 2, microbatch 0        S0      output layer, first half, microbatch 0, on this device
    2F0.1   the same, slice 1 of its sequence       X0      broadcast of the last hidden states of microbatch 0
    2RESHARD, RESHARD_S   free parameters           2SEND_F0, 3RECV_F0   the two ends of a hop
    (2F1;2B0)OVERLAP_F_B                            two passes run as one
    0SEND_F0.1>2, 3RECV_F0<1                        a hop to stage 2 and one from stage 1, where a stage has several

F, B, I, W, the four hops, RESHARD and OVERLAP_F_B are written as `torch.distributed.pipelining` writes them. Parsing is
strict: any other text is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from evenpipe.errors import InputError
from evenpipe.words import quoted


class Kind(StrEnum):
    """Kind of a pass. Its text is the letter in an order."""

    F = "F"
    """Forward of a stage."""
    B = "B"
    """Full backward of a stage."""
    I = "I"
    """Gradient with respect to a stage's input."""
    W = "W"
    """Gradient with respect to a stage's weights."""
    E = "E"
    """Forward of this device's shard of the input embedding."""
    G = "G"
    """Gradient of that shard."""
    S = "S"
    """Output layer, first half, on this device's shard: logits and statistics."""
    C = "C"
    """Combine the gathered statistics, finish the loss, scale this shard's part of the hidden gradient."""
    T = "T"
    """Output layer, second half: the weight gradient; with two barriers the hidden gradient too."""
    R = "R"
    """Recompute a stage's activations before its backward."""
    O = "O"
    """Offload a stage's activations to the host: the copy begins."""
    D = "D"
    """Wait until the copy is over, and free the device's memory."""
    L = "L"
    """Load them back: allocate memory, and start the copy."""
    UNSHARD = "UNSHARD"
    """Gather a stage's parameters from the replicas that hold shards of them."""
    UNSHARD_E = "UNSHARD_E"
    """The same for the embedding."""
    UNSHARD_S = "UNSHARD_S"
    """The same for the output layer, or for the matrix that it shares with the embedding."""
    RESHARD = "RESHARD"
    """Free the gathered parameters of a stage."""
    RESHARD_E = "RESHARD_E"
    """The same for the embedding."""
    RESHARD_S = "RESHARD_S"
    """The same for the output layer, or for the matrix that it shares with the embedding."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Sum a stage's gradients over the replicas."""
    REDUCE_GRAD_E = "REDUCE_GRAD_E"
    """The same for the embedding."""
    REDUCE_GRAD_S = "REDUCE_GRAD_S"
    """The same for the output layer, or for the matrix that it shares with the embedding."""
    OVERLAP_F_B = "OVERLAP_F_B"
    """torch's: a forward and a backward run as one pass."""


class TransferKind(StrEnum):
    """Kind of a transfer. `SEND_*` and `RECV_*` are the two ends of a hop; the others are collectives."""

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    X = "X"
    """Broadcast of the last stage's output, to every device."""
    STATISTICS = "STATISTICS"
    """All-gather of the per-token statistics of every vocabulary shard."""
    DX = "DX"
    """Reduce of the hidden gradient, to the device of the last stage."""
    ROWS = "ROWS"
    """The embedding rows that each shard owns, to the device of the first stage."""
    ROW_GRADIENTS = "ROW_GRADIENTS"
    """Their gradients, from the device of the first stage to the owners."""


STAGE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.O, Kind.D, Kind.L})
"""Kinds that belong to a stage and a microbatch."""
VOCABULARY_KINDS = frozenset({Kind.E, Kind.G, Kind.S, Kind.C, Kind.T})
"""Kinds that every device runs once per unit, on its shard of the vocabulary."""
GATHERING_KINDS = frozenset({Kind.UNSHARD, Kind.UNSHARD_E, Kind.UNSHARD_S})
"""Kinds that start to gather parameters from the replicas; the next pass that uses the parameters waits."""
FREEING_KINDS = frozenset({Kind.RESHARD, Kind.RESHARD_E, Kind.RESHARD_S})
"""Kinds that free gathered parameters."""
REDUCING_KINDS = frozenset({Kind.REDUCE_GRAD, Kind.REDUCE_GRAD_E, Kind.REDUCE_GRAD_S})
"""Kinds that start to reduce gradients over the replicas; the end of the step waits for the result."""
SHARDING_KINDS = GATHERING_KINDS | FREEING_KINDS | REDUCING_KINDS
"""Kinds for the parameters of a stage, or of the vocabulary layers of a device. They belong to no unit."""
BACKWARD_KINDS = frozenset(
    {*(Kind.B, Kind.I, Kind.W, Kind.T, Kind.G, Kind.R, Kind.O, Kind.D, Kind.L, Kind.OVERLAP_F_B), *REDUCING_KINDS}
)
"""Kinds that occur only in training, not in evaluation."""
OFFLOAD_KINDS = frozenset({Kind.O, Kind.D, Kind.L})
"""Kinds that move activations to the host and back. They take no time themselves: copies overlap with compute."""
ROLE: dict[Kind, Kind] = {**{kind: kind for kind in Kind}, Kind.I: Kind.B}
"""Role of a kind for other stages: I counts as B if the backward is split."""
JOINT_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""Kinds that may be parts of OVERLAP_F_B."""
HOP_KINDS = frozenset({TransferKind.SEND_F, TransferKind.RECV_F, TransferKind.SEND_B, TransferKind.RECV_B})
"""Kinds of transfer between two devices. All others are collectives."""


StageUnit = tuple[int, int]
"""A stage and a unit (a slice of a microbatch). A device stores activations per stage and unit."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One unit of compute in an order.

    `stage` is None for the vocabulary layers (E, G, S, C, T, UNSHARD_S, ...), `microbatch` for `SHARDING_KINDS`.
    `slice` numbers the part of the sequence when sequences are cut. `parts` holds the passes of an OVERLAP_F_B, in the
    order in which they start, and is empty otherwise. Raises InputError for parts that cannot run as one.
    """

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None
    slice: int = 0
    parts: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        if self.parts:
            _check_parts(self)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return _text(self.kind.value, self.stage, self.microbatch, self.slice)

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Parse a pass. Raises InputError for any other text."""
        item = parse_item(text)
        if isinstance(item, Transfer):
            raise InputError(f"{quoted(text)} is a transfer; expected a pass such as 2F0 or S0")
        return item


@dataclass(frozen=True, slots=True)
class Transfer:
    """One communication in a program, as one of its members issues it.

    A hop has a `stage` (the producing stage at the sending end, the receiving stage at the other end) and
    `members = (source, destination)`. A collective has no stage, and its `root` is the source of X and ROW_GRADIENTS,
    the destination of DX and ROWS, and None for STATISTICS. `communicator` names the group that carries it; all members
    of a communicator issue its transfers in the same order. `peer` is the stage at the other end of a hop if `stage`
    has several neighbours there.
    """

    kind: TransferKind
    stage: int | None
    microbatch: int
    slice: int = 0
    members: tuple[int, ...] = ()
    root: int | None = None
    communicator: str = ""
    peer: int | None = None

    def __hash__(self) -> int:
        # Without `members`: there may be thousands, and the other fields suffice to distinguish transfers.
        return hash((self.kind, self.stage, self.microbatch, self.slice))

    def __str__(self) -> str:
        text = _text(self.kind.value, self.stage, self.microbatch, self.slice)
        return text if self.peer is None else f"{text}{TOWARDS.get(self.kind, '-')}{self.peer}"


Item = Pass | Transfer
"""An item in a row of a program."""

Rows = Sequence[Sequence[Item | None]]
"""The items of each device, in order; None is an idle slot."""


def parts_of(item: Pass) -> tuple[Pass, ...]:
    """The passes that `item` runs: itself, or the parts of an OVERLAP_F_B."""
    return item.parts or (item,)


def parts_in(row: Iterable[Item | None]) -> Iterator[Pass]:
    """All passes in a row, in the order in which they start. A joint pass yields its parts."""
    for item in row:
        if isinstance(item, Pass):
            yield from parts_of(item)


def unit_of(item: Item, slices: int) -> int:
    """The number of the unit (a slice of a microbatch) of a pass or transfer."""
    assert item.microbatch is not None
    return item.microbatch * slices + item.slice


def unit_text(item: Item) -> str:
    """The unit of a pass or transfer as text, such as 0 or 0.1; an empty string without a microbatch."""
    if item.microbatch is None:
        return ""
    return f"{item.microbatch}.{item.slice}" if item.slice else str(item.microbatch)


def parse_item(text: str) -> Item:
    """Parse a pass or transfer. Raises InputError for any other text.

    A transfer read from text has no members yet: they follow from the placement (`Program.from_csv` fills them in).
    """
    if text.startswith("("):
        return _parse_overlap(text)
    match = _WORD.fullmatch(text)
    if match is None:
        raise InputError(
            f"{quoted(text)} is not a pass or transfer; they are written as in 2F0, S0, 2F0.1, 2SEND_F0 or X0"
        )
    stage_text, name, microbatch_text, slice_text, mark, peer_text = match.groups()
    stage = int(stage_text) if stage_text else None
    microbatch = int(microbatch_text) if microbatch_text else None
    slice_ = int(slice_text) if slice_text else 0
    has_stage, has_microbatch = stage is not None, microbatch is not None
    if (has_stage, has_microbatch) != _SHAPES[name]:
        in_stage, of_microbatch = _SHAPES[name]
        example = _text(name, stage or 0 if in_stage else None, microbatch or 0 if of_microbatch else None, slice_)
        belongs = f"{'a' if in_stage else 'no'} stage and {'a' if of_microbatch else 'no'} microbatch"
        raise InputError(f"{quoted(text)} is not a pass or transfer; {name} has {belongs}, as in {example}")
    if mark and mark != TOWARDS.get(_TRANSFERS.get(name)):
        raise InputError(
            f"{quoted(text)} is not a pass or transfer; only hops name the stage at their other end, as in "
            "0SEND_F0>2 and 3RECV_F0<1"
        )
    if name in _TRANSFERS:
        assert microbatch is not None
        return Transfer(_TRANSFERS[name], stage, microbatch, slice_, peer=int(peer_text) if mark else None)
    return Pass(_KINDS[name], stage, microbatch, slice_)


def _parse_overlap(text: str) -> Pass:
    body, bracket, name = text[1:].rpartition(")")
    words = body.split(";")
    if not bracket or name != Kind.OVERLAP_F_B.value or len(words) < 2:
        raise InputError(f"{quoted(text)} is not a pass; passes run as one are written as in (2F1;2B0)OVERLAP_F_B")
    try:
        parts = tuple(Pass.parse(word) for word in words)
    except InputError as error:
        raise InputError(f"{quoted(text)} is not a pass: {error}") from None
    return Pass(Kind.OVERLAP_F_B, parts=parts)


def _check_parts(item: Pass) -> None:
    if item.kind is not Kind.OVERLAP_F_B or item.stage is not None or item.microbatch is not None:
        raise InputError(f"only an OVERLAP_F_B without stage and microbatch of its own has parts, not {item.kind}")
    if len(item.parts) < 2 or not {component.kind for component in item.parts} <= JOINT_KINDS:
        raise InputError(f"{quoted(str(item))} is not a pass; an OVERLAP_F_B has two or more of F, B, I and W")


def _text(name: str, stage: int | None, microbatch: int | None, slice_: int) -> str:
    text = name if stage is None else f"{stage}{name}"
    if microbatch is not None:
        text += str(microbatch)
    return f"{text}.{slice_}" if slice_ else text


TOWARDS: dict[TransferKind | None, str] = {
    TransferKind.SEND_F: ">",
    TransferKind.RECV_F: "<",
    TransferKind.SEND_B: ">",
    TransferKind.RECV_B: "<",
}
"""The character between a hop and the stage at its other end, in text."""
_KINDS: dict[str, Kind] = {kind.value: kind for kind in Kind}
_TRANSFERS: dict[str, TransferKind] = {kind.value: kind for kind in TransferKind}
SHAPES: dict[Kind | TransferKind, tuple[bool, bool]] = {
    **dict(product(STAGE_KINDS | HOP_KINDS, [(True, True)])),
    **dict(product(VOCABULARY_KINDS, [(False, True)])),
    **dict(product((kind for kind in TransferKind if kind not in HOP_KINDS), [(False, True)])),
    **dict(product(SHARDING_KINDS, [(False, False)])),
    **dict(product((Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD), [(True, False)])),
    Kind.OVERLAP_F_B: (False, False),
}
"""Whether a kind has a stage, and whether it has a microbatch."""
_SHAPES = {kind.value: shape for kind, shape in SHAPES.items() if kind is not Kind.OVERLAP_F_B}
_NUMBER = "(0|[1-9][0-9]{0,8})"
_NAMES = "|".join(sorted(_SHAPES, key=len, reverse=True))
_WORD = re.compile(rf"{_NUMBER}?({_NAMES})(?:{_NUMBER}(?:\.([1-9][0-9]{{0,8}}))?(?:([<>]){_NUMBER})?)?")
