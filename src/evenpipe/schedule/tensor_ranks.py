"""Check that a program completes when every device is several tensor ranks.

All ranks of a device walk its row. Inside each pass that computes they meet: every rank waits there for the others.
Transfers stay in columns: rank k of a device exchanges with rank k of others, on communicators of their own. So the
larger program has ranks x devices rows:

    device 0, rank 0   F0*  ->X0@0   S0* ...        * the ranks of device 0 meet
    device 0, rank 1   F0*  ->X0@1   S0* ...        @k a transfer of column k

It completes if the program does: put the meeting of a pass at the pass, and each transfer's copies at its instant, and
every row is a part of one list. That needs equal rows on all ranks of a device, which is what is checked here, item by
item, under both models of `queues`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from evenpipe.words import join

from .dependencies import Dependencies
from .faults import Fault, brief
from .passes import OFFLOAD_KINDS, SHARDING_KINDS, Item, Pass, Transfer, parts_of
from .program import Program
from .queues import QUEUE_MODELS

MEETS_NOT = OFFLOAD_KINDS | SHARDING_KINDS
"""Kinds of pass in which ranks do not meet: copies, and what replicas do."""

Step = tuple[bool, Hashable, tuple[int, ...], str]
"""Whether the process waits at once; what is exchanged, by which processes, in which queue."""


def check_tensor_ranks(
    program: Program, ranks: int, rows: Sequence[Sequence[Item | None]] | None = None
) -> list[Fault]:
    """Return a fault for each queue model under which the program does not complete on so many ranks per device.

    rows: of every process, device by device and in each by rank, if they may differ from those of the program.
    """
    dependencies = Dependencies.of(program, program.sharing)
    given = rows if rows is not None else [row for row in program.rows for _ in range(ranks)]
    faults = []
    for model in QUEUE_MODELS:
        one_queue = model == "one queue per device"
        steps = [_steps(row, process, ranks, dependencies, one_queue) for process, row in enumerate(given)]
        stopped = _Walk(steps).run()
        if stopped:
            process, position = next(iter(stopped.items()))
            places = [
                f"rank {one % ranks} of device {one // ranks} stops at {brief(given[one][at])}"
                for one, at in stopped.items()
            ]
            what = f"with {model} and {ranks} tensor ranks the program cannot complete: {join(places)}"
            faults.append(Fault(process // ranks, position, what))
    return faults


def _steps(
    row: Sequence[Item | None], process: int, ranks: int, dependencies: Dependencies, one_queue: bool
) -> list[list[Step]]:
    """Return what a process exchanges at each position of its row.

    one_queue: all of a process is in one queue; else each communicator has its own.
    """
    device, rank = divmod(process, ranks)
    mates = tuple(range(device * ranks, (device + 1) * ranks))
    steps: list[list[Step]] = []
    for item in row:
        here: list[Step] = []
        if isinstance(item, Transfer):
            route = dependencies.route_of(item, device)
            if route is not None:
                members = tuple(member * ranks + rank for member in route.members)
                queue = "" if one_queue else f"{route.communicator}@{rank}"
                here.append((False, (route.number, item.microbatch, item.slice, rank), members, queue))
        elif isinstance(item, Pass):
            for part in parts_of(item):
                if part.microbatch is not None:
                    rule = dependencies.rule(device, part.kind, part.stage)
                    here += [(True, (one.number, part.microbatch, part.slice, rank), (), "") for one in rule.waits]
                if part.kind not in MEETS_NOT:
                    name = (device, part.kind, part.stage, part.microbatch, part.slice)
                    here.append((True, name, mates, "" if one_queue else f"ranks of {device}"))
        steps.append(here)
    return steps


class _Walk:
    """Processes that exchange in queues, as far as they get."""

    def __init__(self, rows: list[list[list[Step]]]) -> None:
        self._rows = rows
        self._queues: list[dict[str, deque[Hashable]]] = [{} for _ in rows]
        self._members: dict[Hashable, tuple[tuple[int, ...], str]] = {}
        self._at_head: dict[Hashable, int] = {}
        self._done: set[Hashable] = set()
        self._waiting: dict[Hashable, list[int]] = {}

    def run(self) -> dict[int, int]:
        """Return the processes that stand still, and the position of each."""
        places = [[0, 0] for _ in self._rows]  # position, step within it
        awake = list(range(len(self._rows)))
        while awake:
            process = awake.pop()
            place, row = places[process], self._rows[process]
            while place[0] < len(row):
                if place[1] == len(row[place[0]]):
                    place[:] = place[0] + 1, 0
                    continue
                waits, what, members, queue = row[place[0]][place[1]]
                if members and what not in self._queues[process].setdefault(queue, deque()) and what not in self._done:
                    self._members[what] = members, queue
                    self._queues[process][queue].append(what)
                    awake += self._advance(process, queue)
                if waits and what not in self._done:
                    self._waiting.setdefault(what, []).append(process)
                    break
                place[1] += 1
        return {process: place[0] for process, place in enumerate(places) if place[0] < len(self._rows[process])}

    def _advance(self, process: int, queue: str) -> list[int]:
        """Complete what is at the head of its queue on all members; return the processes that waited for it."""
        heads, woken = [(process, queue)], []
        while heads:
            process, queue = heads.pop()
            line = self._queues[process].get(queue)
            if not line:
                continue
            what = line[0]
            members, _ = self._members[what]
            lines = [self._queues[member].get(queue) for member in members]
            if all(one and one[0] == what for one in lines):
                self._done.add(what)
                woken += self._waiting.pop(what, [])
                for member, one in zip(members, lines, strict=True):
                    assert one is not None
                    one.popleft()
                    heads.append((member, queue))
        return woken
