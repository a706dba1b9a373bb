"""Exchanges of a tensor rank, and of a member of an expert group, without the others: for tensors without
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evenpipe.experts.overlap import ExpertOptions
from evenpipe.experts.overlap import Overlap as ExpertOverlap
from evenpipe.model.expert_rows import ExpertRows
from evenpipe.tensor.exchange import Overlap
from evenpipe.work import Done


class FirstRank:
    """An `Exchange` of `tensor.exchange` that allocates what `parallel.tensor_ranks` allocates, but transfers nothing:
    results have no meaning."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.repeats = False
        self.overlap: Overlap | None = None
        self.arrived: Tensor | None = None

    def gather(self, rows: Tensor) -> Tensor:
        return self.start_gather(rows).wait()

    def start_gather(self, rows: Tensor) -> Done:
        return Done(self.table(rows).flatten(0, 1), [rows])

    def scatter(self, partial: Tensor) -> Tensor:
        return self.start_scatter(partial).wait()

    def start_scatter(self, partial: Tensor) -> Done:
        parts = partial.view(self.size, -1, *partial.shape[1:]).clone()
        return Done(torch.empty_like(parts[0]), [parts])

    def sum(self, partial: Tensor) -> Tensor:
        return partial.clone(memory_format=torch.contiguous_format)

    def table(self, rows: Tensor) -> Tensor:
        return rows.new_empty((self.size, *rows.shape))


class Sharing(NamedTuple):
    """How a group shares the experts of every layer."""

    members: int = 1
    skew: float = 1.0
    """Load of the fullest member relative to the mean."""
    options: ExpertOptions = ExpertOptions()
    """How computation overlaps the exchange."""


ALONE = Sharing()
"""A process has all experts."""


class FirstMember:
    """A `GroupExchange` of `experts.adopt` that allocates what `parallel.expert_ranks` allocates, but transfers
    nothing. Even routing determines the number of rows of each member; the first member gets the most."""

    rank = 0

    def __init__(self, rows: Mapping[str, ExpertRows], overlap: ExpertOverlap, times: int = 1) -> None:
        """
        Args:
            rows: the rows of each layer's experts, by their name in the model.
            overlap: how computation overlaps the exchange.
            times: factor by which numbers of rows are multiplied.
        """
        self._rows, self.overlap, self._times = rows, overlap, times
        self.size = next(iter(rows.values())).members
        self.layer = ""

    def counts(self, row_counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        row_counts.new_empty((2, *row_counts.shape))
        rows = self._rows[self.layer]
        told = [[sent, sent] for sent in rows.sent]  # nothing here depends on the number of pairs on other members
        pairs = _even(rows.pairs, self.size)
        known = [[0, 0], *zip(_even(rows.rows - rows.own, self.size - 1), pairs[1:], strict=True)]
        told[0] = known[0] = [rows.own, pairs[0]]
        return [[self._times * size for size in counts] for counts in told], [
            [self._times * size for size in counts] for counts in known
        ]

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str) -> Done:
        return Done(held=[output, rows])


def _even(total: int, count: int) -> list[int]:
    """Return whole numbers that add up to the total and differ by 1 at most."""
    return [total * (index + 1) // count - total * index // count for index in range(count)]
