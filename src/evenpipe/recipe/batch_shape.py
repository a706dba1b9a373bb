"""How the batch of a step is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from evenpipe.errors import InputError
from evenpipe.given import is_whole

Documents = Literal["joined", "separate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sizes of one replica's part of a step's batch, and what shares a sequence.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    microbatches: int | None = None
    """Number of equal parts. None: those of the order, else 4 per device; never None in a `Recipe`."""
    microbatch_size: int = 1
    """Sequences of a microbatch, for estimates and plans; a pipeline takes what each step gets."""
    slices: int | Literal["auto"] = 1
    """Parts of every sequence that a device takes one after the other. "auto": as many as make the predicted step
    shortest (`slice_choice`)."""
    sequence_length: int | None = None
    """Tokens of a sequence, before context parallelism. Orders are arranged for it, since the share of attention
    depends on it; the steps of a pipeline may have others. None: 2048, or the maximum of the model."""
    documents: Documents = "joined"
    """Several documents in one sequence; a new one begins where position ids do not count on. "separate": each is
    trained as if it were alone, with every model. The first token of each is not predicted, and padding is a document
    without labels, not an `attention_mask`. "joined": position ids mean what they mean to the model in transformers:
    many models keep such documents apart, others do not; the first token is predicted if it has a label."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "microbatch_size", "slices", "sequence_length"):
            size = getattr(self, name)
            optional = name in ("microbatches", "sequence_length")
            if (optional and size is None) or (name == "slices" and size == "auto"):
                continue
            if not is_whole(size) or size < 1:
                or_auto = " or 'auto'" if name == "slices" else ""
                raise InputError(f"{name}: {size!r}, expected a whole number of at least 1{or_auto}")
        if self.documents not in get_args(Documents):
            raise InputError(f"documents: {self.documents!r}, expected 'joined' or 'separate'")

    @property
    def separate(self) -> bool:
        """Whether documents of a sequence do not see each other."""
        return self.documents == "separate"
