"""Numbers of a cost file: one for all stages or devices, or one for each."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt
from pydantic import BeforeValidator

from evenpipe import words
from evenpipe.declaration import LARGEST, Accepts, NonEmptyList
from evenpipe.errors import InputError

SMALLEST = 1e-100
"""Between this and `LARGEST`, sums, products and quotients of costs cannot overflow or underflow."""


def _number(value: Any) -> Any:
    """Numbers of other libraries as floats, and those below `SMALLEST` as 0. What is no number stays, to be refused."""
    if type(value) not in (float, int):
        if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
            return value
        value = float(value)
    return 0.0 if abs(value) < SMALLEST else value


_NUMBER = Lt(LARGEST), BeforeValidator(_number)
Time = Annotated[float, Ge(0), *_NUMBER, Accepts("number of at least 0")]
Rate = Annotated[float, Gt(0), *_NUMBER, Accepts("number above 0")]
Factor = Annotated[float, Ge(1), *_NUMBER, Accepts("number of at least 1")]
Signed = Annotated[float, Gt(-LARGEST), *_NUMBER, Accepts("finite number")]

Cost = Time | NonEmptyList[Time]
"""One number for all stages (or devices), or one for each."""
SignedCost = Signed | NonEmptyList[Signed]


def spread(name: str, value: Cost | None, count: int, owner: str) -> tuple[float, ...] | None:
    """One number for each of `count` stages or devices (`owner` names them), or None if no cost is given."""
    if value is None:
        return None
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        mismatch = f"{words.count(len(value), 'number')} for {words.count(count, owner)}"
        raise InputError(f"costs.{name} has {mismatch}; give one number{f', or {count}' if count > 1 else ''}")
    return value


def multiplied(name: str, value: Cost, factor: Cost) -> Cost:
    """A cost times the factor `name` of a slice. Each is one number, or one per stage (or device)."""
    if isinstance(value, tuple) and isinstance(factor, tuple):
        if len(value) != len(factor):
            factors = words.count(len(factor), "factor")
            raise InputError(f"costs.slices.{name} has {factors} for {words.count(len(value), 'stage')}")
        return tuple(element * element_factor for element, element_factor in zip(value, factor, strict=True))
    if isinstance(factor, tuple):
        value, factor = factor, value
    assert isinstance(factor, float)
    return tuple(element * factor for element in value) if isinstance(value, tuple) else value * factor


def added(*values: Cost | None) -> Cost | None:
    """The sum of costs, as one number if each is one number; None if any is missing."""
    numbers = [value for value in values if value is not None]
    longest = max((len(value) for value in numbers if isinstance(value, tuple)), default=0)
    if len(numbers) < len(values):
        return None
    if not longest:
        return sum(value for value in numbers if isinstance(value, float))
    rows = [value if isinstance(value, tuple) else (value,) * longest for value in numbers]
    return tuple(map(sum, zip(*rows, strict=True)))
