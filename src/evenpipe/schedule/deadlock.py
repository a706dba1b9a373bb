"""Explain why an order does not complete: where every device stops, and what it awaits there."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.errors import InputError
from evenpipe.words import count, join

from .dependencies import Dependencies
from .faults import ROWS, Fault, brief, excerpt
from .order import Order
from .passes import ROLE, Pass, Rows, parts_of
from .places import Name, needs_in_row


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
        shown = dict(list(self.positions.items())[:ROWS])
        awaited = _awaited(order, done, shown)
        stops = [
            f"device {device} stops at position {position}, {brief(order.rows[device][position])}, awaiting "
            f"{awaited[device]}"
            for device, position in shown.items()
        ]
        if len(self.positions) > ROWS:
            stops.append(f"and {count(len(self.positions) - ROWS, 'more device')}")
        self.what = "the order cannot complete: " + "; ".join(stops)
        super().__init__(f"{self.what}\n{excerpt(order.rows, shown)}")

    def fault(self, rows: Rows) -> Fault:
        """Return the same as a fault, with `rows` instead of the rows of the order."""
        device, position = next(iter(self.positions.items()))
        return Fault(device, position, self.what, excerpt(rows, self.positions))


def _awaited(order: Order, done: Sequence[int], stopped: dict[int, int]) -> dict[int, str]:
    """Return in words what each device of `stopped` (device -> position) awaits."""
    dependencies = Dependencies.of(order)
    # By what a need names: with B for I.
    ran: list[dict[Name, bool]] = [
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
        in_row, sent = [], []
        for part in parts_of(item):
            rule = dependencies.rule(device, part.kind, part.stage)
            for needed, optional in needs_in_row(part, rule, order.slices):
                if not optional or needed in ran[device]:
                    in_row.append((device, Pass(*needed)))
            for site in (made for route in rule.waits for made in route.producers if part.microbatch is not None):
                sent.append((site.device, Pass(site.kind, site.stage, part.microbatch, part.slice)))
        words[device] = join([text for there, wanted in (*in_row, *sent) if (text := unmet(wanted, there))])
    return words
