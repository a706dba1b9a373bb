"""How the batch of a step is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evenpipe.errors import InputError
from evenpipe.given import is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sizes of one replica's part of a step's batch.

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

    def __post_init__(self) -> None:
        for name in ("microbatches", "microbatch_size", "slices", "sequence_length"):
            size = getattr(self, name)
            optional = name in ("microbatches", "sequence_length")
            if (optional and size is None) or (name == "slices" and size == "auto"):
                continue
            if not is_whole(size) or size < 1:
                or_auto = " or 'auto'" if name == "slices" else ""
                raise InputError(f"{name}: {size!r}, expected a whole number of at least 1{or_auto}")
