"""Why an order does not complete: where every device stands, and what it awaits there."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.errors import InputError

from .dependencies import Dependencies, same_role
from .excerpt import excerpt
from .graph import Key
from .order import Order
from .passes import Pass, parts_of

SHOWN = 8
"""Devices that a message shows in full."""


class DeadlockError(InputError):
    """An order cannot complete. The message shows device, position, the pass awaited and the rows around it."""


def describe_stuck(order: Order, dependencies: Dependencies, done: Sequence[int]) -> str:
    """A message about an order whose devices stand still after `done[device]` passes."""
    places = [[position for position, item in enumerate(row) if item is not None] for row in order.rows]
    stuck = [device for device in range(order.devices) if done[device] < len(places[device])]
    ran: list[dict[Key, bool]] = [
        {
            (same_role(part.kind), part.stage, part.microbatch, part.slice): index < done[device]
            for index, item in enumerate(order.passes(device))
            for part in parts_of(item)
        }
        for device in range(order.devices)
    ]

    def state(device: int, item: Pass) -> bool | None:
        return ran[device].get((same_role(item.kind), item.stage, item.microbatch, item.slice))

    lines, marks = [], {}
    for device in stuck[:SHOWN]:
        position = marks[device] = places[device][done[device]]
        item = order.rows[device][position]
        assert item is not None
        awaited = [(device, earlier) for earlier in dependencies.after(item, device)]
        for transfer in dependencies.waits_for(item, device):
            awaited += dependencies.producers(transfer, device)
        unmet = [
            f"{wanted} of device {there}{' (which is in no row)' if state(there, wanted) is None else ''}"
            for there, wanted in awaited
            if not state(there, wanted)
        ]
        lines.append(f"device {device} stops at position {position}, {item}, awaiting {_join(unmet)}")
    if len(stuck) > SHOWN:
        lines.append(f"and {len(stuck) - SHOWN} more devices")
    return "the order cannot complete: " + "; ".join(lines) + "\n" + excerpt(order.rows, marks)


def _join(words: list[str]) -> str:
    if len(words) > SHOWN:
        words = [*words[: SHOWN - 1], f"{len(words) - SHOWN + 1} more"]
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
