"""Explain why a schedule does not complete: where every device stops, and what it is waiting for."""

from __future__ import annotations

from evenpipe.errors import InputError
from evenpipe.words import count, join

from .faults import ROWS, Fault, brief, excerpt
from .numbered import ABSENT
from .passes import Pass
from .walk import EMPTY, Completion, Walked


class DeadlockError(InputError):
    """An order cannot complete. The message shows device, position, the pass awaited and the rows around it.

    `positions` gives the position at which each unfinished device stopped, `what` the message without rows.
    """

    def __init__(self, walked: Walked) -> None:
        fault, self.positions = _explain(walked)
        self.message = fault.message
        super().__init__(f"{fault.message}\n{fault.rows}")


def deadlock(walked: Walked) -> Fault | None:
    """The fault of a walk that does not complete, at the first device that stops; None if it does."""
    return _explain(walked)[0] if walked.stopped else None


def _explain(walked: Walked) -> tuple[Fault, dict[int, int]]:
    numbered = walked.numbered
    rows = numbered.schedule.rows
    positions = {device: numbered.position_of(n, device) for device, n in walked.stopped.items()}
    shown = dict(list(positions.items())[:ROWS])
    stops = []
    for device, position in shown.items():
        awaited = walked.awaited(walked.stopped[device], device)
        reasons = join([reason for n in awaited for reason in _reasons(walked, n, device)])
        stops.append(
            f"device {device} stops at position {position} ({brief(rows[device][position])}), waiting for {reasons}"
        )
    if len(positions) > ROWS:
        stops.append(f"and {count(len(positions) - ROWS, 'more device')}")
    model = "" if walked.completion is Completion.DATA else f" {walked.completion.value}"
    if walked.exchanging:
        model += " and exchanges of experts"
    device, position = next(iter(positions.items()))
    return Fault(device, position, f"deadlock{model}: {'; '.join(stops)}", excerpt(rows, shown)), positions


def _reasons(walked: Walked, n: int, device: int) -> list[str]:
    """Describe what a device waits for: passes that have not run, or a transfer and what blocks it on each member."""
    numbered = walked.numbered
    if not numbered.is_transfer(n):
        return [_pass(walked, n)]
    route = numbered.route(n)
    if walked.completion is Completion.DATA:
        unit = numbered.unit_of(n)
        reasons = []
        for group in route.producers:
            first = numbered.groups.get(group)
            if first is None:
                reasons.append(f"{Pass(group.kind, group.stage, *numbered.about(n))} of device {group.device}{NOWHERE}")
            elif walked.missing[first + unit]:
                reasons.append(_pass(walked, first + unit))
        return reasons
    blocks, name = [], walked.queue(route)
    for member in route.members:
        line = walked.queues[member].get(name, EMPTY)
        if n not in line:
            blocks.append(f"not issued by device {member}")
        elif line[0] != n:
            blocks.append(f"queued after {numbered.item(line[0], member)} on device {member}")
    return [f"{numbered.item(n, device)} ({join(blocks)})"]


def _pass(walked: Walked, n: int) -> str:
    numbered = walked.numbered
    device = numbered.device(n)
    missing = NOWHERE if numbered.position_of(n, device) == ABSENT else ""
    return f"{numbered.item(n, device)} of device {device}{missing}"


NOWHERE = " (which is in no row)"
