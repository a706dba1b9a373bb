"""The different moments of a device's step: how many of each thing it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from evenpipe.memory.things import ROOMS, Thing


class Moment(NamedTuple):
    """How many of each thing are held, and what a pass holds on top for a moment."""

    counts: tuple[int, ...]
    above: int
    """Number of a thing, or -1."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The different moments of a device's step."""

    things: tuple[Thing, ...]
    moments: tuple[Moment, ...]
    labels: tuple[str, ...]
    """Where in the row each moment is first."""
    after: tuple[int, ...]
    """For each item of the row, the moment after it."""
    rooms: tuple[int, ...]
    """Counts of what is held between steps, gradients aside: buffers that one microbatch hands on to the next."""


class Moments:
    """Counts while a row is walked, and remembers every moment that differs from those before it.

    Attributes:
        label: of the pass or transfer under way.
    """

    def __init__(self) -> None:
        self.label = ""
        self._number: dict[Thing, int] = {}
        self._counts: list[int] = []
        self._found: dict[tuple[tuple[int, ...], int], int] = {}
        self._labels: list[str] = []
        self._after: list[int] = []

    def _of(self, thing: Thing) -> int:
        number = self._number.get(thing)
        if number is None:
            number = self._number[thing] = len(self._counts)
            self._counts.append(0)
        return number

    def hold(self, *things: Thing) -> None:
        """One more of each."""
        for thing in things:
            self._counts[self._of(thing)] += 1

    def drop(self, *things: Thing) -> None:
        """One less of each."""
        for thing in things:
            number = self._of(thing)
            assert self._counts[number] > 0, f"{self.label}: {thing} is dropped and was not held"
            self._counts[number] -= 1

    def moment(self, above: Thing | None = None) -> int:
        """A moment of the pass under way, with something on top. Returns its number."""
        number = -1 if above is None else self._of(above)
        key = (tuple(self._counts), number)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = len(self._labels)
            self._labels.append(self.label)
        return found

    def ends_item(self) -> None:
        """An item of the row is over."""
        self._after.append(self.moment())

    def held(self) -> Iterator[Thing]:
        """What is held now."""
        return (thing for thing, number in self._number.items() if self._counts[number])

    def walk(self) -> Walk:
        """What was found. Things that came up late count 0 in earlier moments."""
        width = len(self._counts)
        moments = tuple(Moment((*counts, *(0,) * (width - len(counts))), above) for counts, above in self._found)
        held = zip(self._number, self._counts, strict=True)
        rooms = tuple(count if thing.size in ROOMS else 0 for thing, count in held)
        return Walk(tuple(self._number), moments, tuple(self._labels), tuple(self._after), rooms)
