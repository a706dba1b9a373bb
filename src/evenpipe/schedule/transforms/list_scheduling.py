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
from itertools import chain, pairwise

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.dependencies import Dependencies
from evenpipe.schedule.effects import IN_FLIGHT
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import HOP_KINDS, OFFLOAD_KINDS, ROLE, Kind, parts_of, unit_of
from evenpipe.schedule.places import ABSENT, Places, having
from evenpipe.schedule.timing import EventTimes, durations, run, timed

from .memory_plan import MemoryPlan

Rows = Sequence[Sequence[int]]
"""Per device, the numbers of its passes as they run."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long an order takes: its longest span and its makespan."""

    span: float
    makespan: float

    @classmethod
    def of(cls, order: Order, costs: Costs) -> Length:
        """Return the length of `order` in the event model."""
        graph, times = timed(order, costs)
        return cls.between([range(*ends) for ends in pairwise(graph.first)], times)

    @classmethod
    def between(cls, rows: Rows, times: EventTimes) -> Length:
        """Return the length of an order with these rows, timed."""
        ends = [(times.start[row[0]], times.end[row[-1]]) for row in rows if row]
        first, last = min((start for start, _ in ends), default=0.0), max((end for _, end in ends), default=0.0)
        return cls(max((end - start for start, end in ends), default=0.0), last - first)

    def better_than(self, other: Length) -> bool:
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
    arranger = Arranger.of(wishes, base, limits)
    rows = [range(*ends) for ends in pairwise(arranger.graph.first)]
    listed = arranger.listed(rows, arranger.durations(costs), reserve)
    return None if listed is None else arranger.order_of(listed)


@dataclass(frozen=True, slots=True)
class Arranger:
    """Arranges the passes of an order, which have numbers in its graph: what all its arrangements share.

    order: the passes of each row, in no order. plans: per device, the numbers of passes that store or release, in an
    order that fits, and what each adds. limits: as for `list_schedule`.
    """

    order: Order
    graph: Graph
    links: _Links | None
    plans: list[tuple[list[int], list[int]]]
    limits: Sequence[int] | None

    @classmethod
    def of(cls, order: Order, base: Order, limits: Sequence[int] | None) -> Arranger:
        """Arguments as for `list_schedule`."""
        graph = Graph.of(order, in_order=False)
        links = _Links.of(order, graph)
        plans = [] if links is None else [_plan(graph, base, device) for device in range(base.devices)]
        return cls(order, graph, links, plans, limits)

    def durations(self, costs: Costs) -> list[float]:
        """Return the duration of everything in the graph, by number."""
        return durations(self.order, self.graph, costs)

    def order_of(self, rows: Rows) -> Order:
        """Return the order with these rows."""
        return replace(self.order, rows=tuple(tuple(map(self.graph.items.__getitem__, row)) for row in rows))

    def length(self, rows: Rows, takes: Sequence[float]) -> Length:
        """Return the length of the order with these rows, which must be sound."""
        return Length.between(rows, run(self.order, self.graph, takes, rows))

    def listed(self, wishes: Rows, takes: Sequence[float], reserve: float = 0.0) -> Rows | None:
        """Return the rows of `list_schedule` for rows of wishes; `takes` has durations by number."""
        if self.links is None:
            return None
        if reserve:
            takes = list(takes)
            for route, numbers in self.graph.transfers.by_route():
                if route.kind not in HOP_KINDS:
                    takes[numbers.start : numbers.stop] = [
                        time + reserve for time in takes[numbers.start : numbers.stop]
                    ]
        most: Sequence[int | None] = [None] * self.order.devices if self.limits is None else self.limits
        stages = self.order.placement.stages
        plans = [MemoryPlan(*plan, limit, stages) for plan, limit in zip(self.plans, most, strict=True)]
        return _run(self.graph, self.links, wishes, plans, takes)


def _plan(graph: Graph, base: Order, device: int) -> tuple[list[int], list[int]]:
    """Return the plan of one device: its row of `base`."""
    at = graph.places[device].at
    parts = [part for item in base.passes(device) for part in parts_of(item) if part.kind in IN_FLIGHT]
    numbers = [at[part.kind, part.stage][unit_of(part, base.slices)] for part in parts]
    return numbers, [IN_FLIGHT[part.kind] for part in parts]


@dataclass(frozen=True, slots=True)
class _Links:
    """Which pass waits for which, in a graph whose rows may be reordered.

    needs: by pass, the number of passes of its own row and transfers that it waits for. followers: by site, and
    consumers: by route, the numbers of the waiting passes by unit. beside: by site and unit, the pass that waits in
    another slice of the sequence; empty if sequences are not cut. entrance: by number of a forward of the first stage,
    the E passes of its unit on all devices.
    """

    needs: bytes
    followers: list[list[list[int]]]
    consumers: list[list[list[int]]]
    beside: list[dict[int, int]]
    entrance: dict[int, list[int]]

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
        forwards = graph.places[order.placement.first_device].at.get((Kind.F, order.placement.first_stage), [])
        embedding = [here.at[Kind.E, None] for here in graph.places if (Kind.E, None) in here.at]
        entrance = {number: [shards[unit] for shards in embedding] for unit, number in enumerate(forwards)}
        return cls(bytes(needs), followers, consumers, beside, entrance)

    def held_back(self, graph: Graph, wishes: Rows) -> list[list[int]]:
        """Return the E passes that wait until a forward of the first stage has run: the first ones for its first
        forward, and so on. The wishes of its device show how far E may be ahead."""
        waiting, ahead = 0, 1
        units = []
        for number in wishes[graph.device_of[next(iter(self.entrance))]] if self.entrance else ():
            if graph.items[number].kind is Kind.E:
                waiting += 1
                ahead = max(ahead, waiting)
            elif number in self.entrance:
                waiting -= 1
                units.append(self.entrance[number])
        return units[ahead:]


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


@dataclass(slots=True)
class _Queues:
    """What may run next.

    rank: by number of a pass, its place among all wishes. ranked: numbers by rank. forwards, others: per device, heaps
    of ranks of ready passes. heap_of: by site, the heap for its passes. stored: by site, whether they count in the
    memory plan. free: whether each device is idle. asked: free devices that may have a new pass to start. events: a
    heap of ends of passes, with their ranks, and arrivals of transfers, with their numbers: they are above all ranks.
    """

    rank: list[int]
    ranked: list[int]
    forwards: list[list[int]]
    others: list[list[int]]
    heap_of: list[list[int]]
    stored: list[bool]
    free: list[bool]
    asked: list[int]
    events: list[tuple[float, int]]

    @classmethod
    def of(cls, graph: Graph, wishes: Rows) -> _Queues:
        """Return empty queues."""
        ranked = list(chain.from_iterable(wishes))
        rank = [0] * len(ranked)
        for place, number in enumerate(ranked):
            rank[number] = place
        devices, sites = range(len(graph.places)), len(graph.waits)
        forwards: list[list[int]] = [[] for _ in devices]
        others: list[list[int]] = [[] for _ in devices]
        heap_of: list[list[int]] = [[] for _ in range(sites)]
        stored = [False] * sites
        for device, here in enumerate(graph.places):
            for (kind, _), numbers in here.at.items():
                at = graph.site[max(numbers)]
                heap_of[at] = (forwards if kind is Kind.F else others)[device]
                stored[at] = kind in IN_FLIGHT
        return cls(rank, ranked, forwards, others, heap_of, stored, [True] * len(devices), list(devices), [])


Met = Callable[[int], None]
"""Takes a pass."""
Complete = Callable[[int, float], None]
"""Takes a pass and the time."""
Arrive = Callable[[int], None]
"""Takes a transfer."""


def _counting(
    graph: Graph, links: _Links, queues: _Queues, needs: bytearray, takes: Sequence[float]
) -> tuple[Met, Complete, Arrive]:
    """Return functions that count one need of a pass as met, process the end of a pass, and the arrival of a
    transfer."""
    passes, units = len(graph.items), graph.transfers.units
    site, offset, device_of, feeds = graph.site, graph.offset, graph.device_of, graph.feeds
    followers, consumers, beside = links.followers, links.consumers, links.beside
    missing = [0] * passes + graph.producers()
    rank, heap_of, free, asked, events = queues.rank, queues.heap_of, queues.free, queues.asked, queues.events

    def met(number: int) -> None:
        needs[number] = left = needs[number] - 1
        if not left:
            heappush(heap_of[site[number]], rank[number])
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
            missing[transfer] -= 1
            if not missing[transfer]:
                if takes[transfer] > 0:
                    heappush(events, (now + takes[transfer], transfer))
                else:
                    arrive(transfer)

    def arrive(transfer: int) -> None:
        route, unit = divmod(transfer - passes, units)
        for waiting in consumers[route]:
            met(waiting[unit])

    return met, complete, arrive


def _run(graph: Graph, links: _Links, wishes: Rows, plans: Sequence[MemoryPlan], takes: Sequence[float]) -> Rows:
    """Return the passes of each device as they ran."""
    passes, site, device_of, devices = len(graph.items), graph.site, graph.device_of, len(plans)
    queues = _Queues.of(graph, wishes)
    ranked, forwards, others, stored = queues.ranked, queues.forwards, queues.others, queues.stored
    free, asked, events = queues.free, queues.asked, queues.events
    needs, entrance = bytearray(links.needs), links.entrance
    embedding = links.held_back(graph, wishes)
    for number in chain.from_iterable(embedding):
        needs[number] += 1
    held_back = iter(embedding)
    met, complete, arrive = _counting(graph, links, queues, needs, takes)
    rows: list[list[int]] = [[] for _ in range(devices)]
    # Events so close together happen at once: sums of the same times in another order differ by less.
    moment = 1e-9 * sum(takes[:passes]) / (devices * graph.transfers.units)
    some_take_nothing = min(takes[:passes]) <= 0

    def choose(device: int) -> list[int]:
        """Return the heap with the next pass of `device`; an empty one if it has to wait. If its first ready forward
        has to, so have the others, which come later in the plan, too."""
        first_other, first_forward = others[device], forwards[device]
        if (
            first_forward
            and (not first_other or first_forward[0] < first_other[0])
            and plans[device].allows(ranked[first_forward[0]])
        ):
            return first_forward
        return first_other

    def start(device: int, number: int) -> None:
        rows[device].append(number)
        if stored[site[number]]:
            plans[device].run(number)
            if number in entrance:
                for waiting in next(held_back, ()):
                    met(waiting)

    now = 0.0
    for number in range(passes):
        if not needs[number]:
            needs[number] = 1
            met(number)
    while True:
        while asked:
            # Passes without duration come first, on all devices: they may make preferred passes ready.
            choosing: dict[int, None] = {}
            while asked:
                device = asked.pop()
                if free[device]:
                    heap = choose(device) if some_take_nothing else ()
                    while heap and takes[ranked[heap[0]]] <= 0:
                        number = ranked[heappop(heap)]
                        start(device, number)
                        complete(number, now)
                        heap = choose(device)
                    choosing[device] = None
            for device in choosing:
                heap = choose(device)
                if heap:
                    rank = heappop(heap)
                    number = ranked[rank]
                    start(device, number)
                    free[device] = False
                    heappush(events, (now + takes[number], rank))
        if not events:
            break
        until = events[0][0] + moment
        while events and events[0][0] <= until:
            now, rank = heappop(events)
            if rank < passes:
                number = ranked[rank]
                device = device_of[number]
                free[device] = True
                asked.append(device)
                complete(number, now)
            else:
                arrive(rank)
    assert sum(map(len, rows)) == passes, "list scheduling has completed"
    return rows


_UNPLANNED = OFFLOAD_KINDS | {Kind.R}
