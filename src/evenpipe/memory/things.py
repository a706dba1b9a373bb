"""The things that a device can hold, by name, and the distinct moments of its step, as counts of them.

Each thing has its bytes in `StageBytes` or `VocabularyBytes` (`replay`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule import Item

NO_STAGE = -1
"""Stage number of things without a stage."""
RECOMPUTED = "recomputed_"
"""Prefix of the sizes of a microbatch that has R."""


class Thing(NamedTuple):
    """A thing and the source of its bytes: a field, or one of those that `replay` derives."""

    size: str
    stage: int
    term: str
    slice: int | None = None
    """Which slice of a sequence has this size; None: that of the current pass."""


PARAMETERS, ACTIVATIONS, VOCABULARY = "parameters", "activations", "vocabulary"
BUFFERS, GRADIENTS, TRANSIENT, CARRY = "buffers", "gradients", "transient", "carry"


@cache
def peak(size: str, stage: int = NO_STAGE) -> Thing:
    return Thing(size, stage, TRANSIENT)


@cache
def input_of(stage: int) -> Thing:
    return Thing("input", stage, ACTIVATIONS)


@cache
def output_buffer(stage: int) -> Thing:
    """Return a stage's output, on its way to the next stage; or on the way back the gradient of it."""
    return Thing("output", stage, BUFFERS)


@cache
def input_buffer(stage: int) -> Thing:
    """Return a stage's input, as it arrives; or the gradient of it, on its way back."""
    return Thing("input", stage, BUFFERS)


@cache
def moved_of(stage: int) -> tuple[Thing, Thing]:
    """Return the bytes left by a forward with copies, including its input: those that go to the host, and those that
    stay."""
    return Thing("copied", stage, ACTIVATIONS), Thing("uncopied", stage, ACTIVATIONS)


@cache
def gradient_of(stage: int) -> Thing:
    """Return the input of B: the gradient of the stage's output."""
    return Thing("output", stage, ACTIVATIONS)


@cache
def gradient_parts(stage: int) -> tuple[Thing, Thing]:
    """Return gradients of the stage's parameters: those that I computes, and the rest."""
    return _of_all("parameters.input_gradients", stage, GRADIENTS), _of_all(
        "parameters.weight_gradients", stage, GRADIENTS
    )


@cache
def carry_of(stage: int) -> tuple[Thing, Thing]:
    """Return the keys and values of whole sequences that slices share, and their gradients."""
    return _of_all("carried", stage, CARRY), _of_all("carried_gradients", stage, CARRY)


def _of_all(size: str, stage: int, term: str) -> Thing:
    """Return a thing that is the same for all slices."""
    return Thing(size, stage, term, 0)


class PartThings(NamedTuple):
    """What the items about a part's parameters hold, for a stage or a vocabulary matrix."""

    gradients: tuple[Thing, ...]
    gathered: Thing
    gathering_peak: Thing
    reduced: Thing
    reducing_peak: Thing


def part_things(prefix: str, stage: int, gradients: tuple[Thing, ...]) -> PartThings:
    """Return the things with bytes in the `PartBytes` called `prefix`."""
    return PartThings(
        gradients,
        _of_all(f"{prefix}.gathered", stage, PARAMETERS),
        _of_all(f"{prefix}.gathering_peak", stage, TRANSIENT),
        _of_all(f"{prefix}.summed", stage, GRADIENTS),
        _of_all(f"{prefix}.reducing_peak", stage, TRANSIENT),
    )


def _of_vocabulary(size: str, term: str = VOCABULARY) -> Thing:
    return Thing(size, NO_STAGE, term)


LOOKED_UP = _of_vocabulary("embedding.looked_up")
ROWS_INPUT = _of_vocabulary("embedding.rows")
ROWS_RECEIVED = _of_vocabulary("embedding.rows", BUFFERS)
ROWS_ALL = _of_vocabulary("embedding.all_rows")
ROWS_GRADIENT = _of_vocabulary("embedding.all_rows", BUFFERS)
X = _of_vocabulary("hidden")
OUTPUT_STORED = _of_vocabulary("stored")
PRODUCT = _of_vocabulary("product")
COMBINED = _of_vocabulary("combined")
OWN_STATISTICS = _of_vocabulary("own_statistics")
STATISTICS = _of_vocabulary("statistics")
DX = _of_vocabulary("gradient")
HANDED_ON = _of_vocabulary("handed_on")
ROOM = _of_all("room", NO_STAGE, VOCABULARY)
OUTPUT_GRADIENTS = _of_all("parameters.gradients", NO_STAGE, GRADIENTS)
EMBEDDING_GRADIENTS = _of_all("embedding.parameters.gradients", NO_STAGE, GRADIENTS)
OUTPUT_PART = part_things("parameters", NO_STAGE, (OUTPUT_GRADIENTS,))
EMBEDDING_PART = part_things("embedding.parameters", NO_STAGE, (EMBEDDING_GRADIENTS,))

ROOMS = ("handed_on", "room")
"""Things that are held between steps."""

# --- moments ---------------------------------------------------------------------------------------------------------

COUNT = np.dtype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The distinct moments of a device's step."""

    things: tuple[Thing, ...]
    counts: NDArray[np.int32]
    """By moment: how many of each thing are held."""
    above: tuple[int, ...]
    """By moment: the number of an additional thing during a pass, or -1."""
    items: tuple[Item | None, ...]
    """The item of the row at which each moment comes first; None before the first item."""
    after: tuple[int, ...]
    """For each item of the row, the moment after it."""
    rooms: tuple[int, ...]
    """Counts of things held between steps, without gradients: buffers that one microbatch passes to the next."""


class Moments:
    """Counts things along a row, and records every new moment.

    Attributes:
        item: the current pass or transfer; None before the first.
        slice: of its sequence.
    """

    def __init__(self) -> None:
        self.item: Item | None = None
        self.slice = 0
        self._number: dict[Thing, int] = {}
        self._seen: dict[tuple[Thing, int], int] = {}
        """The same by the thing as it is named and the slice of the pass, which is quicker."""
        self._counts = array(COUNT.char)
        self._found: dict[tuple[bytes, int], int] = {}
        """Numbers of moments, by the bytes of their counts, which are quicker than tuples, and what is on top."""
        self._items: list[Item | None] = []
        self._after: list[int] = []

    def here(self, *things: Thing) -> tuple[Thing, ...]:
        """Return the things of the current slice, to drop them later."""
        return tuple(one._replace(slice=self.slice) if one.slice is None else one for one in things)

    def _of(self, thing: Thing) -> int:
        key = thing, self.slice
        number = self._seen.get(key)
        if number is None:
            (thing,) = self.here(thing)
            number = self._seen[key] = self._number.setdefault(thing, len(self._counts))
            if number == len(self._counts):
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
            assert self._counts[number] > 0, f"{label_of(self.item)}: {thing} is dropped but was not held"
            self._counts[number] -= 1

    def moment(self, above: Thing | None = None) -> int:
        """Record a moment of the current pass, with a thing on top. Return its number."""
        number = -1 if above is None else self._of(above)
        key = self._counts.tobytes(), number
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = len(self._items)
            self._items.append(self.item)
        return found

    def ends_item(self) -> None:
        """End an item of the row."""
        self._after.append(self.moment())

    def held(self) -> Iterator[Thing]:
        """Return the things held now."""
        return (thing for thing, number in self._number.items() if self._counts[number])

    def walk(self) -> Walk:
        """Return the result. Things that appeared late count 0 in earlier moments."""
        width = COUNT.itemsize * len(self._counts)
        counts = b"".join(found.ljust(width, b"\0") for found, _ in self._found)
        held = zip(self._number, self._counts, strict=True)
        return Walk(
            things=tuple(self._number),
            counts=np.frombuffer(counts, dtype=COUNT).reshape(len(self._found), len(self._counts)),
            above=tuple(above for _, above in self._found),
            items=tuple(self._items),
            after=tuple(self._after),
            rooms=tuple(count if thing.size in ROOMS else 0 for thing, count in held),
        )


def label_of(item: Item | None) -> str:
    """Return the name of a pass or transfer; "" for none."""
    if item is None:
        return ""
    where = [("stage", item.stage), ("microbatch", item.microbatch), ("slice", item.slice or None)]
    return f"{item.kind.value} of {', '.join(f'{noun} {number}' for noun, number in where if number is not None)}"
