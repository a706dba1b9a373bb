"""The communication transform: place every transfer of an order so that all its members issue it without deadlock.

A transfer has one instant: the predicted end of its last producer. On every member it comes before the first pass that
is predicted to end later. So each row is a part of one list of all passes and transfers, sorted by these times (ties in
the order of the event model), in which every item comes after its needs. Devices that execute such rows cannot
deadlock, even if every operation blocked, for any number of communicators and any serialisation by the library; and a
receive comes before the pass that runs while its data becomes ready.

If kinds of transfers share a communicator, a late one delays those after it. The reduce of dX waits longest, for the
slowest of all devices: so its instant is a quarter of an interval (the work of the busiest device per microbatch)
before the backward that uses it, if that is later.

D waits for a copy, and should do so as late as possible: transfers between the pass before it and the next one come
before D.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.dependencies import Dependencies, Route
from evenpipe.schedule.flows import PER_PAIR
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import HOP_KINDS, OFFLOAD_KINDS, Item, Kind, Pass, Transfer, TransferKind
from evenpipe.schedule.places import ABSENT
from evenpipe.schedule.program import Program
from evenpipe.schedule.timing import EventTimes, durations, run

from .vocabulary import interval_of


def add_communication(order: Order, costs: Costs | None = None, sharing: str = PER_PAIR) -> Program:
    """Return the program of `order`: its passes in their order, and the transfers that they need.

    `costs` (equal ones by default) predict when passes end; `sharing` as in `Program`. Raises DeadlockError if the
    order cannot complete, and InputError if a cost is missing.
    """
    lowering = Lowering(order, costs, sharing)
    rows = tuple(lowering.row(device) for device in range(order.devices))
    return Program(order.placement, order.microbatches, rows, order.barriers, order.forward_only, order.slices, sharing)


class Lowering:
    """A timed order, from which the program row of any device can be made separately.

    Timing takes the whole order, a row only its own passes and transfers.
    """

    def __init__(self, order: Order, costs: Costs | None = None, sharing: str = PER_PAIR) -> None:
        """Arguments and errors as for `add_communication`."""
        self._graph = graph = Graph.of(order, Dependencies.of(order, sharing))
        times = run(order, graph, durations(order, graph, EQUAL_COSTS if costs is None else costs))
        passes = len(graph.items)
        instants = times.end[:passes] + times.start[passes:]
        if sharing != PER_PAIR:
            _delay_reduces(order, graph, times, instants)
        self._place = [NOWHERE] * graph.size
        """By number, the position in the one list that all rows are parts of."""
        for place, number in enumerate(sorted(times.happened, key=instants.__getitem__)):
            self._place[number] = place
        self._complete = len(times.happened) == graph.size
        self._routes: list[list[tuple[Route, range]]] = [[] for _ in range(order.devices)]
        """Per device, the routes that it is a member of, and the numbers of their transfers."""
        for route, numbers in graph.transfers.by_route():
            for device in route.members:
                self._routes[device].append((route, numbers))
        self._collectives: dict[int, list[Transfer]] = {}
        """By the first number of a route: all its members share the same objects."""

    def row(self, device: int) -> tuple[Item, ...]:
        """Return the passes and transfers of `device`, in order."""
        graph, place = self._graph, self._place
        passes = range(graph.first[device], graph.first[device + 1])
        items: dict[int, Item] = dict(zip(passes, graph.items[passes.start : passes.stop], strict=True))
        for route, numbers in self._routes[device]:
            items.update(zip(numbers, self._transfers(route, numbers, device), strict=True))
        there = items if self._complete else [number for number in items if place[number] != NOWHERE]
        return tuple(_with_late_returns([items[number] for number in sorted(there, key=place.__getitem__)]))

    def _transfers(self, route: Route, numbers: range, device: int) -> list[Transfer]:
        """Return the transfers of a route as `device` issues them."""
        shared = self._collectives.get(numbers.start)
        if shared is None:
            kind, stage, peer = route.end(device)
            members, root, communicator = route.members, route.root, route.communicator
            _, first, first_slice = self._graph.transfers.carried(numbers.start)
            slices = range(first_slice, first_slice + min(len(numbers), self._graph.transfers.slices))
            shared = [
                Transfer(kind, stage, microbatch, slice_, members, root, communicator, peer)
                for microbatch in range(first, first + len(numbers) // len(slices))
                for slice_ in slices
            ]
            if route.kind not in HOP_KINDS:
                self._collectives[numbers.start] = shared
        return shared


def _delay_reduces(order: Order, graph: Graph, times: EventTimes, instants: list[float]) -> None:
    """Move the instants of DX to a quarter of an interval before the backward of the last stage, not earlier."""
    placement = order.placement
    places = graph.places[placement.last_device].at
    quarter = interval_of(order, graph, times) / 4
    for route, numbers in graph.transfers.by_route():
        if route.kind is not TransferKind.DX or len(numbers) != order.units:
            continue
        for kind in (Kind.B, Kind.I):
            for number, backward in zip(numbers, places.get((kind, placement.last_stage), ()), strict=False):
                if backward != ABSENT:
                    instants[number] = max(instants[number], times.start[backward] - quarter)


def _with_late_returns(row: Iterable[Item]) -> Iterator[Item]:
    """Move D, and copies that follow it, right before the next pass."""
    waiting: list[Item] = []
    for item in row:
        if item.kind is Kind.D or (waiting and item.kind in OFFLOAD_KINDS):
            waiting.append(item)
            continue
        if waiting and isinstance(item, Pass):
            yield from waiting
            waiting.clear()
        yield item
    yield from waiting


NOWHERE = -1
