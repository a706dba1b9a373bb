"""Numbers of a cost file: one for all stages or devices, or one for each."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator

from evenpipe import words
from evenpipe.declaration import Accepts, Some
from evenpipe.errors import InputError

SMALLEST, LARGEST = 1e-100, 1e100
"""Between these limits, sums, products and quotients of costs cannot overflow or underflow."""


def _flushed(value: float) -> float:
    return value if abs(value) >= SMALLEST else 0.0


Time = Annotated[float, Ge(0), Lt(LARGEST), AfterValidator(_flushed), Accepts("number of at least 0")]
Rate = Annotated[float, Gt(0), Lt(LARGEST), AfterValidator(_flushed), Accepts("number above 0")]
Factor = Annotated[float, Ge(1), Lt(LARGEST), Accepts("number of at least 1")]
Signed = Annotated[float, Gt(-LARGEST), Lt(LARGEST), AfterValidator(_flushed), Accepts("finite number")]

Cost = Time | Some[Time]
"""One number for all stages (or devices), or one for each."""
SignedCost = Signed | Some[Signed]


def spread(name: str, value: Cost | None, count: int, what: str) -> tuple[float, ...] | None:
    """One number for each of `count` stages or devices (`what` names them), or None if no cost is given."""
    if value is None:
        return None
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        has = f"{words.count(len(value), 'number')} for {words.count(count, what)}"
        raise InputError(f"costs.{name} has {has}; give one number{f', or {count}' if count > 1 else ''}")
    return value


def multiplied(name: str, value: Cost, factor: Cost) -> Cost:
    """A cost times the factor `name` of a slice, both one number or one per stage (or device)."""
    if isinstance(value, tuple) and isinstance(factor, tuple):
        if len(value) != len(factor):
            has = words.count(len(factor), "factor")
            raise InputError(f"costs.slices.{name} has {has} for {words.count(len(value), 'stage')}")
        return tuple(one * other for one, other in zip(value, factor, strict=True))
    if isinstance(factor, tuple):
        value, factor = factor, value
    assert isinstance(factor, float)
    return tuple(one * factor for one in value) if isinstance(value, tuple) else value * factor


def added(*values: Cost | None) -> Cost | None:
    """The sum of costs, as one number if all are one; None if one of them is not given."""
    numbers = [value for value in values if value is not None]
    longest = max((len(value) for value in numbers if isinstance(value, tuple)), default=0)
    if len(numbers) < len(values):
        return None
    if not longest:
        return sum(value for value in numbers if isinstance(value, float))
    rows = [value if isinstance(value, tuple) else (value,) * longest for value in numbers]
    return tuple(map(sum, zip(*rows, strict=True)))
