"""The clock of this process, and its offset from the clocks of others.

Processes on one machine usually share a clock, those on two machines do not, and we cannot know in advance. The first
process and another one exchange a number: the first notes when it sent its question and when the answer arrived, the
other answers with its own time. The other clock was read between these two times, so its offset is known to half a
round trip; the shortest of many round trips counts (as in the Network Time Protocol, RFC 5905, section 8, whose filter
also takes the sample with the smallest delay). Measured before and after a step, the offset also shows the drift of the
clocks meanwhile.

An offset within its uncertainty counts as 0: the two processes then share a clock, and the order of their events is
exact, while the error of an offset would let quick messages arrive before they were sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from evenpipe.communication.communicator import Communicator

now: Callable[[], float] = time.perf_counter
"""Seconds on this process's clock; only differences mean anything."""

ROUNDS = 12
"""Questions per process; together they take some milliseconds on one machine."""


class Reading(NamedTuple):
    """A comparison of a process's clock with that of the first one, in seconds.

    at: time of the comparison on this clock. offset: how far this clock is ahead of the first one. uncertainty: half of
    the round trip.
    """

    at: float
    offset: float
    uncertainty: float


def read_clocks(communicator: Communicator | None, members: Sequence[int], torch_device: torch.device) -> Reading:
    """Return the offset of this process's clock. Collective over the members, one after the other.

    communicator: of the members and possibly others; None for a single process.
    members: global ranks; the clock of the first one is the reference.
    """
    if communicator is None or len(members) == 1:
        return Reading(now(), 0.0, 0.0)
    first, *other_members = members
    if communicator.rank == first:
        for member in other_members:
            member_reading = torch.tensor(
                _ask(communicator, member, torch_device), dtype=torch.float64, device=torch_device
            )
            communicator.send(member_reading, member, "a reading of its clock").wait("the clocks")
        return Reading(now(), 0.0, 0.0)
    _answer(communicator, first, torch_device)
    reading = torch.zeros(3, dtype=torch.float64, device=torch_device)
    communicator.receive(reading, first, "the reading of its clock").wait("the clocks")
    return Reading(*reading.tolist())


def _ask(communicator: Communicator, member: int, torch_device: torch.device) -> tuple[float, float, float]:
    """On the first process: return (clock of `member`, its offset, uncertainty), from the shortest round trip."""
    number = torch.zeros(1, dtype=torch.float64, device=torch_device)
    best = (0.0, 0.0, float("inf"))
    for _ in range(ROUNDS):
        sent_at = now()
        communicator.send(number, member, "a question for the time").wait("the clocks")
        communicator.receive(number, member, "the time").wait("the clocks")
        member_time = number.item()
        received_at = now()
        best = min(
            best,
            (member_time, member_time - (sent_at + received_at) / 2, (received_at - sent_at) / 2),
            key=lambda entry: entry[2],
        )
    member_time, offset, uncertainty = best
    return member_time, 0.0 if abs(offset) <= uncertainty else offset, uncertainty


def _answer(communicator: Communicator, first: int, torch_device: torch.device) -> None:
    number = torch.zeros(1, dtype=torch.float64, device=torch_device)
    for _ in range(ROUNDS):
        communicator.receive(number, first, "a question for the time").wait("the clocks")
        number.item()  # on a GPU the stream waits, not the host
        number.fill_(now())
        communicator.send(number, first, "the time").wait("the clocks")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converts times of this process's clock to the first one, by readings at the start and the end of a step."""

    start: Reading
    end: Reading

    @property
    def drift(self) -> float:
        """Change of this clock's offset during the step."""
        return self.end.offset - self.start.offset

    @property
    def uncertainty(self) -> float:
        return max(self.start.uncertainty, self.end.uncertainty)

    def __call__(self, time: float) -> float:
        """Convert a time of this clock to that of the first process."""
        length = self.end.at - self.start.at
        share = (time - self.start.at) / length if length > 0 else 0.0
        return time - self.start.offset - share * self.drift
