"""A pass as a sequence of stretches, one per layer, and the same pass over more layers of the same kinds.

The live bytes of a running stage are a sum: the bytes left by earlier layers, plus those of the current layer. So a
stage of forty layers follows from one of three: each of its layers is like the first, the last, or one between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .lines import at, highest


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a pass. Bytes are relative to the live bytes at its start."""

    above: int = 0
    """Its peak."""
    retained: int = 0
    """Bytes that are live at its end; negative if it frees more than it allocates."""


@dataclass(frozen=True, slots=True)
class LineStretch:
    """A stretch for any number of sequences, in lines (`lines`)."""

    above: tuple[int, ...] = ()
    """Lines of which the highest is its peak."""
    retained: int = 0

    def at(self, sequences: int) -> Stretch:
        """The stretch for a number of sequences."""
        return Stretch(highest(self.above, sequences), at(self.retained, sequences))


def joined(stretches: Iterable[Stretch]) -> Stretch:
    """Return consecutive stretches as one."""
    above = retained = 0
    for stretch in stretches:
        above = max(above, retained + stretch.above)
        retained += stretch.retained
    return Stretch(above, retained)


@dataclass(frozen=True, slots=True)
class Profile:
    """One pass of a stage."""

    start: Stretch
    """Before the first layer that it reaches."""
    layers: tuple[Stretch, ...]
    """By position in the stage, for passes in either direction."""
    end: Stretch
    backwards: bool
    """Whether it reaches the last layer first."""

    def over(self, layers: Sequence[Stretch]) -> Stretch:
        """Return the pass, as one stretch, of a stage with these layers and the ends of this stage."""
        return joined((self.start, *(reversed(layers) if self.backwards else layers), self.end))


@dataclass(frozen=True, slots=True)
class LineProfile:
    """A profile for any number of sequences, in lines."""

    start: tuple[LineStretch, ...]
    """Consecutive stretches."""
    layers: tuple[LineStretch, ...]
    end: LineStretch
    backwards: bool

    def at(self, sequences: int) -> Profile:
        """The profile for a number of sequences."""
        start = joined(stretch.at(sequences) for stretch in self.start)
        layers = tuple(stretch.at(sequences) for stretch in self.layers)
        return Profile(start, layers, self.end.at(sequences), self.backwards)


def window(kinds: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """Return the shortest run of a stage's layers that represents every layer of the stage.

    kinds: kind of each layer; layers of the same kind need the same bytes.

    Returns the start and the length of the run, and for each layer of the stage the index in the run of a layer like
    it: the first for the first, the last for the last, and for others an inner one of the same kind.
    """
    count = len(kinds)
    if count < 4:
        return 0, count, tuple(range(count))
    inner = set(kinds[1:-1])
    for width in range(3, count):
        for start in range(count - width + 1):
            run = kinds[start : start + width]
            if run[0] == kinds[0] and run[-1] == kinds[-1] and inner <= set(run[1:-1]):
                index_of = {kind: index for index, kind in enumerate(run) if 0 < index < width - 1}
                return start, width, (0, *(index_of[kind] for kind in kinds[1:-1]), width - 1)
    return 0, count, tuple(range(count))
