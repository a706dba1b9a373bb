"""Check that a program completes, however the library queues transfers.

A device executes its row. It issues a transfer and goes on; at a pass, it waits until the transfers that the pass needs
have completed. A transfer completes when it is at the head of its queue on all members. Libraries queue differently,
and a program must complete under both models:

    one queue per communicator: transfers of one communicator wait for each other, not for those of others
    one queue per device:       a device's transfers complete strictly in the order of its row (what NCCL may do)

Processes that share the experts of their layers are copies of one device in several replicas: all walk its row, and
exchange within F, B, I and R. Merge the copies of every pass and transfer into one. With one queue per communicator,
what is left is the program itself. With one queue per device, an exchange follows everything that the device has issued
before, and its pass stops until it is complete; this is the third model:

    ... and exchanges of experts:   every F, B, I and R stops until all transfers issued before it are complete

A device that stops holds up no other: what it would issue next would stand in its queue behind the transfers that it
waits for. So a program of which every transfer is awaited completes under this model if it does under the second one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from evenpipe.words import join

from .dependencies import Dependencies, Route
from .faults import Fault, brief, excerpt
from .graph import Graph
from .passes import Kind, Pass, parts_of
from .program import Program

QUEUE_MODELS: dict[str, Callable[[Route], str]] = {
    "one queue per communicator": lambda route: route.communicator,
    "one queue per device": lambda route: "",
}
"""Name of a model -> the queue, among those of one device, for the transfers of a route."""

WITH_EXPERTS = "one queue per device and exchanges of experts"
"""Name of the model for devices that exchange with their copies in other replicas."""

EXCHANGES = frozenset({Kind.F, Kind.B, Kind.I, Kind.R})
"""Kinds of pass within which they do."""

IDLE = -1


def check_completion(
    program: Program, graph: Graph, dependencies: Dependencies, *, experts: bool = False
) -> Iterator[Fault]:
    """Return a fault for each queue model under which `program` does not complete; `experts`: also under the third.

    `graph` is that of its order. Misplaced items are ignored: nobody waits for missing transfers or members, and
    unknown and repeated transfers are skipped.
    """
    rows = _numbered(program, graph, dependencies)
    models = QUEUE_MODELS | ({WITH_EXPERTS: QUEUE_MODELS["one queue per device"]} if experts else {})
    for model, queue in models.items():
        walk = _Walk(graph, rows, queue, experts=model == WITH_EXPERTS)
        if not walk.run():
            yield walk.fault(program, model)


def _numbered(program: Program, graph: Graph, dependencies: Dependencies) -> list[list[int]]:
    """Return the rows of `program` in the numbers of `graph`, position by position."""
    rows = []
    for device, row in enumerate(program.rows):
        passes = iter(range(graph.first[device], graph.first[device + 1]))
        numbered: list[int] = []
        issued: set[int] = set()
        for item in row:
            number = IDLE
            if isinstance(item, Pass):
                number = next(passes)
            elif item is not None and (route := dependencies.route_of(item, device)):
                transfer = graph.transfers.of(route, item.microbatch, item.slice)
                if transfer not in issued:
                    issued.add(transfer)
                    number = transfer
            numbered.append(number)
        rows.append(numbered)
    return rows


class _Walk:
    """All devices executing their rows under one queue model, as far as they get."""

    def __init__(self, graph: Graph, rows: list[list[int]], queue: Callable[[Route], str], *, experts: bool) -> None:
        self.graph, self.rows, self.experts = graph, rows, experts
        self.passes = len(graph.items)
        self.stands = [0] * len(rows)  # position of the pass at which a device stops, or its end
        routes = graph.transfers.by_route()
        self.queue = [queue(route) for route, numbers in routes for _ in numbers]
        self.queues: list[dict[str, deque[int]]] = [{} for _ in rows]
        # Number of members that have not issued the transfer, or do not have it at the head of their queue; complete at
        # 0.
        self.missing = [0] * len(self.queue)
        for row in rows:
            for number in row:
                if number >= self.passes:
                    self.missing[number - self.passes] += 1
        self.standing: dict[int, list[int]] = {}  # transfer -> devices whose next pass waits for it
        self.waking = list(range(len(rows)))  # devices that may be able to go on

    def run(self) -> bool:
        """Run until no device can move; return whether every device reached its end, and so every transfer completed,
        because a pass waits for each."""
        while self.waking:
            device = self.waking.pop()
            row = self.rows[device]
            while (position := self.stands[device]) < len(row):
                number = row[position]
                if IDLE < number < self.passes and (awaited := self._awaited(number, device)):
                    self.standing.setdefault(awaited[0], []).append(device)
                    break
                self.stands[device] += 1
                if number >= self.passes:
                    self._issue(device, number)
        return all(at == len(row) for at, row in zip(self.stands, self.rows, strict=True))

    def _awaited(self, number: int, device: int) -> list[int]:
        """Return the transfers that a pass still waits for."""
        offset = self.graph.offset[number]
        transfers = [base + offset for base in self.graph.waits[self.graph.site[number]]]
        awaited = [transfer for transfer in transfers if self.missing[transfer - self.passes]]
        if self.experts and any(part.kind in EXCHANGES for part in parts_of(self.graph.items[number])):
            queued = (transfer for line in self.queues[device].values() for transfer in line)
            awaited += [transfer for transfer in queued if transfer not in awaited]
        return awaited

    def _issue(self, device: int, number: int) -> None:
        line = self.queues[device].setdefault(self.queue[number - self.passes], deque())
        line.append(number)
        at_head = [number] if line[0] == number else []
        while at_head:
            number = at_head.pop()
            transfer = number - self.passes
            self.missing[transfer] -= 1
            if self.missing[transfer]:
                continue
            for member in self.graph.transfers.carried(number)[0].members:
                line = self.queues[member].get(self.queue[transfer], deque())
                if line and line[0] == number:
                    line.popleft()
                    if line:
                        at_head.append(line[0])
            self.waking += self.standing.pop(number, ())

    def fault(self, program: Program, model: str) -> Fault:
        """Return a fault that says which devices stand still, where, and why."""
        stopped = {device: at for device, at in enumerate(self.stands) if at < len(self.rows[device])}
        sentences = [
            f"device {device} stops at position {at}, {brief(program.rows[device][at])}, awaiting "
            + join([self._why(number, device) for number in self._awaited(self.rows[device][at], device)])
            for device, at in stopped.items()
        ]
        device, position = next(iter(stopped.items()))
        what = f"with {model} the program cannot complete: {join(sentences)}"
        return Fault(device, position, what, excerpt(program.rows, stopped))

    def _why(self, number: int, device: int) -> str:
        """Return a transfer by its name on `device`, and what blocks it on each member."""
        route, *unit = self.graph.transfers.carried(number)
        reasons = []
        for member in route.members:
            line = self.queues[member].get(self.queue[number - self.passes], deque())
            if number not in line:
                reasons.append(f"not issued by device {member}")
            elif line[0] != number:
                first, *first_unit = self.graph.transfers.carried(line[0])
                reasons.append(f"queued after {first.transfer(member, *first_unit)} on device {member}")
        return f"{route.transfer(device, *unit)} ({join(reasons)})"
