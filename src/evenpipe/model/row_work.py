"""How the work of layers grows along a row, and where a row is cut into slices of equal work.

In matrices every token costs the same; in attention a later token costs more, since it attends to all previous tokens,
or to those in a window. With slices of equal length, devices with short passes would wait for those with long passes.
Balancing the time of the layers alone works better than balancing layers and output layer together.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from evenpipe.model.description import Description
from evenpipe.model.flops import attention_of, matrix_flops

_TILE = 128
"""Tokens that products and kernels process at a time; long slices are a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """The cost of the forward of all layers on a row, in any unit of work or time."""

    per_token: float
    """Work of a token, without attention."""
    per_key: tuple[tuple[int | None, float], ...]
    """(window, work per token and key); window None: all previous tokens. A token is one of its own keys."""

    @classmethod
    def of(cls, description: Description) -> RowWork:
        """Return the FLOPs of a model's layers."""
        per_key: dict[int | None, float] = {}
        for index in range(description.layers):
            attention = attention_of(description, index)
            per_key[attention.window] = per_key.get(attention.window, 0.0) + attention.flops(1.0)
        matrices = sum(matrix_flops(description, index) for index in range(description.layers))
        return cls(per_token=matrices, per_key=tuple(per_key.items()))

    def attention(self, tokens: int) -> float:
        """Return the work of attention on the first `tokens` tokens of a row."""
        return sum(work * _pairs(tokens, window) for window, work in self.per_key)

    def on(self, tokens: int) -> float:
        """Return all work on the first `tokens` tokens of a row."""
        return self.per_token * tokens + self.attention(tokens)

    def share(self, length: int) -> float:
        """Return the share of attention in the work on a row of `length` tokens."""
        total = self.on(length)
        return self.attention(length) / total if total else 0.0

    def with_share(self, share: float, length: int) -> RowWork:
        """Return a copy with another share of attention on rows of `length` tokens; unchanged without attention."""
        attention = self.attention(length)
        if not attention:
            return self
        share = min(max(share, 0.0), 1.0)
        total = self.on(length)
        scale = share * total / attention
        per_key = tuple((window, work * scale) for window, work in self.per_key)
        return replace(self, per_token=(1 - share) * total / length, per_key=per_key)

    def as_measured(self, layers: Sequence[float], tokens: Sequence[float], length: int) -> RowWork:
        """Return a copy with the share of attention that best fits measured times.

        layers: forward times of the slices of a row of `length` tokens, relative to each other. tokens: their relative
        lengths.
        """
        ends = [0]
        for stop in range(1, len(tokens)):
            ends.append(round(sum(tokens[:stop]) / sum(tokens) * length))
        slice_work = [self.attention(end) - self.attention(start) for start, end in pairwise((*ends, length))]
        total = sum(slice_work)
        if not total or len(layers) < 2:
            return self
        # layers = (1 - share) tokens + share attention, each divided by its sum
        times = [time / sum(layers) for time in layers]
        lengths = [count / sum(tokens) for count in tokens]
        excess_attention = [work / total - count for work, count in zip(slice_work, lengths, strict=True)]
        excess_time = [time - count for time, count in zip(times, lengths, strict=True)]
        scatter = sum(work * work for work in excess_attention)
        if not scatter:
            return self
        return self.with_share(sum(a * b for a, b in zip(excess_attention, excess_time, strict=True)) / scatter, length)


def _pairs(tokens: int, window: int | None) -> float:
    """Return the number of (token, key) pairs of the first `tokens` tokens of a row."""
    near = tokens if window is None else min(tokens, window)
    return near * (near + 1) / 2 + (tokens - near) * near


def slice_ends(work: RowWork, length: int, slices: int, multiple: int) -> tuple[int, ...]:
    """Return the number of tokens up to the end of each slice of a sequence, so that the layers' work on all slices is
    about equal: later tokens attend to more keys, so later slices are shorter. The last slice takes the remainder.

    Args:
        multiple: the length of every slice is a multiple of this; a divisor of `length`. Long slices are also multiples
            of 128.
    """
    if slices == 1:
        return (length,)
    assert length % multiple == 0 and length >= slices * multiple
    if length % _TILE == 0 and length >= 4 * slices * _TILE:
        multiple = math.lcm(multiple, _TILE)
    total, ends = work.on(length), [0]
    for number in range(1, slices):
        tokens = bisect_left(range(1, length + 1), total * number / slices, key=work.on) + 1
        nearest = round(tokens / multiple) * multiple
        ends.append(min(max(nearest, ends[-1] + multiple), length - (slices - number) * multiple))
    return (*ends[1:], length)
