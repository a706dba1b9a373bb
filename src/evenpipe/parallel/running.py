"""What a process is doing, for those who exchange inside passes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Running:
    """The pass that runs. The walker of a pipeline writes it; the exchanges of its processes read it."""

    step: int = 0
    """Counts steps and evaluations."""
    text: str = ""
    """Of the pass, for messages."""
    place: tuple[int, int] | None = None
    """Stage and unit of its forward or backward; None in an evaluation, where no backward follows."""
    repeats: bool = False
    """It repeats a forward whose backward follows at once (R)."""
