"""Walk a schedule: every device runs its row until it has to wait for another.

A pass starts when its device is free and all passes and transfers that it needs are complete. Models differ in when a
transfer completes (`Completion`), but passes and transfers take the same time in all of them. In the event model of an
order, rows contain no transfers: a transfer is ready when its producers have run. In a program, every member issues a
transfer and continues. Libraries queue transfers differently, so a program must complete under both queue models.

Processes that share the experts of their layers are copies of one device in several replicas: all walk the same row,
and exchange data within F, B, I and R. The walk merges the copies of each pass and transfer into one. With one queue
per communicator, the result is the program itself. With one queue per device, an exchange is queued after everything
that the device has issued before, and its pass blocks until the exchange completes.

Every pass and every need is visited once, so the time is linear in their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from .numbered import Numbered
from .passes import Kind, parts_of
from .rules import IF_PRESENT, PER_PAIR, Route

EXCHANGES = frozenset({Kind.F, Kind.B, Kind.I, Kind.R})
"""Kinds of pass within which devices that share experts exchange."""


class Completion(Enum):
    """When a transfer completes."""

    DATA = "when all its producers have run"
    """The event model. Rows are those of an order."""
    COMMUNICATOR = "with one queue per communicator"
    """When it is at the head of its queue on all members, where each communicator of a device has a queue."""
    DEVICE = "with one queue per device"
    """The same, where each device has a single queue: what NCCL may do."""
    MEETING = "when all members wait for it"
    """Every member waits until all others have reached the transfer. If a program completes under this model, all its
    transfers have one total order that every row follows, so it completes under all other models too, by induction
    along that order."""


@dataclass(slots=True)
class Walked:
    """How far each device got.

    Attributes:
        rows: the rows that were walked.
        heads: per device, how many numbers of its row are complete.
        start, end: by number; a transfer starts when its data is ready.
        happened: numbers in an order compatible with all needs, also among simultaneous events: passes when they run,
            transfers when they are ready. Parts of joint passes are not included.
        missing: by number, how many events it still waits for: 0 when it is complete.
        queues: per device and queue, the transfers that it has issued and that are not complete.
    """

    numbered: Numbered
    completion: Completion
    rows: Sequence[Sequence[int]]
    heads: list[int]
    start: list[float]
    end: list[float]
    happened: list[int]
    missing: list[int]
    queues: list[dict[str, deque[int]]]
    exchanging: frozenset[int]

    @property
    def stopped(self) -> dict[int, int]:
        """By device, the number at which it is blocked forever."""
        rows = self.rows
        return {device: rows[device][head] for device, head in enumerate(self.heads) if head < len(rows[device])}

    def sequence(self) -> dict[int, int]:
        """By number, the index of a pass or transfer in `happened`; parts of a joint pass have its index."""
        index_of = {n: index for index, n in enumerate(self.happened)}
        for n, entry in self.numbered.separate.items():
            if n in index_of:
                index_of.update(dict.fromkeys(entry.parts, index_of[n]))
        return index_of

    def awaited(self, n: int, device: int) -> list[int]:
        """The numbers that a number still waits for."""
        numbered = self.numbered
        needs = [n + step for step in numbered.needs[numbered.rule[n]]]
        awaited = [needed for needed in needs if self.missing[needed] > 0]
        if n in self.exchanging:
            queued = (transfer for queue in self.queues[device].values() for transfer in queue)
            awaited += [transfer for transfer in queued if transfer not in awaited]
        return awaited

    def queue(self, route: Route) -> str:
        """The name, on each device, of the queue for the transfers of a route."""
        return _queue(self.numbered, self.completion)(route)


def walk(
    numbered: Numbered,
    completion: Completion,
    takes: Sequence[float] | None = None,
    rows: Sequence[Sequence[int]] | None = None,
    *,
    tolerant: bool = False,
    experts: bool = False,
) -> Walked:
    """Run the row of every device as far as possible.

    takes: durations by number; None: nothing takes time. rows: the rows to walk, if not those of the schedule.
    tolerant: passes and transfers in no row count as complete. experts: with queues, passes of `EXCHANGES` also wait
    for everything that their device has issued before.
    """
    rows = numbered.rows if rows is None else rows
    takes = [0.0] * numbered.size if takes is None else takes
    by_data, meeting = completion is Completion.DATA, completion is Completion.MEETING
    rule, needs, transfers, units = numbered.rule, numbered.needs, numbered.transfers, numbered.units
    feeds = numbered.feeds if by_data else [()] * len(numbered.feeds)
    missing = _missing(numbered, rows, by_data=by_data, tolerant=tolerant)
    start, end = [0.0] * numbered.size, [0.0] * numbered.size
    happened: list[int] = []
    waiting: dict[int, list[int]] = {}  # number -> devices whose next pass needs it
    heads, free = [0] * len(rows), [0.0] * len(rows)
    runnable = list(reversed(range(len(rows))))
    queues: list[dict[str, deque[int]]] = [{} for _ in rows]
    name_of = _queue(numbered, completion)
    names = [name_of(route) for route in numbered.rules.routes]
    members = [route.members for route in numbered.rules.routes]
    exchanging = _exchanging(numbered) if experts else frozenset()

    def issue(device: int, transfer: int, clock: float) -> None:
        """Issue a transfer on a device. The last member completes it, and possibly transfers queued after it."""
        queue = queues[device].setdefault(names[(transfer + transfers) // units], deque())
        queue.append(transfer)
        start[transfer] = max(start[transfer], clock)
        at_head = [(transfer, clock)] if queue[0] == transfer else []
        while at_head:
            transfer, clock = at_head.pop()
            start[transfer] = max(start[transfer], clock)
            missing[transfer] -= 1
            if missing[transfer]:
                continue
            end[transfer] = start[transfer] + takes[transfer]
            happened.append(transfer)
            runnable.extend(waiting.pop(transfer, ()))
            route = (transfer + transfers) // units
            for member in members[route]:
                queue = queues[member].get(names[route], EMPTY)
                if queue and queue[0] == transfer:
                    queue.popleft()
                    if queue:
                        at_head.append((queue[0], end[transfer]))

    while runnable:
        device = runnable.pop()
        row, clock = rows[device], free[device]
        for position in range(heads[device], len(row)):
            n = row[position]
            if -transfers <= n < 0:
                if not meeting:
                    issue(device, n, clock)
                    continue
                missing[n] -= 1
                if missing[n]:
                    waiting.setdefault(n, []).append(device)
                    heads[device] = position + 1
                    break
                runnable += waiting.pop(n, ())
                continue
            begin, rule_index, awaited = clock, rule[n], None
            for step in needs[rule_index]:
                needed = n + step
                if missing[needed] > 0:
                    awaited = needed
                    break
                begin = max(begin, end[needed])
            if awaited is None and n in exchanging:
                awaited = next((queue[-1] for queue in queues[device].values() if queue), None)
            if awaited is not None:
                waiting.setdefault(awaited, []).append(device)
                heads[device] = position
                break
            start[n] = begin
            end[n] = clock = begin + takes[n]
            missing[n] = 0
            happened.append(n)
            if n < 0:
                for component in numbered.separate[n].parts:
                    start[component], end[component], missing[component] = begin, clock, 0
            for step in feeds[rule_index]:
                transfer = n + step
                start[transfer] = max(start[transfer], clock)
                missing[transfer] -= 1
                if missing[transfer] == 0:
                    end[transfer] = start[transfer] + takes[transfer]
                    happened.append(transfer)
                    runnable += waiting.pop(transfer, ())
        else:
            heads[device] = len(row)
        free[device] = clock
    return Walked(numbered, completion, rows, heads, start, end, happened, missing, queues, exchanging)


def _missing(numbered: Numbered, rows: Sequence[Sequence[int]], *, by_data: bool, tolerant: bool) -> list[int]:
    """By number: 1 for a pass; for a transfer, the number of its producers, or of members with it in their rows."""
    absent = 0 if tolerant else 1
    missing = [absent if position < 0 else 1 for position in numbered.position]
    for group, first in numbered.groups.items():
        if group.kind in IF_PRESENT:
            positions = numbered.position[first : first + numbered.units]
            missing[first : first + numbered.units] = [int(position >= 0) for position in positions]
    missing += [0] * (numbered.size - len(missing))
    if not by_data:
        for row in rows:
            for n in row:
                if -numbered.transfers <= n < 0:
                    missing[n] += 1
    elif tolerant:
        for row in rows:
            for n in row:
                for step in numbered.feeds[numbered.rule[n]]:
                    missing[n + step] += 1
    else:
        counts = [count for route in numbered.rules.routes for count in [len(route.producers)] * numbered.units]
        missing[numbered.size - numbered.transfers :] = counts
    return missing


def _queue(numbered: Numbered, completion: Completion) -> Callable[[Route], str]:
    if completion is Completion.COMMUNICATOR:
        sharing = getattr(numbered.schedule, "sharing", PER_PAIR)
        return lambda route: route.communicator(sharing)
    return lambda route: ""


def _exchanging(numbered: Numbered) -> frozenset[int]:
    """Numbers of passes in which devices exchange data with their copies in other replicas."""
    kinds = [group.kind for group in numbered.groups]
    numbers = {n for row in numbered.rows for n in row if n >= 0 and kinds[n // numbered.units] in EXCHANGES}
    joint = (n for n, entry in numbered.separate.items() if any(p.kind in EXCHANGES for p in parts_of(entry.item)))
    return frozenset(numbers.union(joint))


EMPTY: deque[int] = deque()
"""A queue on which a device has issued nothing."""
