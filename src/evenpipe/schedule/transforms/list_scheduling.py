"""List scheduling: each device runs the first ready pass of its row, whatever comes before it.

The event model goes through the step once. A free device starts the earliest pass of its row that has all its inputs.
This repairs waits that a fixed order cannot foresee; the price is forwards that run early, and activations that are
kept longer. So a forward starts early only if the device stays within a limit: a `MemoryPlan`, made from an order that
is known to fit, must be able to keep its promise.

It always completes: take the order behind the plans, with each E directly before the forward that needs it, and the
other vocabulary passes directly after their needs. All passes can run one by one in that sequence. Now take its first
pass that has not run. All its needs have run, and if it is a forward, it is in its turn. So some device can always go
on.

E has no needs, but its rows are kept until they are used. So it runs ahead of the forwards of the first stage only as
far as it does in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from operator import lt, sub

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.dependencies import Dependencies
from evenpipe.schedule.effects import IN_FLIGHT
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import HOP_KINDS, OFFLOAD_KINDS, ROLE, Kind, parts_of, unit_of
from evenpipe.schedule.places import ABSENT, Places, having
from evenpipe.schedule.timing import durations, timed

from .memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Timed:
    """An order, its longest span and its makespan."""

    order: Order
    span: float
    makespan: float

    @classmethod
    def of(cls, order: Order, costs: Costs) -> Timed:
        """Return `order`, timed by the event model."""
        graph, times = timed(order, costs)
        rows = [(first, end) for first, end in pairwise(graph.first) if first < end]
        starts, ends = [times.start[first] for first, _ in rows], [times.end[end - 1] for _, end in rows]
        return cls(order, max(map(sub, ends, starts), default=0.0), max(ends, default=0.0) - min(starts, default=0.0))

    def better_than(self, other: Timed) -> bool:
        """Return whether the span is shorter, or equal with a shorter makespan."""
        nothing = 1e-9 * self.makespan
        if abs(self.span - other.span) > nothing:
            return self.span < other.span
        return self.makespan < other.makespan - nothing


def list_schedule(
    wishes: Order, base: Order, limits: Sequence[int] | None, costs: Costs, reserve: float = 0.0
) -> Order | None:
    """Return the passes of `wishes`, run by the rules above within `limits` per device.

    Every collective gets `reserve` more time than in `costs`: an order without any slack is short only on paper.
    `wishes` need not be sound; `base` must be sound, have the same passes except those of the vocabulary, and the
    forwards of a device in the same order, and never hold more than `limits`. Orders that only evaluate have no limits:
    a device runs at most as many forwards early as there are stages. Returns None if passes are missing, and if
    activations are offloaded or recomputed: then `wishes` decides which passes run early.
    """
    graph = Graph.of(wishes)
    links = _Links.of(wishes, graph)
    if links is None:
        return None
    most: Sequence[int | None] = [None] * wishes.devices if limits is None else limits
    plans = [_memory_plan(graph, base, device, limit) for device, limit in enumerate(most)]
    takes = durations(wishes, graph, costs)
    for route, numbers in graph.transfers.by_route():
        if reserve and route.kind not in HOP_KINDS:
            takes[numbers.start : numbers.stop] = [time + reserve for time in takes[numbers.start : numbers.stop]]
    ran = _run(graph, links, plans, takes, first_stage=wishes.placement.first_stage)
    return replace(wishes, rows=tuple(tuple(map(graph.items.__getitem__, row)) for row in ran))


@dataclass(frozen=True, slots=True)
class _Links:
    """Which pass waits for which, in a graph whose rows may be reordered.

    needs: by pass, the number of passes of its own row and transfers that it waits for. followers: by site, and
    consumers: by route, the numbers of the waiting passes by unit. beside: by site and unit, the pass that waits in
    another slice of the sequence; empty if sequences are not cut. embedding: for each unit in the order of the first
    stage's row, the E passes of all devices. ahead: how many of those may run before the first stage reaches them.
    """

    needs: bytearray
    followers: list[list[list[int]]]
    consumers: list[list[list[int]]]
    beside: list[dict[int, int]]
    embedding: list[list[int]]
    ahead: int

    @classmethod
    def of(cls, order: Order, graph: Graph) -> _Links | None:
        """Return the links of an order that has every pass once, without offload or recomputation; else None."""
        if not graph.transfers.units or any(not here.at or here.joint or here.odd for here in graph.places):
            return None
        dependencies = Dependencies.of(order)
        needs = bytearray(len(graph.items))
        followers: list[list[list[int]]] = [[] for _ in graph.waits]
        consumers: list[list[list[int]]] = [[] for _ in graph.transfers.routes]
        beside: list[dict[int, int]] = [{} for _ in graph.waits if order.slices > 1]
        for device, here in enumerate(graph.places):
            roles = _roles(here)
            if roles is None:
                return None
            for (kind, stage), numbers in roles.items():
                rule = dependencies.rule(device, kind, stage)
                for needed, of_stage in rule.after:
                    for producer in (Kind.B, Kind.I) if needed is Kind.B else (needed,):
                        there = here.at.get((producer, of_stage))
                        if there:
                            followers[graph.site[max(there)]].append(numbers)
                for route in rule.waits:
                    consumers[route.number].append(numbers)
                for number in numbers:
                    if number != ABSENT:
                        needs[number] = len(rule.after) + len(rule.waits)
                for needed, of_stage, step in rule.in_sequence if order.slices > 1 else ():
                    for unit in having(step, order.slices, order.units):
                        needs[numbers[unit]] += 1
                        beside[graph.site[roles[needed, of_stage][unit + step]]][unit + step] = numbers[unit]
        embedding, ahead = _embedding(order, graph)
        for numbers in embedding[ahead:]:
            for number in numbers:
                needs[number] += 1
        return cls(needs, followers, consumers, beside, embedding, ahead)


def _roles(places: Places) -> dict[tuple[Kind, int | None], list[int]] | None:
    """Return numbers by unit of every kind and stage of a row, B and I as one; None if a pass is not there once."""
    roles: dict[tuple[Kind, int | None], list[int]] = {}
    for (kind, stage), numbers in places.at.items():
        if kind in _UNPLANNED:
            return None
        other = roles.setdefault((ROLE[kind], stage), numbers)
        if other is not numbers:
            if any((a == ABSENT) == (b == ABSENT) for a, b in zip(other, numbers, strict=True)):
                return None
            roles[ROLE[kind], stage] = list(map(max, other, numbers))
    for (kind, stage), numbers in roles.items():
        if kind is Kind.W:
            inputs = places.at.get((Kind.I, stage)) or [ABSENT] * len(numbers)
            complete = all((a == ABSENT) == (b == ABSENT) for a, b in zip(inputs, numbers, strict=True))
        else:
            complete = ABSENT not in numbers
        if not complete:
            return None
    return roles


def _embedding(order: Order, graph: Graph) -> tuple[list[list[int]], int]:
    """Return the last two fields of `_Links`."""
    device = order.placement.first_device
    embedding = [here.at.get((Kind.E, None)) for here in graph.places]
    rows, waiting, ahead = [], 0, 1
    for item in graph.items[graph.first[device] : graph.first[device + 1]]:
        if item.kind is Kind.E:
            waiting += 1
            ahead = max(ahead, waiting)
        elif item.kind is Kind.F and item.stage == order.placement.first_stage:
            waiting -= 1
            unit = unit_of(item, order.slices)
            rows.append([numbers[unit] for numbers in embedding if numbers])
    return rows, ahead


def _memory_plan(graph: Graph, base: Order, device: int, limit: int | None) -> MemoryPlan:
    """Return the plan of one device: its row of `base`."""
    at = graph.places[device].at
    parts = [part for item in base.passes(device) for part in parts_of(item) if part.kind in IN_FLIGHT]
    numbers = [at[part.kind, part.stage][unit_of(part, base.slices)] for part in parts]
    # So the first ready forward also comes first in the plan: no other one needs to be checked.
    forwards = [number for number, part in zip(numbers, parts, strict=True) if part.kind is Kind.F]
    assert all(map(lt, forwards, forwards[1:])), "forwards are in another order"
    return MemoryPlan(numbers, [IN_FLIGHT[part.kind] for part in parts], limit, base.placement.stages)


@dataclass(slots=True)
class _Queues:
    """What may run next.

    forwards, others: per device, heaps of ready passes. heap_of: by site, the heap for its passes. stored: by site,
    whether they count in the memory plan. entrance: by site, whether they are the first stage's forwards. free: whether
    each device is idle. asked: free devices that may have a new pass to start. events: a heap of ends of passes and
    arrivals of transfers.
    """

    forwards: list[list[int]]
    others: list[list[int]]
    heap_of: list[list[int]]
    stored: list[bool]
    entrance: list[bool]
    free: list[bool]
    asked: list[int]
    events: list[tuple[float, int]]

    @classmethod
    def of(cls, graph: Graph, first_stage: int) -> _Queues:
        """Return empty queues."""
        devices, sites = range(len(graph.places)), len(graph.waits)
        forwards: list[list[int]] = [[] for _ in devices]
        others: list[list[int]] = [[] for _ in devices]
        heap_of: list[list[int]] = [[] for _ in range(sites)]
        stored, entrance = [False] * sites, [False] * sites
        for device, here in enumerate(graph.places):
            for (kind, stage), numbers in here.at.items():
                at = graph.site[max(numbers)]
                heap_of[at] = (forwards if kind is Kind.F else others)[device]
                stored[at] = kind in IN_FLIGHT
                entrance[at] = kind is Kind.F and stage == first_stage
        return cls(forwards, others, heap_of, stored, entrance, [True] * len(devices), list(devices), [])


Met = Callable[[int], None]
"""Takes a pass."""
Complete = Callable[[int, float], None]
"""Takes a pass or transfer, and the time."""


def _counting(graph: Graph, links: _Links, queues: _Queues, takes: Sequence[float]) -> tuple[Met, Complete, Met]:
    """Return functions that count one need of a pass as met, process the end of a pass, and the arrival of a
    transfer."""
    passes, units = len(graph.items), graph.transfers.units
    site, offset, device_of, feeds = graph.site, graph.offset, graph.device_of, graph.feeds
    needs, followers, consumers, missing = links.needs, links.followers, links.consumers, graph.producers()
    heap_of, free, asked, events, beside = queues.heap_of, queues.free, queues.asked, queues.events, links.beside

    def met(number: int) -> None:
        needs[number] -= 1
        if needs[number] == 0:
            heappush(heap_of[site[number]], number)
            if free[device_of[number]]:
                asked.append(device_of[number])

    def complete(number: int, now: float) -> None:
        here, unit = site[number], offset[number]
        for waiting in followers[here]:
            met(waiting[unit])
        if beside and unit in beside[here]:
            met(beside[here][unit])
        for base in feeds[here]:
            transfer = base + unit
            missing[transfer - passes] -= 1
            if missing[transfer - passes] == 0:
                if takes[transfer] > 0:
                    heappush(events, (now + takes[transfer], transfer))
                else:
                    arrive(transfer)

    def arrive(transfer: int) -> None:
        route, unit = divmod(transfer - passes, units)
        for waiting in consumers[route]:
            met(waiting[unit])

    return met, complete, arrive


def _run(
    graph: Graph, links: _Links, plans: Sequence[MemoryPlan], takes: Sequence[float], *, first_stage: int
) -> list[list[int]]:
    """Return the passes of each device as they ran."""
    passes, site, device_of, devices = len(graph.items), graph.site, graph.device_of, len(plans)
    queues = _Queues.of(graph, first_stage)
    forwards, others, stored, entrance = queues.forwards, queues.others, queues.stored, queues.entrance
    free, asked, events = queues.free, queues.asked, queues.events
    met, complete, arrive = _counting(graph, links, queues, takes)
    held_back = iter(links.embedding[links.ahead :])
    rows: list[list[int]] = [[] for _ in range(devices)]
    # Events so close together happen at once: sums of the same times in another order differ by less.
    moment = 1e-9 * sum(takes[:passes]) / (devices * graph.transfers.units)

    def choose(device: int) -> list[int]:
        """Return the heap with the next pass of `device`; an empty one if it has to wait."""
        ready, first = others[device], forwards[device]
        if first and (not ready or first[0] < ready[0]) and plans[device].allows(first[0]):
            return first
        return ready

    def start(device: int, number: int) -> None:
        rows[device].append(number)
        here = site[number]
        if stored[here]:
            plans[device].run(number)
            if entrance[here]:
                for embedding in next(held_back, ()):
                    met(embedding)

    now = 0.0
    for number in range(passes):
        if links.needs[number] == 0:
            links.needs[number] = 1
            met(number)
    while True:
        while asked:
            # Passes without duration come first, on all devices: they may make preferred passes ready.
            choosing: dict[int, None] = {}
            while asked:
                device = asked.pop()
                if free[device]:
                    heap = choose(device)
                    while heap and takes[heap[0]] <= 0:
                        number = heappop(heap)
                        start(device, number)
                        complete(number, now)
                        heap = choose(device)
                    choosing[device] = None
            for device in choosing:
                heap = choose(device)
                if heap:
                    number = heappop(heap)
                    start(device, number)
                    free[device] = False
                    heappush(events, (now + takes[number], number))
        if not events:
            break
        until = events[0][0] + moment
        while events and events[0][0] <= until:
            now, number = heappop(events)
            if number < passes:
                device = device_of[number]
                free[device] = True
                asked.append(device)
                complete(number, now)
            else:
                arrive(number)
    assert sum(map(len, rows)) == passes, "list scheduling has completed"
    return rows


_UNPLANNED = OFFLOAD_KINDS | {Kind.R}
