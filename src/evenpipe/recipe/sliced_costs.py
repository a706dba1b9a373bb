"""Costs of slices, from costs of whole sequences and the growth of the work of layers along a row.

F, R    matrices by tokens, attention by the keys that these tokens attend to
I       the same, with twice the attention: gradients of queries and keys, and of values and probabilities
W       matrices only: by tokens
B       I and W
others  by tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from evenpipe.model import RowWork
from evenpipe.schedule import Costs
from evenpipe.schedule.cost_values import Cost, multiplied
from evenpipe.schedule.slice_costs import each_slice, of_slices


class Extra(NamedTuple):
    """Fixed work of a pass of a slice, independent of its length, as the number of tokens whose products take as
    long."""

    forward: float = 0.0
    """F, R and I: reading matrices, and starting kernels."""
    weights: float = 0.0
    """W: adding the products to gradients."""


NOTHING = Extra()


def sliced_costs(costs: Costs, rows: RowWork, ends: Sequence[int], extra: Extra = NOTHING) -> Costs:
    """The costs of the slices of a sequence.

    Args:
        costs: of whole sequences, or mean costs of slices with factors; the factors are not used.
        ends: tokens up to the end of each slice.
        extra: in tokens of the sequence.
    """
    costs = whole_costs(costs)
    length, share, attention = ends[-1], rows.share(ends[-1]), rows.attention(ends[-1])
    each = []
    for start, end in pairwise((0, *ends)):
        tokens = (end - start) / length
        seen = (rows.attention(end) - rows.attention(start)) / attention if attention else tokens

        def time(of_attention: float, extra_tokens: float, tokens: float = tokens, seen: float = seen) -> float:
            return (1 - of_attention) * (tokens + extra_tokens / length) + of_attention * seen

        forward, weights = time(share, extra.forward), time(0.0, extra.weights)
        factors = {
            "F": forward,
            "R": forward,
            "I": time(2 * share / (1 + share), extra.forward),
            "W": weights,
            "B": time(share, (extra.forward + extra.weights) / 2),
            "tokens": tokens,
        }
        if costs.B is None:
            del factors["B"]
        if costs.R is None:
            del factors["R"]
        slice_costs = replace(costs, slices={name: (factor,) for name, factor in factors.items()}).by_slice(1)[0]
        heads: dict[str, Any] = {
            name: multiplied(name, value, time(0.0, extra_tokens) / tokens)
            for name, extra_tokens in (("S", extra.forward), ("T", extra.weights))
            if (value := getattr(slice_costs, name)) is not None
        }
        each.append(replace(slice_costs, **heads))
    lengths = [float(end - start) for start, end in pairwise((0, *ends))]
    return of_slices(each, lengths)


def whole_costs(costs: Costs) -> Costs:
    """The costs of whole sequences; unchanged without factors for slices."""
    if not costs.slices:
        return costs
    count = float(len(each_slice(costs)))
    return replace(costs, slices={"layers": (count,), "tokens": (count,)}).by_slice(1)[0]


def rows_as_measured(rows: RowWork, costs: Costs | None, length: int) -> RowWork:
    """How work grows along rows according to costs that were measured on slices; unchanged for other costs.

    length: of the measured sequences, in tokens.
    """
    factors: dict[str, Any] = {} if costs is None else dict(costs.slices)
    layers, tokens = factors.get("F", factors.get("layers", ())), factors.get("tokens", ())
    if not layers or not tokens or not sum(tokens):
        return rows
    return rows.as_measured([_mean(factor) for factor in layers], tokens, length)


def _mean(factor: Cost) -> float:
    return sum(factor) / len(factor) if isinstance(factor, tuple) else factor
