"""Read numbers, lists and tables of a cost file, or refuse them with one sentence."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenpipe import words
from evenpipe.errors import InputError
from evenpipe.given import shown

SMALLEST, LARGEST = 1e-100, 1e100
"""Between these limits, sums, products and quotients of costs cannot overflow or underflow."""

Cost = float | tuple[float, ...]
"""One number for all stages (or devices), or one for each."""


def refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise InputError for a key that is not among `known`; the message names the nearest key, if one is near."""
    for key in values:
        if key not in known:
            same = {name.lower(): name for name in known}
            near = difflib.get_close_matches(str(key).lower(), same, n=1)
            meant = f", did you mean {same[near[0]]}?" if near else "."
            raise InputError(f"costs: {where}unknown key {shown(key)}{meant} Accepted: {', '.join(known)}")


def table(name: str, value: Any, known: Sequence[str]) -> Mapping[str, Any]:
    """`value` if it is a table whose keys are all in `known`."""
    if not isinstance(value, Mapping):
        raise InputError(f"costs: {name} must be a table of {', '.join(known)}, not {shown(value)}")
    refuse_unknown(value, known, f"{name}: ")
    return value


def number(name: str, value: Any, *, signed: bool = False) -> float:
    """`value` as a number, of at least 0 unless `signed`; values smaller than `SMALLEST` become 0."""
    try:
        result = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not (math.isfinite(result) and (signed or result >= 0)):
        least = "" if signed else " of at least 0"
        raise InputError(f"costs: {name} must be a finite number{least}, not {shown(value)}")
    if abs(result) > LARGEST:
        raise InputError(f"costs: {name} must be at most {LARGEST:g}, in any unit, not {shown(value)}")
    return result if abs(result) >= SMALLEST else 0.0


def cost(name: str, value: Any, *, signed: bool = False) -> Cost:
    """`value` as one number, or as a tuple of numbers."""
    if not isinstance(value, (list, tuple)):
        return number(name, value, signed=signed)
    if not value:
        raise InputError(f"costs: {name} is an empty list; give one number, or one per stage or device")
    return tuple(number(f"{name}[{index}]", entry, signed=signed) for index, entry in enumerate(value))


def spread(name: str, value: Cost | None, count: int, what: str) -> tuple[float, ...] | None:
    """One number for each of `count` stages or devices (`what` names them), or None if no cost is given."""
    if value is None:
        return None
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        has = f"{words.count(len(value), 'number')} for {words.count(count, what)}"
        raise InputError(f"costs: {name} has {has}; give one number{f', or {count}' if count > 1 else ''}")
    return value


def multiplied(name: str, value: Cost, factor: Cost) -> Cost:
    """A cost times the factor `name` of a slice, both one number or one per stage (or device)."""
    if isinstance(value, tuple) and isinstance(factor, tuple):
        if len(value) != len(factor):
            has = words.count(len(factor), "factor")
            raise InputError(f"costs: slices.{name} has {has} for {words.count(len(value), 'stage')}")
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


def factors(name: str, value: Any, known: Sequence[str], lists: Sequence[str]) -> dict[str, tuple[Cost, ...]]:
    """A table of factors for slices, one per slice each; those in `lists` may be one per stage."""
    found: dict[str, tuple[Cost, ...]] = {}
    for key, given in table(name, value, known).items():
        if not isinstance(given, (list, tuple)) or not given:
            raise InputError(f"costs: {name}.{key} must be a list of one factor per slice, not {shown(given)}")
        read = cost if key in lists else number
        found[key] = tuple(read(f"{name}.{key}[{index}]", one) for index, one in enumerate(given))
    if len({len(row) for row in found.values()}) > 1:
        sizes = ", ".join(f"{len(row)} in {key}" for key, row in found.items())
        raise InputError(f"costs: {name} must have as many factors in each list, one per slice, not {sizes}")
    return found
