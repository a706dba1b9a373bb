"""Pieces of sequences: one context rank's part of a slice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from evenpipe.attention.places import places_of_ranks


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a slice that the first of `ranks` processes holds. Every row is one document."""

    ends: tuple[int, ...]
    """Tokens of a sequence up to the end of each slice; the last entry is the length of the sequence."""
    index: int = 0
    """Number of the slice."""
    ranks: int = 1
    """Number of context ranks that share the slice."""
    exchange: Literal["keys", "heads"] = "keys"
    kernels_of: Literal["cpu", "cuda", "none"] = "cpu"
    """Device type whose kernels compute attention; "none": the layer's own attention, which the backward reruns."""

    @property
    def start(self) -> int:
        return 0 if self.is_first else self.ends[self.index - 1]

    @property
    def end(self) -> int:
        """Number of tokens that its attention may attend to."""
        return self.ends[self.index]

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.ends[-1]

    @property
    def slice_tokens(self) -> int:
        """Tokens of the slice on all processes."""
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Tokens of the slice on this process."""
        return self.slice_tokens // self.ranks

    @property
    def queries(self) -> int:
        """Query tokens of a row: those of all processes, if each process computes some of the heads."""
        return self.slice_tokens if self.trades_heads else self.tokens

    @property
    def known_positions(self) -> int:
        """Number of positions that a process keeps: of its tokens, of queries if these are other tokens, and of keys;
        and the row and token of each token that GPU kernels take in another order."""
        ordered = 2 * (self.queries + self.end) if self.kernels_of == "cuda" and self.ranks > 1 else 0
        return self.tokens + (self.queries if self.trades_heads else 0) + self.end + ordered

    @property
    def gathers(self) -> bool:
        """Whether attention gathers keys and values."""
        return self.ranks > 1 and self.exchange == "keys"

    @property
    def trades_heads(self) -> bool:
        """Whether attention exchanges heads for tokens."""
        return self.ranks > 1 and self.exchange == "heads"

    @property
    def carried(self) -> bool:
        """Whether keys and values of earlier slices are kept for later ones."""
        return len(self.ends) > 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.ends) - 1

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the queries, and of the keys, in their order."""
        starts = (0, *self.ends)
        by_slice = [
            places_of_ranks(starts[index], starts[index + 1], self.ranks, None) for index in range(self.index + 1)
        ]
        queries = by_slice[-1] if self.exchange == "heads" else by_slice[-1][:1]
        return torch.cat(queries), torch.cat([positions for ranks in by_slice for positions in ranks])
