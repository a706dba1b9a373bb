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
from itertools import chain

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.numbered import ABSENT, Numbered
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import OFFLOAD_KINDS, Kind, Pass, parts_of
from evenpipe.schedule.rules import IN_FLIGHT, PassGroup
from evenpipe.schedule.timing import completed, timed
from evenpipe.schedule.walk import Completion, Walked, walk

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
        return cls.of_rows(timed(order, costs))

    @classmethod
    def of_rows(cls, walked: Walked) -> Length:
        """Return the length of an order that has been walked."""
        ends = [(walked.start[row[0]], walked.end[row[-1]]) for row in walked.rows if row]
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
    listed = arranger.listed(arranger.rows, arranger.numbered.durations(costs), reserve)
    return None if listed is None else arranger.order_of(listed)


@dataclass(frozen=True, slots=True)
class Arranger:
    """Arranges the passes of an order: what all its arrangements share.

    order: the passes of each row, in no order. plans: per device, the numbers of passes that store or release, in an
    order that fits, and what each adds. limits: as for `list_schedule`.
    """

    order: Order
    numbered: Numbered
    links: _Links | None
    plans: list[tuple[list[int], list[int]]]
    limits: Sequence[int] | None

    @classmethod
    def of(cls, order: Order, base: Order, limits: Sequence[int] | None) -> Arranger:
        """Arguments as for `list_schedule`."""
        numbered = Numbered(order)
        links = _Links.of(numbered)
        plans = [] if links is None else [_plan(numbered, base, device) for device in range(base.devices)]
        return cls(order, numbered, links, plans, limits)

    @property
    def rows(self) -> Rows:
        """The numbers of the passes of `order`."""
        return self.numbered.rows

    def order_of(self, rows: Rows) -> Order:
        """Return the order with these rows."""
        passes = []
        for device, row in enumerate(rows):
            item_of = dict(zip(self.numbered.rows[device], self.order.passes(device), strict=True))
            passes.append(tuple(map(item_of.__getitem__, row)))
        return replace(self.order, rows=tuple(passes))

    def length(self, rows: Rows, takes: Sequence[float]) -> Length:
        """Return the length of the order with these rows, which must be sound."""
        return Length.of_rows(completed(walk(self.numbered, Completion.DATA, takes, rows)))

    def listed(self, wishes: Rows, takes: Sequence[float], reserve: float = 0.0) -> Rows | None:
        """Return the rows of `list_schedule` for rows of wishes; `takes` has durations by number."""
        if self.links is None:
            return None
        numbered = self.numbered
        if reserve:
            takes = list(takes)
            for route in numbered.rules.routes:
                if not route.is_hop:
                    first = numbered.size - numbered.transfers + route.number * numbered.units
                    last = first + numbered.units
                    takes[first:last] = [time + reserve for time in takes[first:last]]
        most: Sequence[int | None] = [None] * self.order.devices if self.limits is None else self.limits
        stages = self.order.placement.stages
        plans = [MemoryPlan(*plan, limit, stages) for plan, limit in zip(self.plans, most, strict=True)]
        return _run(numbered, self.links, wishes, plans, takes)


def _plan(numbered: Numbered, base: Order, device: int) -> tuple[list[int], list[int]]:
    """Return the plan of one device: its row of `base`."""
    parts = [part for item in base.passes(device) for part in parts_of(item) if part.kind in IN_FLIGHT]
    numbers = [numbered.number(device, part) for part in parts]
    return [number for number in numbers if number is not None], [IN_FLIGHT[part.kind] for part in parts]


@dataclass(frozen=True, slots=True)
class _Links:
    """Which pass waits for which.

    device_of: by number of a pass. needs: by number of a pass, how many passes and transfers it waits for. followers:
    by rule, steps to passes that wait for such a pass. consumers: by route, the first numbers of groups that wait for
    its transfers. entrance: by number of a forward of the first stage, the E passes of its unit on all devices.
    """

    device_of: list[int]
    needs: list[int]
    followers: list[tuple[int, ...]]
    consumers: list[list[int]]
    entrance: dict[int, list[int]]

    @classmethod
    def of(cls, numbered: Numbered) -> _Links | None:
        """Return the links of an order that has every pass once, without offload or recomputation; else None."""
        if numbered.apart or numbered.misplaced or numbered.repeated or not _is_complete(numbered):
            return None
        units, slices, position = numbered.units, numbered.slices, numbered.position
        needs = [len(numbered.needs[rule]) if rule >= 0 else 0 for rule in numbered.rule[: numbered.passes]]
        needs = [count if at != ABSENT else NEVER for count, at in zip(needs, position, strict=True)]
        device_of = [group.device for group in numbered.groups for _ in range(units)]
        followers: list[list[int]] = [[] for _ in numbered.needs]
        consumers: list[list[int]] = [[] for _ in numbered.rules.routes]
        for group, first in numbered.groups.items():
            for slice_ in range(slices):
                for step in numbered.needs[numbered.rule[first + slice_]]:
                    if first + slice_ + step >= 0:
                        followers[numbered.rule[first + slice_ + step]].append(-step)
            for route in numbered.rules.rule(group).waits:
                consumers[route.number].append(first)
        placement = numbered.schedule.placement
        embedding = [first for group, first in numbered.groups.items() if group.kind is Kind.E]
        forwards = numbered.groups[PassGroup(placement.first_device, Kind.F, placement.first_stage)]
        entrance = {forwards + unit: [first + unit for first in embedding] for unit in range(units)}
        return cls(device_of, needs, list(map(tuple, followers)), consumers, entrance)

    def held_back(self, wishes: Rows) -> list[list[int]]:
        """Return the E passes that wait until a forward of the first stage has run: the first ones for its first
        forward, and so on. The wishes of its device show how far E may be ahead."""
        device = self.device_of[next(iter(self.entrance))]
        embedding = {number for shards in self.entrance.values() for number in shards}
        waiting, ahead = 0, 1
        units = []
        for number in wishes[device]:
            if number in embedding:
                waiting += 1
                ahead = max(ahead, waiting)
            elif number in self.entrance:
                waiting -= 1
                units.append(self.entrance[number])
        return units[ahead:]


def _is_complete(numbered: Numbered) -> bool:
    """Return whether every device has each of its passes once, and no others than F, B, I, W and vocabulary passes."""
    position, units, rules = numbered.position, numbered.units, numbered.rules
    placement = rules.placement
    kinds = (Kind.F,) if rules.forward_only else (Kind.F, Kind.B)
    needed = {PassGroup(device, kind, stage) for stage, device in enumerate(placement.stage_device) for kind in kinds}
    needed |= {PassGroup(device, kind) for kind in rules.vocabulary_kinds for device in range(placement.devices)}
    if needed - numbered.groups.keys():
        return False
    for group, first in numbered.groups.items():
        if group.kind in OFFLOAD_KINDS or group.kind is Kind.R:
            return False
        there = [at != ABSENT for at in position[first : first + units]]
        if group.kind is not Kind.W and not all(there):
            return False
        if group.kind is Kind.W:
            row = numbered.schedule.rows[group.device]
            items = [item for item in row if isinstance(item, Pass) and item.stage == group.stage]
            units_of = {kind: {(i.microbatch, i.slice) for i in items if i.kind is kind} for kind in (Kind.I, Kind.W)}
            if units_of[Kind.I] != units_of[Kind.W]:
                return False
    return True


class _Queues:
    """What may run next.

    rank: by number of a pass, its place among all wishes. ranked: numbers by rank. forwards, others: per device, heaps
    of ranks of ready passes. free: whether each device is idle. asked: free devices that may have a new pass to start.
    events: a heap of ends of passes, with their ranks, and arrivals of transfers, with numbers above all ranks.
    """

    def __init__(self, numbered: Numbered, wishes: Rows) -> None:
        self.ranked = list(chain.from_iterable(wishes))
        self.rank = [0] * numbered.passes
        for place, number in enumerate(self.ranked):
            self.rank[number] = place
        devices = range(len(wishes))
        self.forwards: list[list[int]] = [[] for _ in devices]
        self.others: list[list[int]] = [[] for _ in devices]
        heaps = [(self.forwards if group.kind is Kind.F else self.others)[group.device] for group in numbered.groups]
        self.heap_of = [heap for heap in heaps for _ in range(numbered.units)]
        self.free = [True] * len(devices)
        self.asked = list(devices)
        self.events: list[tuple[float, int]] = []


Met = Callable[[int], None]
"""Takes a pass."""
Complete = Callable[[int, float], None]
"""Takes a pass and the time."""
Arrive = Callable[[int], None]
"""Takes a transfer."""


def _counting(
    numbered: Numbered, links: _Links, queues: _Queues, needs: list[int], takes: Sequence[float]
) -> tuple[Met, Complete, Arrive]:
    """Return functions that count one need of a pass as met, process the end of a pass, and the arrival of a
    transfer."""
    units, first_transfer, rule, feeds = numbered.units, len(queues.ranked), numbered.rule, numbered.feeds
    device_of, followers, consumers = links.device_of, links.followers, links.consumers
    missing = [len(route.producers) for route in numbered.rules.routes for _ in range(units)]
    rank, heap_of, free, asked, events = queues.rank, queues.heap_of, queues.free, queues.asked, queues.events

    def met(number: int) -> None:
        needs[number] = left = needs[number] - 1
        if not left:
            heappush(heap_of[number], rank[number])
            if free[device_of[number]]:
                asked.append(device_of[number])

    def complete(number: int, now: float) -> None:
        here = rule[number]
        for step in followers[here]:
            met(number + step)
        for step in feeds[here]:
            transfer = number + step
            missing[transfer] -= 1
            if not missing[transfer]:
                if takes[transfer] > 0:
                    heappush(events, (now + takes[transfer], first_transfer + transfer + len(missing)))
                else:
                    arrive(transfer + len(missing))

    def arrive(transfer: int) -> None:
        route, unit = divmod(transfer, units)
        for waiting in consumers[route]:
            met(waiting + unit)

    return met, complete, arrive


def _run(numbered: Numbered, links: _Links, wishes: Rows, plans: Sequence[MemoryPlan], takes: Sequence[float]) -> Rows:
    """Return the passes of each device as they ran."""
    devices, device_of = len(plans), links.device_of
    queues = _Queues(numbered, wishes)
    ranked, forwards, others = queues.ranked, queues.forwards, queues.others
    free, asked, events = queues.free, queues.asked, queues.events
    needs, entrance = list(links.needs), links.entrance
    embedding = links.held_back(wishes)
    for number in chain.from_iterable(embedding):
        needs[number] += 1
    held_back = iter(embedding)
    met, complete, arrive = _counting(numbered, links, queues, needs, takes)
    rows: list[list[int]] = [[] for _ in range(devices)]
    # Events so close together happen at once: sums of the same times in another order differ by less.
    of_passes = [takes[number] for number in ranked]
    moment = 1e-9 * sum(of_passes) / (devices * numbered.units)
    some_take_nothing = min(of_passes) <= 0

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
        plans[device].run(number)
        if number in entrance:
            for waiting in next(held_back, ()):
                met(waiting)

    now = 0.0
    for number in chain.from_iterable(numbered.rows):
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
            if rank < len(ranked):
                number = ranked[rank]
                device = device_of[number]
                free[device] = True
                asked.append(device)
                complete(number, now)
            else:
                arrive(rank - len(ranked))
    assert sum(map(len, rows)) == len(ranked), "list scheduling has completed"
    return rows


NEVER = 1 << 30
"""Needs of a pass that is not there."""
