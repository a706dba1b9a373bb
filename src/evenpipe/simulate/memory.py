"""Bytes on each device over time."""

from __future__ import annotations

from itertools import accumulate

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Program, Transfer, TransferKind, parts_of
from evenpipe.schedule.held import Curve, held_over_time

from .loop import Loop
from .work import Work

Change = tuple[float, int, float]
"""Time, rank among changes at that time, and added bytes. By rank, the next pass can use released bytes."""

_RECEIVED = (TransferKind.RECV_F, TransferKind.RECV_B)
ROUNDING = 1e-9
"""Rounding tolerance of sums of bytes, relative to the peak."""


def memory_curves(program: Program, costs: Costs, work: Work, loop: Loop) -> tuple[Curve, ...] | None:
    """The curve of each device, or None if `costs` have no bytes.

    A pass adds bytes at its start and releases bytes at its end. A copy back to the device adds its bytes when it is
    issued, and so does an all-gather of parameters. An order that only evaluates stores nothing.

    Raises InputError if the bytes of a device do not end at 0, or become negative, because then the deltas of one
    microbatch do not add up to 0.
    """
    each = costs.by_slice(program.slices)
    deltas = [slice_costs.memory_deltas(program.placement) for slice_costs in each]
    if deltas[0] is None:
        return None
    changes: list[list[Change]] = [[] for _ in work.rows]
    positions = {n: position for row in work.rows for position, n in enumerate(row)} if costs.receive_bytes else {}
    for device, (numbers, row) in enumerate(zip(work.rows, program.rows, strict=True)):
        items = (item for item in row if item is not None)
        for position, (n, item) in enumerate(zip(numbers, items, strict=True)):
            begin, end = loop.issued.get(n, loop.start[n]), loop.end[n]
            if isinstance(item, Transfer):
                if costs.receive_bytes and item.kind in _RECEIVED and device == item.members[1]:
                    user = max(work.waiting[n], key=loop.end.__getitem__)
                    size, rank = each[item.slice].receive_bytes, 2 * positions[user]
                    changes[device] += [(loop.posted[n], rank, size), (loop.end[user], rank + 1, -size)]
                continue
            for component in () if program.forward_only else parts_of(item):
                values = (deltas[component.slice] or {}).get(component.kind)
                delta = 0.0 if values is None else values[device if component.stage is None else component.stage]
                if delta:
                    changes[device].append(
                        (begin, 2 * position, delta) if delta > 0 else (end, 2 * position + 1, delta)
                    )
    return tuple(_curve(device, row) for device, row in enumerate(changes))


def _curve(device: int, changes: list[Change]) -> Curve:
    curve = held_over_time(changes)
    if not curve:
        return curve
    peak = max(held for _, held in curve)
    low = min(accumulate(added for _, _, added in sorted(changes)))
    time, left = curve[-1]
    if abs(left) > peak * ROUNDING or -low > peak * ROUNDING:
        subject = f"{left:g} bytes are left on" if abs(left) > peak * ROUNDING else f"{low:g} bytes are held by"
        raise InputError(
            f"costs.memory: {subject} device {device}; bytes that the passes of a microbatch add must sum to 0"
        )
    return (*curve[:-1], (time, 0.0))
