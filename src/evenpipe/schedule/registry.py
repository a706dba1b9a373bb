"""Schedules by name, for the command line and the config."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from evenpipe.errors import InputError

from .costs import Costs
from .generators import gpipe, one_f_one_b
from .order import Order

SCHEDULES: dict[str, Callable[..., Order]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""Generators by name. Each takes devices and microbatches, and by keyword what its own docstring says."""


def generate(name: str, devices: int, microbatches: int, *, costs: Costs | None = None, **options: Any) -> Order:
    """The order of a schedule by its name in `SCHEDULES`.

    `costs` go to generators that plan by them. Raises InputError for an unknown name or option, and where the schedule
    needs other numbers of devices or microbatches.
    """
    if name not in SCHEDULES:
        raise InputError(f"schedule '{name}' is unknown{nearest(name, SCHEDULES)}")
    for field, value in (("devices", devices), ("microbatches", microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{field} must be a whole number of at least 1, not {value!r}")
    generator = SCHEDULES[name]
    known = [parameter for parameter in inspect.signature(generator).parameters if parameter not in _ALWAYS]
    for option in options:
        if option not in known:
            accepted = ", ".join(known) if known else "none"
            raise InputError(f"schedule '{name}' has no option '{option}'; its options: {accepted}")
    if costs is not None and "costs" in inspect.signature(generator).parameters:
        options["costs"] = costs
    return generator(devices, microbatches, **options)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0)
    return f", did you mean '{near[0]}'? Accepted: {', '.join(names)}"


_ALWAYS = ("devices", "microbatches", "costs")
