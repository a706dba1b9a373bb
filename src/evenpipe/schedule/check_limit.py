"""Check that every device stays within its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from evenpipe.errors import InputError
from evenpipe.words import count, refused

from .costs import Costs
from .faults import Fault, brief, neighbours
from .held import held_along
from .order import Order
from .passes import Kind, Pass
from .program import Program
from .rules import IN_FLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits per device: one number, or one per device; None is no limit."""

    activations: float | Sequence[float] | None = None
    """Stage activations that were forwarded and not yet released."""
    bytes: float | Sequence[float] | None = None
    """Bytes, with the sizes of `costs`."""
    costs: Costs | None = None
    """Its `memory` or `bytes` give the bytes that passes store and release."""


def check_limits(schedule: Order | Program, limits: Limits) -> Iterator[Fault]:
    """Return, for each device and limit, the position where the row first exceeds it.

    Bytes are counted pass by pass along the row. Rows that only evaluate store nothing. Raises InputError for invalid
    limits, and for limits in bytes without costs.
    """
    if limits.activations is not None:
        bounds = limits_per_device(limits.activations, schedule.devices)
        yield from _exceeded(schedule, bounds, [_activations] * schedule.devices, "stage activations")
    if limits.bytes is not None:
        bounds = limits_per_device(limits.bytes, schedule.devices, "bytes")
        per_slice = () if limits.costs is None else limits.costs.by_slice(schedule.slices)
        deltas = [
            slice_deltas
            for slice_costs in per_slice
            if (slice_deltas := slice_costs.memory_deltas(schedule.placement)) is not None
        ]
        if not deltas:
            raise InputError("a limit in bytes needs costs with the field bytes or memory")
        changes = [partial(_bytes, deltas, device) for device in range(schedule.devices)]
        yield from _exceeded(schedule, bounds, changes, "bytes")


def _activations(item: Pass) -> float:
    return IN_FLIGHT.get(item.kind, 0)


def _bytes(deltas: Sequence[dict[Kind, tuple[float, ...]]], device: int, item: Pass) -> float:
    # A stage or slice that does not exist is a separate fault.
    sizes = deltas[item.slice].get(item.kind, ()) if item.slice < len(deltas) else ()
    index = device if item.stage is None else item.stage
    return sizes[index] if index < len(sizes) else 0.0


def _exceeded(
    schedule: Order | Program, limits: Sequence[float], changes: Sequence[Callable[[Pass], float]], unit: str
) -> Iterator[Fault]:
    """`changes`: per device, the amount that a pass adds to what the device holds."""
    if schedule.forward_only:
        return
    for device, (row, limit) in enumerate(zip(schedule.rows, limits, strict=True)):
        previous = 0.0
        for position, peak, held in held_along(row, changes[device]):
            if peak > limit * (1 + 1e-9) and peak > previous:
                message = f"{brief(row[position])} makes it {peak:g} {unit}, more than the limit of {limit:g}"
                yield Fault(device, position, message, neighbours(schedule.rows, device, position))
                break
            previous = held


def limits_per_device(
    limit: float | Sequence[float], devices: int, unit: str = "stage activations", *, least: float = 0
) -> tuple[float, ...]:
    """One limit per device. Raises InputError unless there is one limit, or one per device, and all are finite,
    above 0 and at least `least`."""
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * devices
    if len(limits) != devices:
        mismatch = f"{count(len(limits), 'number')} for {count(devices, 'device')}"
        raise InputError(f"max_in_flight has {mismatch}; give one number{f', or {devices}' if devices > 1 else ''}")
    expected = f"a finite number of at least {least:g}" if least else "a finite number above 0"
    for value in limits:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf or value < least:
            raise refused("max_in_flight", value, f"{expected}, in {unit}")
    return limits
