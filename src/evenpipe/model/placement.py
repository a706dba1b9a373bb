"""How a process holds a tensor of the model: which axes of the grid cut it, and where its part is in the whole one.

    [V, h] over 2 devices x 2 replicas      pp cuts dimension 0, then dp cuts the rows that are left
    gate and up in one matrix [2 i, h]      tp cuts dimension 0 in two segments: the part has rows of both
    stacked experts [E, m, h]               ep cuts dimension 0, edp cuts dimension 1

Every cut is one of `torch.chunk`: all parts but the last ones are equal, and parts may be empty. An axis that cuts
nothing has copies, or the tensor is on one process of it. Initialisation, gathering, clipping, optimizers and
checkpoints know the layout of a tensor only from here. Plain arithmetic: nothing is communicated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
AnyTensor_co = TypeVar("AnyTensor_co", bound=Tensor, covariant=True)


def chunk(length: int, index: int, count: int) -> range:
    """Return the entries of one part, of `length` entries that `torch.chunk` cuts in `parts`."""
    size = -(-length // count)
    return range(min(index * size, length), min((index + 1) * size, length))


@dataclass(frozen=True, slots=True)
class Cut:
    """Axes that cut one dimension of what the cuts before have left."""

    axes: tuple[str, ...]
    """They cut together, the first one being the outermost."""
    part: int
    """That of this process."""
    parts: int
    dimension: int = 0
    segments: tuple[int, ...] = ()
    """Lengths of segments, one after the other, that are each cut alike; empty: the dimension is one segment."""

    def of(self, held: Sequence[range]) -> list[range]:
        """Return the entries that are left of those held."""
        length, first, left = sum(map(len, held)), 0, list[range]()
        assert not self.segments or sum(self.segments) == length, f"{self} of {length} entries"
        for segment in self.segments or (length,):
            entries = chunk(segment, self.part, self.parts)
            left += _entries(held, first + entries.start, first + entries.stop)
            first += segment
        return left or [range(held[-1].stop, held[-1].stop)]


@dataclass(frozen=True, slots=True)
class Box:
    """Neighbouring entries of a part: where they are in the whole tensor, and in the part."""

    whole: tuple[slice, ...]
    local: tuple[slice, ...]

    @property
    def offsets(self) -> list[int]:
        """The first entry in the whole tensor, by dimension."""
        return [entries.start for entries in self.whole]

    @property
    def sizes(self) -> list[int]:
        return [entries.stop - entries.start for entries in self.whole]


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The part of a tensor that a process holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    cuts: tuple[Cut, ...] = ()
    copied_along: frozenset[str] = frozenset()
    """Axes along which a process before this one holds the same part."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(map(len, self.ranges(dimension))) for dimension in range(len(self.shape)))

    @property
    def is_first_part(self) -> bool:
        """Whether this process is the first of those that the tensor is cut over."""
        return not any(cut.part for cut in self.cuts)

    def is_first_copy(self, *axes: str) -> bool:
        """Return whether no process before this one, along these axes (default: all), holds the same part. Of all
        copies the first one is saved, and counts in a sum."""
        return not (self.copied_along & {*axes} if axes else self.copied_along)

    def ranges(self, dimension: int) -> list[range]:
        """Return the entries of a dimension in this part, in its order."""
        held = [range(self.shape[dimension])]
        for cut in self.cuts:
            if cut.dimension == dimension:
                held = cut.of(held)
        joined = held[:1]
        for following in held[1:]:
            if joined[-1].stop == following.start:
                joined[-1] = range(joined[-1].start, following.stop)
            else:
                joined.append(following)
        return joined

    def boxes(self) -> Iterator[Box]:
        """Iterate over the boxes that make up this part. An empty part has one, which is empty."""
        by_dimension = []
        for dimension in range(len(self.shape)):
            ranges = self.ranges(dimension)
            stops = list(itertools.accumulate(map(len, ranges)))
            by_dimension.append(
                [
                    (slice(entries.start, entries.stop), slice(stop - len(entries), stop))
                    for entries, stop in zip(ranges, stops, strict=True)
                ]
            )
        for slices in itertools.product(*by_dimension):
            yield Box(tuple(full for full, _ in slices), tuple(local for _, local in slices))

    def of(self, full_tensor: Tensor) -> Tensor:
        """Return this part of the whole tensor, as a new one."""
        shard = full_tensor.new_empty(self.local_shape)
        for box in self.boxes():
            shard[box.local] = full_tensor[box.whole]
        return shard

    def of_entries(self, count: int) -> TensorPlacement:
        """Return which part is held of so many of the own entries of dimension 0, whole along all other dimensions."""
        cuts = tuple(cut for cut in self.cuts if cut.dimension)
        return replace(self, shape=(count, *self.shape[1:]), cuts=cuts)

    def of_state(self, shape: Sequence[int], *, whole: bool = False) -> TensorPlacement | None:
        """Return the placement of another tensor of the parameter, such as a moment, that is cut as it is. None if the
        tensor does not fit: it has other dimensions, or other lengths of those that are cut.

        Args:
            shape: of this process's part of the tensor, or with `whole` of the whole tensor.
        """
        cut_dimensions = {cut.dimension for cut in self.cuts}
        lengths = self.shape if whole else self.local_shape
        if len(shape) != len(lengths) or any(shape[dimension] != lengths[dimension] for dimension in cut_dimensions):
            return None
        return replace(
            self, shape=tuple(self.shape[axis] if axis in cut_dimensions else shape[axis] for axis in range(len(shape)))
        )


@dataclass(frozen=True, slots=True, eq=False)
class Held(Generic[AnyTensor_co]):
    """A tensor as this process holds it."""

    tensor: AnyTensor_co
    placement: TensorPlacement

    @staticmethod
    def whole(tensor: AnyTensor) -> Held[AnyTensor]:
        """Return a tensor that this process holds whole, and no process before it."""
        return Held(tensor, TensorPlacement(tuple(tensor.shape)))

    def fill(self, full_tensor: Tensor, start: int = 0) -> None:
        """Copy this process's part of a whole tensor, of any device and dtype, into its own.

        start: `whole` holds the rows of dimension 0 from here on, and perhaps not the last ones; others stay as they
            are.
        """
        local = self.tensor.detach()
        for box in self.placement.boxes():
            if not box.whole:  # a scalar
                local.copy_(full_tensor)
                continue
            (rows, *columns), (local_rows, *local_columns) = box.whole, box.local
            first, last = max(rows.start, start), min(rows.stop, start + len(full_tensor))
            if first < last:
                offset = local_rows.start - rows.start
                source = full_tensor[(slice(first - start, last - start), *columns)]
                local[(slice(first + offset, last + offset), *local_columns)].copy_(source)


def _entries(held: Sequence[range], first: int, last: int) -> Iterator[range]:
    """Yield entries first to last, the last one excluded, counted through all ranges."""
    passed = 0
    for entries in held:
        selected = entries[max(first - passed, 0) : max(last - passed, 0)]
        if selected:
            yield selected
        passed += len(entries)
