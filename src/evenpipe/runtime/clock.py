"""This process's clock, and what lies between it and the clocks of others.

Processes of one machine mostly share a clock, those of two do not, and no list says which. The first process
and another one send a number to and fro: the first notes when its question left and when the answer was there, the
other writes into the answer what its own clock shows. Whatever the way took, the other clock was read between the two,
so its offset is known to half a round trip; the shortest of many counts (as in the Network Time Protocol, RFC 5905,
section 8, whose filter takes the sample of the smallest delay too). Measured before and after a step, the offset also
shows how far the clocks drift meanwhile.

An offset within its uncertainty is 0: the two share a clock, which tells the order of their events exactly, while the
error of an offset would make quick messages arrive before they left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from evenpipe.runtime.communication import Communicator

now: Callable[[], float] = time.perf_counter
"""Seconds on this process's clock; only differences mean anything."""

ROUNDS = 12
"""Questions per process: some milliseconds in all on one machine."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement of the clock of a process against that of the first.

    at: this process's clock when it was made. offset: by how much it is ahead of the first one's. uncertainty: half of
    the round trip. Seconds.
    """

    at: float
    offset: float
    uncertainty: float


def read_clocks(communicator: Communicator | None, torch_device: torch.device) -> Reading:
    """The offset of this process's clock. Collective over the communicator, one process after the other.

    communicator: of all processes, the first member's clock is the measure; None for one process alone.
    """
    if communicator is None or len(communicator.members) == 1:
        return Reading(now(), 0.0, 0.0)
    first = communicator.members[0]
    found = torch.zeros(len(communicator.members), 3, dtype=torch.float64, device=torch_device)
    if communicator.rank == first:
        found[0, 0] = now()
        for position, member in enumerate(communicator.members[1:], start=1):
            found[position] = torch.tensor(_ask(communicator, member, torch_device), dtype=torch.float64)
    else:
        _answer(communicator, first, torch_device)
    communicator.broadcast(found, first, "readings of clocks").wait("the step")
    at, offset, uncertainty = found[communicator.position].tolist()
    return Reading(at, offset, uncertainty)


def _ask(communicator: Communicator, member: int, torch_device: torch.device) -> tuple[float, float, float]:
    """At the first process: (clock of `member`, its offset, uncertainty), from the shortest of all round trips."""
    number = torch.zeros(1, dtype=torch.float64, device=torch_device)
    best = (0.0, 0.0, float("inf"))
    for _ in range(ROUNDS):
        asked = now()
        communicator.send(number, member, "a question for the time").wait("the clocks")
        communicator.receive(number, member, "the time").wait("the clocks")
        theirs = number.item()
        answered = now()
        best = min(best, (theirs, theirs - (asked + answered) / 2, (answered - asked) / 2), key=lambda entry: entry[2])
    theirs, offset, uncertainty = best
    return theirs, 0.0 if abs(offset) <= uncertainty else offset, uncertainty


def _answer(communicator: Communicator, first: int, torch_device: torch.device) -> None:
    number = torch.zeros(1, dtype=torch.float64, device=torch_device)
    for _ in range(ROUNDS):
        communicator.receive(number, first, "a question for the time").wait("the clocks")
        number.item()  # on a GPU the wait is the stream's, not ours
        number.fill_(now())
        communicator.send(number, first, "the time").wait("the clocks")


@dataclass(frozen=True, slots=True)
class Conversion:
    """From this process's clock to the first one's, by readings before and after a step."""

    before: Reading
    after: Reading

    @property
    def drift(self) -> float:
        """By how much more this clock is ahead after the step than before."""
        return self.after.offset - self.before.offset

    @property
    def uncertainty(self) -> float:
        """Of converted times."""
        return max(self.before.uncertainty, self.after.uncertainty)

    def __call__(self, time: float) -> float:
        """A time of this clock on the first one's."""
        length = self.after.at - self.before.at
        share = (time - self.before.at) / length if length > 0 else 0.0
        return time - self.before.offset - share * self.drift
