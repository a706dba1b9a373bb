"""Processes that exchange inside passes, and the current pass."""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.communication.communicator import Communicator


@dataclass(slots=True)
class Running:
    """The current pass. A pipeline's walker writes it; the exchanges between processes read it."""

    step: int = 0
    """Counts steps and evaluations."""
    text: str = ""
    """Text of the pass, for messages."""
    stage_unit: tuple[int, int] | None = None
    """Stage and unit of its forward or backward; None in an evaluation, where no backward follows."""
    repeats: bool = False
    """Whether it repeats a forward whose backward follows immediately (R)."""


class Ranks:
    """Processes that exchange inside passes, as one of them sees it."""

    def __init__(self, communicator: Communicator, running: Running) -> None:
        """communicator: of these processes, in their order."""
        self.communicator = communicator
        self.size, self.rank = len(communicator.members), communicator.position
        self.running = running
