"""Schedules by name, for the command line and the config."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import is_whole
from evenpipe.words import count, nearest, refused, unknown

from .check import check_order
from .check_limit import limits_per_device
from .costs import Costs
from .files import read_order
from .generators import SCHEDULES
from .order import Order

LARGEST = 20_000_000
"""Most forwards of an order; such an order and its program take some 10 GB."""


def generate(name: str, devices: int, microbatches: int, *, costs: Costs | None = None, **options: Any) -> Order:
    """The order of a schedule, given its name in `SCHEDULES` or a CSV file, whose name ends in .csv.

    `costs` are passed to generators that use them. An option that is None keeps its default. `stages_per_device` is
    also accepted for a schedule with a fixed number of stages per device, if it equals that number. Raises InputError
    for an unknown name or option, if the schedule needs other numbers of devices, microbatches or stages, and if the
    file has a different size or is not sound.
    """
    for field, value in (("devices", devices), ("microbatches", microbatches)):
        check_count(field, value)
    options = {option: value for option, value in options.items() if value is not None}
    for option in ("stages_per_device", "group_size"):
        if option in options:
            check_count(option, options[option])
    if "max_in_flight" in options:
        limits_per_device(options["max_in_flight"], devices)
    forwards = devices * microbatches * options.get("stages_per_device", 1)
    if forwards > LARGEST:
        raise InputError(f"an order of {forwards} forwards does not fit into memory; take at most {LARGEST}")
    from_file = name.endswith(".csv")
    known = () if from_file else options_of(name)
    stages_per_device = None if "stages_per_device" in known else options.pop("stages_per_device", None)
    for option in options:
        if option not in known:
            accepted = ", ".join(known) if known else "none"
            raise InputError(
                f"schedule '{name}' has no option '{option}'; its options: {accepted}{nearest(option, known)}"
            )
    if from_file:
        order = _from_file(name, devices, microbatches)
    else:
        generator = SCHEDULES[name]
        if costs is not None and takes_costs(name):
            options["costs"] = costs
        order = generator(devices, microbatches, **options)
    if stages_per_device is not None and order.placement.stages != stages_per_device * devices:
        actual = f"{count(order.placement.stages, 'stage')} on {count(devices, 'device')}"
        if order.placement.stages % devices == 0:
            actual = f"{count(order.placement.stages // devices, 'stage')} per device"
        raise InputError(f"schedule '{name}' has {actual}, not {stages_per_device}")
    return order


def options_of(name: str) -> tuple[str, ...]:
    """The keyword options of a schedule, besides costs. Raises InputError for an unknown name."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return tuple(name for name in inspect.signature(SCHEDULES[name]).parameters if name not in _ALWAYS)


def takes_costs(name: str) -> bool:
    """Whether a schedule plans by costs."""
    return "costs" in inspect.signature(SCHEDULES[name]).parameters


def describe(name: str) -> str:
    """A schedule in one line: the first sentence of its generator's docstring."""
    text = inspect.getdoc(SCHEDULES[name]) or ""
    return " ".join(text.split("\n\n")[0].split())


def _from_file(name: str, devices: int, microbatches: int) -> Order:
    order = read_order(Path(name))
    if (order.devices, order.microbatches) != (devices, microbatches):
        raise InputError(
            f"schedule '{name}' is for {count(order.devices, 'device')} and {count(order.microbatches, 'microbatch')}, "
            f"not {devices} and {microbatches}"
        )
    if order.forward_only:
        raise InputError(f"schedule '{name}' only evaluates; a schedule must train, and its evaluation follows from it")
    try:
        check_order(order).raise_if_faulty()
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return order


def check_count(field: str, value: Any) -> None:
    """Raise InputError unless the value is a whole number of at least 1."""
    if not is_whole(value) or value < 1:
        raise refused(field, value, "a whole number of at least 1")


_ALWAYS = ("devices", "microbatches", "costs")
