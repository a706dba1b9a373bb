"""Explain why an order does not complete: where every device stops, and what it awaits there."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.errors import InputError

from .dependencies import Dependencies
from .excerpt import brief, excerpt
from .faults import Fault
from .order import Order
from .passes import ROLE, Item, Kind, Pass, parts_of
from .places import in_sequence
from .words import join

SHOWN = 8
"""Most devices that a message shows in full."""


class DeadlockError(InputError):
    """An order cannot complete. The message shows device, position, the pass awaited and the rows around it.

    `positions` gives the position at which each unfinished device stopped, `what` the message without rows.
    """

    def __init__(self, order: Order, done: Sequence[int]) -> None:
        """`done[device]` passes have run, and none can run any more."""
        places = [[position for position, item in enumerate(row) if item is not None] for row in order.rows]
        self.positions = {
            device: places[device][done[device]]
            for device in range(order.devices)
            if done[device] < len(places[device])
        }
        shown = dict(list(self.positions.items())[:SHOWN])
        awaited = _awaited(order, done, shown)
        stops = [
            f"device {device} stops at position {position}, {brief(order.rows[device][position])}, awaiting "
            f"{awaited[device]}"
            for device, position in shown.items()
        ]
        if len(self.positions) > SHOWN:
            stops.append(f"and {len(self.positions) - SHOWN} more devices")
        self.what = "the order cannot complete: " + "; ".join(stops)
        super().__init__(f"{self.what}\n{excerpt(order.rows, shown)}")

    def fault(self, rows: Sequence[Sequence[Item | None]]) -> Fault:
        """Return the same as a fault, with `rows` instead of the rows of the order."""
        device, position = next(iter(self.positions.items()))
        return Fault(device, position, self.what, excerpt(rows, dict(list(self.positions.items())[:SHOWN])))


def _awaited(order: Order, done: Sequence[int], stopped: dict[int, int]) -> dict[int, str]:
    """Return in words what each device of `stopped` (device -> position) awaits."""
    dependencies = Dependencies.of(order)
    # By what a need names: kind (B for I), stage, microbatch and slice.
    ran: list[dict[tuple[Kind, int | None, int | None, int], bool]] = [
        {
            (ROLE[part.kind], part.stage, part.microbatch, part.slice): index < done[device]
            for index, item in enumerate(order.passes(device))
            for part in parts_of(item)
        }
        for device in range(order.devices)
    ]

    def unmet(wanted: Pass, there: int) -> str:
        state = ran[there].get((ROLE[wanted.kind], wanted.stage, wanted.microbatch, wanted.slice))
        if state:
            return ""
        return f"{wanted} of device {there}" + (" (which is in no row)" if state is None else "")

    words = {}
    for device, position in stopped.items():
        item = order.rows[device][position]
        assert item is not None
        needs = [(device, earlier) for earlier in dependencies.after(item, device)]
        for part in parts_of(item):
            rule = dependencies.rule(device, part.kind, part.stage)
            needs += [(device, earlier) for earlier in in_sequence(part, rule, order.slices)]
            for kind, stage in rule.if_present:
                if (kind, stage, part.microbatch, part.slice) in ran[device]:
                    needs.append((device, Pass(kind, stage, part.microbatch, part.slice)))
        for transfer in dependencies.waits_for(item, device):
            needs += dependencies.producers(transfer, device)
        words[device] = join([text for there, wanted in needs if (text := unmet(wanted, there))])
    return words
