"""Whether it fits, with a margin that is a range in bytes, not one factor for all GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .reserved import ProcessMemory

Verdict = Literal["fits", "at risk", "does not fit"]


def verdict_of(process: ProcessMemory, memory: int) -> Verdict:
    """Return the verdict for one device on a GPU with `memory` bytes.

    "fits": even if everything besides tensors is as large as was ever seen. "does not fit": not even if it is as small
    as was ever seen. "at risk": in between.
    """
    if process.process.most <= memory:
        return "fits"
    return "does not fit" if process.process.least > memory else "at risk"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict for all devices together."""
    for one in ("does not fit", "at risk"):
        if one in verdicts:
            return one  # type: ignore[return-value]  # a literal of the loop above
    return "fits"
