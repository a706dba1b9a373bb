"""Bytes on each device over time."""

from __future__ import annotations

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Program, TransferKind, parts_of

from .loop import Loop
from .work import Work

Curve = tuple[tuple[float, float], ...]
"""(time, bytes held from then on), by time."""

Change = tuple[float, int, float]
"""Time, rank at that time, and added bytes: the next pass can use released bytes."""

_HOPS = (TransferKind.SEND_F, TransferKind.SEND_B)
ROUNDING = 1e-9
"""Rounding tolerance of sums of bytes, relative to the peak."""


def memory_curves(program: Program, costs: Costs, work: Work, loop: Loop) -> tuple[Curve, ...] | None:
    """Return the curve of each device, or None if `costs` have no bytes.

    A pass adds bytes at its start and releases bytes at its end. A copy back to the device adds its bytes when it is
    issued, and so does gathering. An order that only evaluates stores nothing.

    Raises InputError if the bytes of a device are not 0 at the end, or become negative: then the deltas of one
    microbatch do not add up to 0.
    """
    each = costs.by_slice(program.slices)
    deltas = [one.memory_deltas(program.placement) for one in each]
    if deltas[0] is None:
        return None
    changes: list[list[Change]] = [[] for _ in work.rows]
    for n, (item, device) in enumerate(zip(work.items, work.device_of, strict=True)):
        begin, end = loop.issued.get(n, loop.start[n]), loop.end[n]
        for part in () if program.forward_only else parts_of(item):
            values = (deltas[part.slice] or {}).get(part.kind)
            if values is None:
                continue
            delta = values[device if part.stage is None else part.stage]
            if delta:
                changes[device].append((begin, 2 * n, delta) if delta > 0 else (end, 2 * n + 1, delta))
    if costs.receive_bytes:
        for k, route in enumerate(work.transfers.route):
            if route.kind in _HOPS:
                user = max(work.transfers.feeds[k], key=loop.end.__getitem__)
                size = each[work.transfers.unit[k] % program.slices].receive_bytes
                changes[route.members[1]] += [(loop.posted[k], 2 * user, size), (loop.end[user], 2 * user + 1, -size)]
    return tuple(_curve(device, row) for device, row in enumerate(changes))


def _curve(device: int, changes: list[Change]) -> Curve:
    changes.sort()
    curve: list[tuple[float, float]] = []
    held = peak = low = 0.0
    for time, _, delta in changes:
        held += delta
        peak, low = max(peak, held), min(low, held)
        if curve and curve[-1][0] == time:
            curve[-1] = (time, held)
        else:
            curve.append((time, held))
    if abs(held) > peak * ROUNDING or -low > peak * ROUNDING:
        what = f"{held:g} bytes are left on" if abs(held) > peak * ROUNDING else f"{low:g} bytes are held by"
        raise InputError(
            f"costs: memory: {what} device {device}; bytes that the passes of a microbatch add must sum to 0"
        )
    if curve:
        curve[-1] = (curve[-1][0], 0.0)
    return tuple(curve)
