"""How a process holds a tensor of the model: which axes of the grid cut it, and where its shard is in the full tensor.

    [V, h] over 2 devices x 2 replicas      pp cuts dimension 0, then dp cuts the remaining rows
    gate and up in one matrix [2 i, h]      tp cuts each of two segments of dimension 0: a shard has rows of both
    stacked experts [E, m, h]               ep cuts dimension 0, edp cuts dimension 1

Every cut works like `torch.chunk`: all shards but the last ones are equal, and shards may be empty. Along an axis that
cuts nothing, every process has a copy, or a single process has the tensor. Initialisation, gathering, clipping,
optimizers and checkpoints learn the layout of a tensor only from here. Plain arithmetic: nothing is communicated.
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
    """Return the entries of chunk `index` when `torch.chunk` cuts `length` entries into `count` chunks."""
    size = -(-length // count)
    return range(min(index * size, length), min((index + 1) * size, length))


@dataclass(frozen=True, slots=True)
class Cut:
    """Axes that cut one dimension of what the previous cuts have left."""

    axes: tuple[str, ...]
    """They cut together; the first is the outermost."""
    part: int
    """The part of this process."""
    parts: int
    dimension: int = 0
    segments: tuple[int, ...] = ()
    """Lengths of consecutive segments, each cut the same way; empty: the dimension is a single segment."""

    def of(self, held: Sequence[range]) -> list[range]:
        """Return the entries of `held` that this cut leaves."""
        length, first, left = sum(map(len, held)), 0, list[range]()
        assert not self.segments or sum(self.segments) == length, f"{self} of {length} entries"
        for segment in self.segments or (length,):
            entries = chunk(segment, self.part, self.parts)
            left += _entries(held, first + entries.start, first + entries.stop)
            first += segment
        return left or [range(held[-1].stop, held[-1].stop)]


@dataclass(frozen=True, slots=True)
class Box:
    """Neighbouring entries of a shard: where they are in the full tensor, and in the shard."""

    whole: tuple[slice, ...]
    local: tuple[slice, ...]

    @property
    def offsets(self) -> list[int]:
        """The first entry in the full tensor, by dimension."""
        return [entries.start for entries in self.whole]

    @property
    def sizes(self) -> list[int]:
        return [entries.stop - entries.start for entries in self.whole]


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The shard of a tensor that a process holds."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    cuts: tuple[Cut, ...] = ()
    copied_along: frozenset[str] = frozenset()
    """Axes along which an earlier process holds the same shard."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(sum(map(len, self.ranges(dimension))) for dimension in range(len(self.shape)))

    @property
    def is_first_part(self) -> bool:
        """Whether this process holds the first of the shards."""
        return not any(cut.part for cut in self.cuts)

    def is_first_copy(self, *axes: str) -> bool:
        """Return whether no earlier process along these axes (default: all) holds the same shard. Only the first copy
        is saved, and only it counts in a sum."""
        return not (self.copied_along & {*axes} if axes else self.copied_along)

    def ranges(self, dimension: int) -> list[range]:
        """Return the entries of a dimension in this shard, in the order of the shard."""
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
        """Iterate over the boxes that make up this shard. An empty shard has one empty box."""
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
        """Return this shard of the full tensor, as a new tensor."""
        shard = full_tensor.new_empty(self.local_shape)
        for box in self.boxes():
            shard[box.local] = full_tensor[box.whole]
        return shard

    def of_entries(self, count: int) -> TensorPlacement:
        """Return the placement in a tensor of `count` local entries of dimension 0, full in all other dimensions."""
        cuts = tuple(cut for cut in self.cuts if cut.dimension)
        return replace(self, shape=(count, *self.shape[1:]), cuts=cuts)

    def of_state(self, shape: Sequence[int], *, whole: bool = False) -> TensorPlacement | None:
        """Return the placement of another tensor of the parameter, such as a moment, that is cut like the parameter.
        None if the tensor does not fit: the number of dimensions differs, or the length of a dimension that is cut.

        Args:
            shape: of this process's shard of the tensor, or with `whole` of the full tensor.
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
        """Return a tensor that this process holds in full, and of which it holds the first copy."""
        return Held(tensor, TensorPlacement(tuple(tensor.shape)))

    def fill(self, full_tensor: Tensor, start: int = 0) -> None:
        """Copy this process's shard of a full tensor, on any device and in any dtype, into its tensor.

        start: `full_tensor` holds the rows of dimension 0 from this one on, and perhaps not the last ones; all other
            rows stay unchanged.
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
    """Yield entries [first, last), counted across all ranges."""
    passed = 0
    for entries in held:
        selected = entries[max(first - passed, 0) : max(last - passed, 0)]
        if selected:
            yield selected
        passed += len(entries)
