"""Which keys a block of queries looks at: all of a range, each those up to its own place, or some.

Attention under a causal mask is made of the first two, for any order of tokens, documents that are kept apart and
padding. They need no mask: torch's kernel for CPUs is as fast with them as with whole causal rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Look(NamedTuple):
    """A range of keys that a block of queries looks at."""

    keys: slice
    how: Literal["all", "diagonal", "some"]
    """Every query sees all of them; each sees as many as its number in the block, and itself; or it takes a mask."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries, and all that they look at."""

    sequences: slice
    """Rows of the microbatch."""
    queries: slice
    looks: tuple[Look, ...]


class _Run(NamedTuple):
    """Neighbours that follow each other in the row too, of one document."""

    start: int
    stop: int
    place: int
    """Of the first one, in the row."""
    document: int

    @property
    def end(self) -> int:
        """Place behind the last one."""
        return self.place + self.stop - self.start

    def between(self, place: int, end: int) -> slice:
        """Return the indices of those whose places are in [place, end)."""
        first, last = max(place, self.place), min(end, self.end)
        return slice(self.start + first - self.place, self.start + last - self.place)


def causal_blocks(queries: Tensor, keys: Tensor, documents: Tensor | None, valid: Tensor | None) -> list[Block]:
    """Return blocks of queries that look at themselves and at the keys before them.

    Args:
        queries: [q], their places in the row. They are among the keys.
        keys: [k], likewise.
        documents: [batch, row]: number of each token's document, if they do not see each other.
        valid: [batch, row]: false for keys that nobody sees.
    """
    given = documents if documents is not None else valid
    if given is None:
        return _blocks(slice(None), _runs(queries, None, None), _runs(keys, None, None))
    found: list[Block] = []
    for row in range(len(given)):
        apart = None if documents is None else documents[row]
        seen = None if valid is None else valid[row]
        found += _blocks(slice(row, row + 1), _runs(queries, apart, None), _runs(keys, apart, seen))
    return found


def _runs(places: Tensor, documents: Tensor | None, valid: Tensor | None) -> list[_Run]:
    """Return the runs of valid places. documents, valid: of all places of one row."""
    numbers = torch.zeros_like(places) if documents is None else documents[places]
    kept = torch.ones_like(places, dtype=torch.bool) if valid is None else valid[places]
    goes_on = (places.diff() == 1) & (numbers.diff() == 0) & (kept[1:] == kept[:-1])
    starts = [0, *(goes_on.logical_not().nonzero().flatten() + 1).tolist()]
    stops = [*starts[1:], len(places)]
    of_starts = (one[starts].tolist() for one in (places, numbers, kept))
    return [
        _Run(start, stop, place, document)
        for start, stop, place, document, is_kept in zip(starts, stops, *of_starts, strict=True)
        if is_kept
    ]


def _blocks(sequences: slice, queries: Sequence[_Run], keys: Sequence[_Run]) -> list[Block]:
    """Return blocks that lie inside of runs of keys, or outside of all."""
    found = []
    for run in queries:
        bounds = (place for key in keys for place in (key.place, key.end))
        cuts = {run.place, run.end, *(place for place in bounds if run.place < place < run.end)}
        for start, end in pairwise(sorted(cuts)):
            looks = tuple(_looks(start, end, (key for key in keys if key.document == run.document)))
            found.append(Block(sequences, run.between(start, end), looks))
    return found


def _looks(start: int, end: int, keys: Iterable[_Run]) -> list[Look]:
    """Return what queries of the places [start, end) look at."""
    found: list[Look] = []
    for run in keys:
        if run.place < start:
            before = run.between(run.place, start)
            if found and found[-1].how == "all" and found[-1].keys.stop == before.start:
                before = slice(found.pop().keys.start, before.stop)
            found.append(Look(before, "all"))
        if run.place <= start and end <= run.end:
            found.append(Look(run.between(start, end), "diagonal"))
    return found
