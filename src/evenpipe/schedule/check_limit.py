"""Does every device stay within its memory?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from evenpipe.errors import InputError

from .excerpt import neighbours
from .faults import Fault
from .order import Order
from .passes import Kind, parts_of
from .program import Program

RELEASING = frozenset({Kind.B, Kind.W})


def check_limit(
    schedule: Order | Program, limits: Sequence[float], stage_bytes: Sequence[float] | None = None
) -> Iterator[Fault]:
    """The first forward of each device that stores more than `limits[device]`.

    Limits count stage activations, or bytes when `stage_bytes` says what a forward of each stage stores. A full
    backward releases it, or the weight gradient where the backward is split. Rows that only evaluate store nothing.
    """
    if schedule.forward_only:
        return
    order = schedule.order if isinstance(schedule, Program) else schedule
    for device, limit in enumerate(limits):
        held = 0.0
        for item in order.passes(device):
            for part in parts_of(item):
                if part.stage is None or not (part.kind is Kind.F or part.kind in RELEASING):
                    continue
                size = 1.0 if stage_bytes is None else stage_bytes[part.stage]
                held += size if part.kind is Kind.F else -size
                if part.kind is Kind.F and held > limit * (1 + 1e-9):
                    what = "stage activations" if stage_bytes is None else "bytes of stage activations"
                    position = schedule.rows[device].index(item)
                    words = f"{part} is stored as {held:g} {what}, more than the limit of {limit:g}"
                    yield Fault(device, position, words, neighbours(schedule.rows, device, position))
                    break
            else:
                continue
            break


def limits_per_device(limit: float | Sequence[float], devices: int) -> tuple[float, ...]:
    """One limit per device. Raises InputError unless these are finite numbers above 0, one or as many as devices."""
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * devices
    if len(limits) != devices:
        raise InputError(f"memory_limit has {len(limits)} numbers for {devices} devices; give one number, or {devices}")
    for value in limits:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise InputError(f"memory_limit must be a number above 0, in stage activations, not {value!r}")
    return limits
