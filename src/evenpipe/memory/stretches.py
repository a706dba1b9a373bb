"""A pass as a row of stretches, one per layer, and the same pass over more layers of the same kinds.

What lives while a stage runs is a sum: what the layers before have left, and what the one under way needs on top. So a
stage of forty layers follows from one of three: each of its layers is like the first, the last, or one between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a pass. Bytes, relative to what lives at its beginning."""

    above: int = 0
    """The most that lives at one moment."""
    kept: int = 0
    """What lives at its end; negative where it gives back more than it makes."""


def joined(stretches: Iterable[Stretch]) -> Stretch:
    """One after the other."""
    above = kept = 0
    for stretch in stretches:
        above = max(above, kept + stretch.above)
        kept += stretch.kept
    return Stretch(above, kept)


@dataclass(frozen=True, slots=True)
class Profile:
    """One pass of a stage."""

    start: Stretch
    """Before the first of the layers that it comes to."""
    layers: tuple[Stretch, ...]
    """By their place in the stage, in whatever direction the pass goes."""
    end: Stretch
    backwards: bool
    """It comes to the last layer first."""

    def over(self, places: Sequence[int]) -> Stretch:
        """Of a stage whose i-th layer is like the one at `places[i]`."""
        order = reversed(places) if self.backwards else places
        return joined((self.start, *(self.layers[place] for place in order), self.end))


def window(kinds: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """The shortest run of a stage's layers that has one for each place of the stage.

    kinds: of each layer; layers of one kind need the same bytes.

    Returns where the run starts and how long it is, and for each layer of the stage the place in the run of one that is
    like it: the first is like the first, the last like the last, and one between them like one of its kind there.
    """
    count = len(kinds)
    if count < 4:
        return 0, count, tuple(range(count))
    inner = set(kinds[1:-1])
    for width in range(3, count):
        for start in range(count - width + 1):
            run = kinds[start : start + width]
            if run[0] == kinds[0] and run[-1] == kinds[-1] and inner <= set(run[1:-1]):
                between = {kind: place for place, kind in enumerate(run) if 0 < place < width - 1}
                return start, width, (0, *(between[kind] for kind in kinds[1:-1]), width - 1)
    return 0, count, tuple(range(count))
