"""Costs of single slices of a sequence, and the combined `Costs` with their mean times and factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from typing import Any

from .cost_values import Cost
from .costs import LAYERS, Costs


def each_slice(costs: Costs) -> tuple[Costs, ...]:
    """The costs of each slice that `costs` have factors for; a single slice if there are no factors."""
    return costs.by_slice(len(next(iter(costs.slices.values()), (1,))))


def of_slices(each: Sequence[Costs], tokens: Sequence[float] = ()) -> Costs:
    """Costs whose slices have the times of `each` for layers, and for everything else the mean scaled by `tokens`.

    tokens: number of tokens of each slice, in any unit; equal by default.

    All of `each` have times for the same kinds of pass, as numbers or lists of equal length.
    """
    count, first = len(each), each[0]
    if count == 1:
        return first
    tokens = tuple(tokens) or (1.0,) * count
    factors: dict[str, tuple[Cost, ...]] = {
        "tokens": tuple(slice_tokens * count / fsum(tokens) for slice_tokens in tokens)
    }
    changed: dict[str, Any] = {}
    for name in LAYERS:
        times = [time for slice_costs in each if (time := getattr(slice_costs, name)) is not None]
        if times:
            changed[name] = mean = _mean(times)
            factors[name] = tuple(_relative(time, mean) for time in times)
    for name in _OTHERS:
        values = [getattr(slice_costs, name) for slice_costs in each]
        if isinstance(values[0], dict):
            changed[name] = {key: _mean([value[key] for value in values]) for key in values[0]}
        elif values[0] is not None:
            changed[name] = _mean(values)
    links = {
        name: link
        if link.bytes is None
        else replace(link, bytes=fsum(slice_costs.links[name].bytes or 0 for slice_costs in each) / count)
        for name, link in first.links.items()
    }
    return replace(first, **changed, links=links, slices=factors)


_OTHERS = ("O", "L", "bytes", "S", "C", "T", "E", "G", "p2p", "collectives", "tensor_exchange", "memory")


def _mean(values: Sequence[Cost]) -> Cost:
    """The mean of numbers, or the elementwise mean of lists."""
    if isinstance(values[0], tuple):
        return tuple(fsum(row) / len(values) for row in zip(*values, strict=True))  # type: ignore[arg-type]
    return fsum(values) / len(values)  # type: ignore[arg-type]


def _relative(value: Cost, mean: Cost) -> Cost:
    """The factors on `mean` that give `value`, as one number if they are equal; 1 where the mean is 0."""
    if not isinstance(value, tuple) or not isinstance(mean, tuple):
        assert isinstance(value, float) and isinstance(mean, float)
        return value / mean if mean else 1.0
    factors = tuple(
        number / mean_number if mean_number else 1.0 for number, mean_number in zip(value, mean, strict=True)
    )
    return factors[0] if len(set(factors)) == 1 else factors
