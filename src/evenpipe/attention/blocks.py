"""Which keys a block of queries attends to: an entire range, for each query the keys up to its position, or some.

Causal attention consists of the first two kinds only, for any order of tokens, separate documents and padding. They
need no mask: torch's kernel for CPUs is as fast with them as with entire causal rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class KeyRange(NamedTuple):
    """A range of keys that a block of queries attends to."""

    keys: slice
    how: Literal["all", "diagonal", "some"]
    """Every query sees all keys; query i of the block sees keys 0 to i; or a mask is needed."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of queries, and all keys that they attend to."""

    sequences: slice
    """Rows of the microbatch."""
    queries: slice
    key_ranges: tuple[KeyRange, ...]


class _Run(NamedTuple):
    """Adjacent tokens of a document that are also adjacent in the row."""

    start: int
    stop: int
    position: int
    """Position of the first token in the row."""
    document: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + self.stop - self.start

    def between(self, start: int, end: int) -> slice:
        """Return the indices of the tokens with positions in [start, end)."""
        first, last = max(start, self.position), min(end, self.end)
        return slice(self.start + first - self.position, self.start + last - self.position)


def causal_blocks(queries: Tensor, keys: Tensor, documents: Tensor | None, valid: Tensor | None) -> list[Block]:
    """Return blocks of queries that attend to themselves and to the keys before them.

    Args:
        queries: [q], positions of the queries in the row; a subset of `keys`.
        keys: [k], positions of the keys.
        documents: [batch, row]: index of each token's document, if documents do not see each other.
        valid: [batch, row]: false for keys that no query sees.
    """
    per_row = documents if documents is not None else valid
    if per_row is None:
        return _blocks(slice(None), _runs(queries, None, None), _runs(keys, None, None))
    blocks: list[Block] = []
    for row in range(len(per_row)):
        row_documents = None if documents is None else documents[row]
        row_valid = None if valid is None else valid[row]
        blocks += _blocks(
            slice(row, row + 1), _runs(queries, row_documents, None), _runs(keys, row_documents, row_valid)
        )
    return blocks


def _runs(positions: Tensor, documents: Tensor | None, valid: Tensor | None) -> list[_Run]:
    """Return the runs of valid positions. documents, valid: for all positions of a row."""
    document_indices = torch.zeros_like(positions) if documents is None else documents[positions]
    visible = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid[positions]
    goes_on = (positions.diff() == 1) & (document_indices.diff() == 0) & (visible[1:] == visible[:-1])
    starts = [0, *(goes_on.logical_not().nonzero().flatten() + 1).tolist()]
    stops = [*starts[1:], len(positions)]
    values_at_starts = (values[starts].tolist() for values in (positions, document_indices, visible))
    return [
        _Run(start, stop, position, document)
        for start, stop, position, document, is_visible in zip(starts, stops, *values_at_starts, strict=True)
        if is_visible
    ]


def _blocks(sequences: slice, queries: Sequence[_Run], keys: Sequence[_Run]) -> list[Block]:
    """Return blocks that lie entirely inside or entirely outside of each run of keys."""
    blocks = []
    for run in queries:
        bounds = (bound for key in keys for bound in (key.position, key.end))
        cuts = {run.position, run.end, *(bound for bound in bounds if run.position < bound < run.end)}
        for start, end in pairwise(sorted(cuts)):
            key_ranges = tuple(_key_ranges(start, end, (key for key in keys if key.document == run.document)))
            blocks.append(Block(sequences, run.between(start, end), key_ranges))
    return blocks


def _key_ranges(start: int, end: int, keys: Iterable[_Run]) -> list[KeyRange]:
    """Return the keys that queries at positions [start, end) attend to."""
    result: list[KeyRange] = []
    for run in keys:
        if run.position < start:
            earlier = run.between(run.position, start)
            if result and result[-1].how == "all" and result[-1].keys.stop == earlier.start:
                earlier = slice(result.pop().keys.start, earlier.stop)
            result.append(KeyRange(earlier, "all"))
        if run.position <= start and end <= run.end:
            result.append(KeyRange(run.between(start, end), "diagonal"))
    return result
