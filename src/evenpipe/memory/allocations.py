"""The allocations that a device can hold, and the distinct moments of its step as counts of allocations."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule import Item

from .bytes import PartBytes, StageBytes, VocabularyBytes

NO_STAGE = -1
"""Stage number of allocations without a stage."""

Size = Callable[[StageBytes, VocabularyBytes], int]
"""Maps the bytes of the allocation's stage and of the device's vocabulary layers to the bytes of the allocation. Sizes
are compared by identity: equal allocations have the same object as their size."""


class Allocation(NamedTuple):
    """An allocation and its bytes."""

    size: Size
    stage: int
    term: str
    slice: int | None = None
    """The slice of a sequence that has this size; None: the slice of the current pass."""


PARAMETERS, ACTIVATIONS, VOCABULARY = "parameters", "activations", "vocabulary"
BUFFERS, GRADIENTS, TRANSIENT, CARRY = "buffers", "gradients", "transient", "carry"


def of_stage(size: Callable[[StageBytes], int]) -> Size:
    """A size that depends on the stage alone."""
    return lambda stage, _: size(stage)


def of_vocabulary(size: Callable[[VocabularyBytes], int]) -> Size:
    """A size that depends on the vocabulary layers alone."""
    return lambda _, vocabulary: size(vocabulary)


@cache
def recomputed(size: Size) -> Size:
    """The size for a microbatch that is recomputed (R)."""
    return lambda stage, vocabulary: size(stage.recomputed or stage, vocabulary)


INPUT, OUTPUT = of_stage(lambda stage: stage.input), of_stage(lambda stage: stage.output)
STORED, QUEUED = of_stage(lambda stage: stage.stored), of_stage(lambda stage: stage.queued)
KEPT_INPUT = of_stage(lambda stage: stage.kept_input)
COPIED, UNCOPIED = of_stage(lambda stage: stage.copied), of_stage(lambda stage: stage.uncopied)
CARRIED = of_stage(lambda stage: stage.carried)
CARRIED_GRADIENTS = of_stage(lambda stage: stage.carried_gradients)
INPUT_GRADIENTS = of_stage(lambda stage: stage.parameters.input_gradients)
WEIGHT_GRADIENTS = of_stage(lambda stage: stage.parameters.weight_gradients)

FORWARD_PEAK = of_stage(lambda stage: stage.peaks.forward)
BARE_FORWARD_PEAK = of_stage(lambda stage: stage.bare_forward_peak)
RECOMPUTE_PEAK = of_stage(lambda stage: stage.peaks.recompute)
BACKWARD_PEAK, INPUT_PEAK, WEIGHT_PEAK = (
    (of_stage(lambda stage: stage.peaks.backward), of_stage(lambda stage: stage.first_backward_peak)),
    (of_stage(lambda stage: stage.peaks.input), of_stage(lambda stage: stage.first_input_peak)),
    (of_stage(lambda stage: stage.peaks.weight), of_stage(lambda stage: stage.first_weight_peak)),
)
"""Within B, I and W: if the gradients of parameters exist, and if the pass allocates them."""


def _copied_gradient(stage: StageBytes, vocabulary: VocabularyBytes) -> int:
    return 0 if vocabulary.gradient == stage.output else stage.output


COPIED_GRADIENT: Size = _copied_gradient
"""The gradient of the last stage's output, if it is not the same tensor as dX."""

PLACING_PEAK = of_vocabulary(lambda vocabulary: vocabulary.embedding.placing_peak)
PICKING_PEAK = of_vocabulary(lambda vocabulary: vocabulary.embedding.picking_peak)
ROWS_PEAK = of_vocabulary(lambda vocabulary: vocabulary.embedding.forward_peak)
ROWS_GRADIENT_PEAK = of_vocabulary(lambda vocabulary: vocabulary.embedding.backward_peak)
OUTPUT_PEAK = of_vocabulary(lambda vocabulary: vocabulary.peaks.output)
COMBINE_PEAK = of_vocabulary(lambda vocabulary: vocabulary.peaks.combine)
DX_PEAK = of_vocabulary(lambda vocabulary: vocabulary.peaks.gradient)
OUTPUT_BACKWARD_PEAK = of_vocabulary(lambda vocabulary: vocabulary.peaks.backward)
OUTPUT_WEIGHT_PEAK = of_vocabulary(lambda vocabulary: vocabulary.peaks.weight)


@cache
def peak(size: Size, stage: int = NO_STAGE) -> Allocation:
    return Allocation(size, stage, TRANSIENT)


@cache
def input_of(stage: int) -> Allocation:
    return Allocation(INPUT, stage, ACTIVATIONS)


@cache
def output_buffer(stage: int) -> Allocation:
    """Return a stage's output on its way to the next stage, or its gradient on the way back."""
    return Allocation(OUTPUT, stage, BUFFERS)


@cache
def input_buffer(stage: int) -> Allocation:
    """Return a stage's input as it arrives, or its gradient on the way back."""
    return Allocation(INPUT, stage, BUFFERS)


@cache
def moved_of(stage: int) -> tuple[Allocation, Allocation]:
    """Return what a forward that is copied to the host leaves, including its input: the part that is moved, and the
    part that stays."""
    return Allocation(COPIED, stage, ACTIVATIONS), Allocation(UNCOPIED, stage, ACTIVATIONS)


@cache
def gradient_of(stage: int) -> Allocation:
    """Return the input of B: the gradient of the stage's output."""
    return Allocation(OUTPUT, stage, ACTIVATIONS)


@cache
def gradient_parts(stage: int) -> tuple[Allocation, Allocation]:
    """Return the gradients of the stage's parameters: those computed by I, and the others."""
    return _of_all(INPUT_GRADIENTS, stage, GRADIENTS), _of_all(WEIGHT_GRADIENTS, stage, GRADIENTS)


@cache
def carry_of(stage: int) -> tuple[Allocation, Allocation]:
    """Return the keys and values of whole sequences that slices share, and their gradients."""
    return _of_all(CARRIED, stage, CARRY), _of_all(CARRIED_GRADIENTS, stage, CARRY)


def _of_all(size: Size, stage: int, term: str) -> Allocation:
    """Return an allocation that is the same for all slices."""
    return Allocation(size, stage, term, 0)


class PartAllocations(NamedTuple):
    """What items such as UNSHARD hold for a part's parameters: those of a stage or of a vocabulary matrix."""

    gradients: tuple[Allocation, ...]
    gathered: Allocation
    gathering_peak: Allocation
    reduced: Allocation
    reducing_peak: Allocation


def part_allocations(
    part: Callable[[StageBytes, VocabularyBytes], PartBytes], stage: int, gradients: tuple[Allocation, ...]
) -> PartAllocations:
    """Return the allocations whose sizes are in the `PartBytes` that `part` returns."""
    return PartAllocations(
        gradients,
        _of_all(lambda *args: part(*args).gathered, stage, PARAMETERS),
        _of_all(lambda *args: part(*args).gathering_peak, stage, TRANSIENT),
        _of_all(lambda *args: part(*args).summed, stage, GRADIENTS),
        _of_all(lambda *args: part(*args).reducing_peak, stage, TRANSIENT),
    )


@cache
def parameters_of(stage: int) -> PartAllocations:
    """Return the allocations of a stage's own parameters."""
    return part_allocations(lambda stage_bytes, _: stage_bytes.parameters, stage, gradient_parts(stage))


def _vocabulary(size: Callable[[VocabularyBytes], int], term: str = VOCABULARY) -> Allocation:
    return Allocation(of_vocabulary(size), NO_STAGE, term)


def _matrix(part: Callable[[VocabularyBytes], PartBytes]) -> PartAllocations:
    gradients = _of_all(of_vocabulary(lambda vocabulary: part(vocabulary).gradients), NO_STAGE, GRADIENTS)
    return part_allocations(lambda _, vocabulary: part(vocabulary), NO_STAGE, (gradients,))


LOOKED_UP = _vocabulary(lambda vocabulary: vocabulary.embedding.looked_up)
ROWS_INPUT = _vocabulary(lambda vocabulary: vocabulary.embedding.rows)
ROWS_RECEIVED = ROWS_INPUT._replace(term=BUFFERS)
ROWS_ALL = _vocabulary(lambda vocabulary: vocabulary.embedding.all_rows)
ROWS_GRADIENT = ROWS_ALL._replace(term=BUFFERS)
X = _vocabulary(lambda vocabulary: vocabulary.hidden)
OUTPUT_STORED = _vocabulary(lambda vocabulary: vocabulary.stored - vocabulary.product)
PRODUCT = _vocabulary(lambda vocabulary: vocabulary.product)
COMBINED = _vocabulary(lambda vocabulary: vocabulary.combined)
OWN_STATISTICS = _vocabulary(lambda vocabulary: vocabulary.own_statistics)
STATISTICS = _vocabulary(lambda vocabulary: vocabulary.statistics)
DX = _vocabulary(lambda vocabulary: vocabulary.gradient)
HANDED_ON = _vocabulary(lambda vocabulary: vocabulary.handed_on)
ROOM = _of_all(of_vocabulary(lambda vocabulary: vocabulary.room), NO_STAGE, VOCABULARY)
OUTPUT_PART = _matrix(lambda vocabulary: vocabulary.parameters)
EMBEDDING_PART = _matrix(lambda vocabulary: vocabulary.embedding.parameters)
(OUTPUT_GRADIENTS,), (EMBEDDING_GRADIENTS,) = OUTPUT_PART.gradients, EMBEDDING_PART.gradients

ROOMS = (HANDED_ON.size, ROOM.size)
"""Sizes of allocations that are held between steps."""

# --- moments ---------------------------------------------------------------------------------------------------------

COUNT = np.dtype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The distinct moments of a device's step."""

    allocations: tuple[Allocation, ...]
    counts: NDArray[np.int32]
    """By moment: how many of each allocation are held."""
    above: tuple[int, ...]
    """By moment: the index of an additional allocation during a pass, or -1."""
    items: tuple[Item | None, ...]
    """The item of the row at which each moment first occurs; None before the first item."""
    moments_after: tuple[int, ...]
    """For each item of the row, the moment after it."""
    rooms: tuple[int, ...]
    """Counts of allocations held between steps, without gradients: buffers that one microbatch passes to the next."""


class Moments:
    """Counts allocations along a row, and records every new moment.

    Attributes:
        item: the current pass or transfer; None before the first.
        slice: its slice of a sequence.
    """

    def __init__(self) -> None:
        self.item: Item | None = None
        self.slice = 0
        self._number: dict[Allocation, int] = {}
        self._seen: dict[tuple[Allocation, int], int] = {}
        """The same numbers, by the allocation before its slice is filled in and the slice of the pass: faster."""
        self._counts = array(COUNT.char)
        self._moment_numbers: dict[tuple[bytes, int], int] = {}
        """Indices of moments, by the bytes of their counts (faster than tuples) and the number of the additional
        allocation."""
        self._items: list[Item | None] = []
        self._moments_after: list[int] = []

    def in_current_slice(self, *allocations: Allocation) -> tuple[Allocation, ...]:
        """Return the allocations bound to the current slice, to drop them later."""
        return tuple(
            allocation._replace(slice=self.slice) if allocation.slice is None else allocation
            for allocation in allocations
        )

    def _of(self, allocation: Allocation) -> int:
        key = allocation, self.slice
        number = self._seen.get(key)
        if number is None:
            (allocation,) = self.in_current_slice(allocation)
            number = self._seen[key] = self._number.setdefault(allocation, len(self._counts))
            if number == len(self._counts):
                self._counts.append(0)
        return number

    def hold(self, *allocations: Allocation) -> None:
        """Increase the count of each allocation by one."""
        for allocation in allocations:
            self._counts[self._of(allocation)] += 1

    def drop(self, *allocations: Allocation) -> None:
        """Decrease the count of each allocation by one."""
        for allocation in allocations:
            number = self._of(allocation)
            assert self._counts[number] > 0, f"{label_of(self.item)}: {allocation} is dropped but was not held"
            self._counts[number] -= 1

    def moment(self, above: Allocation | None = None) -> int:
        """Record a moment of the current pass, with an additional allocation. Return its index."""
        number = -1 if above is None else self._of(above)
        key = self._counts.tobytes(), number
        index = self._moment_numbers.get(key)
        if index is None:
            index = self._moment_numbers[key] = len(self._items)
            self._items.append(self.item)
        return index

    def ends_item(self) -> None:
        """End an item of the row."""
        self._moments_after.append(self.moment())

    def held(self) -> Iterator[Allocation]:
        """Return the allocations held now."""
        return (allocation for allocation, number in self._number.items() if self._counts[number])

    def walk(self) -> Walk:
        """Return the result. Allocations that appeared late have count 0 in earlier moments."""
        width = COUNT.itemsize * len(self._counts)
        counts = b"".join(row.ljust(width, b"\0") for row, _ in self._moment_numbers)
        held = zip(self._number, self._counts, strict=True)
        return Walk(
            allocations=tuple(self._number),
            counts=np.frombuffer(counts, dtype=COUNT).reshape(len(self._moment_numbers), len(self._counts)),
            above=tuple(above for _, above in self._moment_numbers),
            items=tuple(self._items),
            moments_after=tuple(self._moments_after),
            rooms=tuple(count if allocation.size in ROOMS else 0 for allocation, count in held),
        )


def label_of(item: Item | None) -> str:
    """Return the name of a pass or transfer; "" for none."""
    if item is None:
        return ""
    where = [("stage", item.stage), ("microbatch", item.microbatch), ("slice", item.slice or None)]
    return f"{item.kind.value} of {', '.join(f'{noun} {number}' for noun, number in where if number is not None)}"
