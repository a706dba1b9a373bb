"""Does it fit? An answer with a margin that is a range in bytes, not one factor for all cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .reserved import ProcessMemory

Verdict = Literal["fits", "at risk", "does not fit"]


def verdict_of(process: ProcessMemory, memory: int) -> Verdict:
    """Of one device on a card with `memory` bytes.

    "fits": also when everything beside tensors is as large as was ever seen. "does not fit": not even when it is as
    small as was ever seen. "at risk": between them.
    """
    if process.process.most <= memory:
        return "fits"
    return "does not fit" if process.process.least > memory else "at risk"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Of all devices together."""
    for one in ("does not fit", "at risk"):
        if one in verdicts:
            return one  # type: ignore[return-value]  # a literal of the loop above
    return "fits"
