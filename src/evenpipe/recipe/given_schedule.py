"""Read the user's schedule: a name, an order, a program, a function, or a schedule of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.interop import from_torch_schedule, is_torch_schedule
from evenpipe.schedule import Order, Program, Schedule
from evenpipe.schedule.files import read_schedule as read_file

MICROBATCHES_PER_DEVICE = 4
"""Default number of microbatches per step and device, unless the schedule fixes it."""


def read_schedule(
    schedule: Path | Schedule | Any, devices: int, microbatches: int | None, options: Mapping[str, Any] | None = None
) -> tuple[Schedule, int, dict[str, Any]]:
    """The schedule as a name, order, program or function, the microbatches of a step, and the options of its generator.

    Args:
        schedule: as for `Pipeline`.
        microbatches: if None, those of an order, else 4 per device.
        options: of a generator; for a class of torch, `stages_per_device`.

    Raises InputError for a file without a schedule, for a schedule of torch that does not exist in this size, and for
    anything that is not a schedule.
    """
    options = {name: value for name, value in (options or {}).items() if value is not None}
    if isinstance(schedule, (str, Path)) and str(schedule).endswith(".csv"):
        schedule = read_file(schedule)
    count: int = microbatches or MICROBATCHES_PER_DEVICE * devices
    if is_torch_schedule(schedule):
        stages_per_device = options.pop("stages_per_device", None)
        count = microbatches or int(getattr(schedule, "_n_microbatches", count))
        schedule = from_torch_schedule(schedule, devices, count, stages_per_device=stages_per_device)
    if isinstance(schedule, (Order, Program)):
        return schedule, microbatches or schedule.microbatches, options
    if isinstance(schedule, (str, Path)):
        return str(schedule), count, options
    if callable(schedule):
        return schedule, count, options
    raise InputError(
        f"schedule is {type(schedule).__name__}; it must be a name, an Order, a Program, a CSV file, a function of"
        " devices and microbatches that returns an Order, or a schedule of torch.distributed.pipelining"
    )
