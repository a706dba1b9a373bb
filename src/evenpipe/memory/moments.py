"""The distinct moments of a device's step, as counts of the things it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evenpipe.memory.things import ROOMS, Thing

Moment = tuple[tuple[int, ...], int]
"""Counts of held things, and the number of an additional thing during a pass, or -1."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The distinct moments of a device's step."""

    things: tuple[Thing, ...]
    moments: tuple[Moment, ...]
    labels: tuple[str, ...]
    """First position of each moment in the row."""
    after: tuple[int, ...]
    """For each item of the row, the moment after it."""
    rooms: tuple[int, ...]
    """Counts of things held between steps, without gradients: buffers that one microbatch passes to the next."""


class Moments:
    """Counts things along a row, and records every new moment.

    Attributes:
        label: of the current pass or transfer.
    """

    def __init__(self) -> None:
        self.label = ""
        self._number: dict[Thing, int] = {}
        self._counts: list[int] = []
        self._found: dict[Moment, int] = {}
        self._labels: list[str] = []
        self._after: list[int] = []

    def _of(self, thing: Thing) -> int:
        number = self._number.get(thing)
        if number is None:
            number = self._number[thing] = len(self._counts)
            self._counts.append(0)
        return number

    def hold(self, *things: Thing) -> None:
        """Hold one more of each."""
        for thing in things:
            self._counts[self._of(thing)] += 1

    def drop(self, *things: Thing) -> None:
        """Hold one less of each."""
        for thing in things:
            number = self._of(thing)
            assert self._counts[number] > 0, f"{self.label}: {thing} is dropped but was not held"
            self._counts[number] -= 1

    def moment(self, above: Thing | None = None) -> int:
        """Record a moment of the current pass, with a thing on top. Return its number."""
        number = -1 if above is None else self._of(above)
        key = (tuple(self._counts), number)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = len(self._labels)
            self._labels.append(self.label)
        return found

    def ends_item(self) -> None:
        """End an item of the row."""
        self._after.append(self.moment())

    def held(self) -> Iterator[Thing]:
        """Return the things held now."""
        return (thing for thing, number in self._number.items() if self._counts[number])

    def walk(self) -> Walk:
        """Return the result. Things that appeared late count 0 in earlier moments."""
        width = len(self._counts)
        moments = tuple(((*counts, *(0,) * (width - len(counts))), above) for counts, above in self._found)
        held = zip(self._number, self._counts, strict=True)
        rooms = tuple(count if thing.size in ROOMS else 0 for thing, count in held)
        return Walk(tuple(self._number), moments, tuple(self._labels), tuple(self._after), rooms)
