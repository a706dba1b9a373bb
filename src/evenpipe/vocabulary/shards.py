"""Which rows of a [vocabulary, hidden_size] matrix belong to which device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows `start` (inclusive) to `stop` (exclusive) of a vocabulary matrix.

    `vocabulary` is the number of rows that belong to a token. Rows of the shard from there on only pad the matrix: they
    hold parameters, but never enter a softmax and never receive a gradient.
    """

    start: int
    stop: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise ValueError(f"vocabulary is {self.vocabulary}; it must be at least 1")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"A shard needs 0 <= start <= stop, not {self.start} and {self.stop}.")

    @property
    def rows(self) -> int:
        """Number of rows in the shard, including padding."""
        return self.stop - self.start

    @property
    def tokens(self) -> int:
        """Number of rows in the shard that belong to a token."""
        return max(0, min(self.stop, self.vocabulary) - self.start)


def outside(ids: Tensor, vocabulary: int) -> int | None:
    """Return the least or the largest id if it belongs to no token; None if all ids do."""
    if not ids.numel():
        return None
    low, high = (int(value) for value in torch.aminmax(ids))
    return low if low < 0 else high if high >= vocabulary else None


def split(vocabulary: int, parts: int, *, padded_rows: int | None = None) -> list[Shard]:
    """Cut a vocabulary matrix into `parts` contiguous shards by `torch.chunk`'s rule (which DTensor's Shard(0) shares).

    Each shard has c = ceil(rows / parts) rows, the last ones fewer or 0: 9 rows in 4 parts are 3, 3, 3, 0.
    `padded_rows` is the number of rows of the matrix if that is more than `vocabulary`. Raises ValueError when parts <
    1, vocabulary < 1, or padded_rows < vocabulary.
    """
    rows = vocabulary if padded_rows is None else padded_rows
    if parts < 1:
        raise ValueError(f"parts is {parts}; it must be at least 1")
    if rows < vocabulary:
        raise ValueError(f"padded_rows is {padded_rows}; it must be at least {vocabulary}, the vocabulary")
    size = -(-rows // parts)
    return [Shard(min(rows, size * number), min(rows, size * (number + 1)), vocabulary) for number in range(parts)]
