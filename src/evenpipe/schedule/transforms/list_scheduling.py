"""List scheduling: each device runs the first ready pass of its row, even if earlier passes are not ready.

The event model simulates the step once. A free device starts the earliest pass of its row that has all its inputs. This
avoids waits that a fixed order cannot foresee; the price is forwards that run early, and activations that are held
longer. So a forward starts early only if the device stays within a limit: its `MemoryPlan`, made from an order that is
known to fit, must still hold.

List scheduling always completes. Take the order that the plans were made from, with each E directly before the forward
that needs it, and the other vocabulary passes directly after their needs. All passes can run sequentially in that
order. Its first pass that has not run has all its needs, and if it is a forward, it is the next one in its plan. So
some device can always continue.

E has no needs, but its rows are held until they are used. So it runs ahead of the forwards of the first stage only as
far as it does in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.numbered import ABSENT, Numbered
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import OFFLOAD_KINDS, Kind, Pass, parts_in
from evenpipe.schedule.rules import IN_FLIGHT, PassGroup
from evenpipe.schedule.timing import completed, timed
from evenpipe.schedule.walk import Completion, Walked, walk

from .memory_plan import MemoryPlan

Rows = Sequence[Sequence[int]]
"""Per device, the numbers of its passes in the order in which they run."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long an order takes: its longest span and its makespan."""

    span: float
    makespan: float

    @classmethod
    def of(cls, order: Order, costs: Costs) -> Length:
        """The length of `order` in the event model."""
        return cls.of_rows(timed(order, costs))

    @classmethod
    def of_rows(cls, walked: Walked) -> Length:
        """The length of a walked order."""
        ends = [(walked.start[row[0]], walked.end[row[-1]]) for row in walked.rows if row]
        first, last = min((start for start, _ in ends), default=0.0), max((end for _, end in ends), default=0.0)
        return cls(max((end - start for start, end in ends), default=0.0), last - first)

    def better_than(self, other: Length) -> bool:
        """Whether the span is shorter, or equal with a shorter makespan."""
        nothing = 1e-9 * self.makespan
        if abs(self.span - other.span) > nothing:
            return self.span < other.span
        return self.makespan < other.makespan - nothing


def list_schedule(priorities: Order, base: Order, limits: Sequence[int] | None, costs: Costs) -> Order | None:
    """The passes of `priorities`, run by the rules above within `limits` per device.

    `priorities` need not be sound; `base` must be sound, have the same passes except those of the vocabulary, and the
    forwards of a device in the same order, and never hold more than `limits`. Orders that only evaluate have no limits:
    a device runs at most as many forwards early as there are stages. Returns None if passes are missing, and if
    activations are offloaded or recomputed: then `priorities` decides which passes run early.
    """
    arranger = Arranger.of(priorities, base, limits)
    listed = arranger.listed(arranger.rows, arranger.numbered.durations(costs))
    return None if listed is None else arranger.order_of(listed)


@dataclass(frozen=True, slots=True)
class Arranger:
    """Arranges the passes of an order: the state that all its arrangements share.

    order: the passes of each row, in any order. plans: per device, the numbers of passes that store or release
    activations, in an order that fits, and the change of each; None if the order cannot be list-scheduled. limits: as
    for `list_schedule`.
    """

    order: Order
    numbered: Numbered
    plans: list[tuple[list[int], list[int]]] | None
    limits: Sequence[int] | None

    @classmethod
    def of(cls, order: Order, base: Order, limits: Sequence[int] | None) -> Arranger:
        """Arguments as for `list_schedule`."""
        numbered, plans = Numbered(order), None
        if _is_complete(numbered):
            plans = [_plan(numbered, base, device) for device in range(base.devices)]
        return cls(order, numbered, plans, limits)

    @property
    def rows(self) -> Rows:
        """The numbers of the passes of `order`."""
        return self.numbered.rows

    def order_of(self, rows: Rows) -> Order:
        """The order with these rows."""
        passes = []
        for device, row in enumerate(rows):
            item_of = dict(zip(self.numbered.rows[device], self.order.passes(device), strict=True))
            passes.append(tuple(map(item_of.__getitem__, row)))
        return replace(self.order, rows=tuple(passes))

    def length(self, rows: Rows, takes: Sequence[float]) -> Length:
        """The length of the order with these rows, which must be sound."""
        return Length.of_rows(completed(walk(self.numbered, Completion.DATA, takes, rows)))

    def listed(self, priorities: Rows, takes: Sequence[float], reserve: float = 0.0) -> Rows | None:
        """The rows of `list_schedule`, with every row of `priorities` from the highest to the lowest.

        takes: durations by number. reserve: extra time for every collective, because an order without any slack is
        short only on paper.
        """
        if self.plans is None:
            return None
        numbered = self.numbered
        if reserve:
            takes = list(takes)
            for route in numbered.rules.routes:
                if not route.is_hop:
                    positions = numbered.place_of(route)
                    takes[positions] = [time + reserve for time in takes[positions]]
        limits: Sequence[int | None] = [None] * self.order.devices if self.limits is None else self.limits
        stages = self.order.placement.stages
        plans = [MemoryPlan(*plan, limit, stages) for plan, limit in zip(self.plans, limits, strict=True)]
        return _run(numbered, priorities, plans, takes)


def _plan(numbered: Numbered, base: Order, device: int) -> tuple[list[int], list[int]]:
    """The plan of a device: its row of `base`."""
    items = [item for item in parts_in(base.rows[device]) if item.kind in IN_FLIGHT]
    numbers = [numbered.number(device, item) for item in items]
    return [number for number in numbers if number is not None], [IN_FLIGHT[item.kind] for item in items]


def _is_complete(numbered: Numbered) -> bool:
    """Whether every device has each of its passes once, and only F, B, I, W and vocabulary passes."""
    if numbered.separate or numbered.misplaced or numbered.repeated:
        return False
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
        if group.kind is Kind.W:
            row = numbered.schedule.rows[group.device]
            items = [item for item in row if isinstance(item, Pass) and item.stage == group.stage]
            units_of = {kind: {(i.microbatch, i.slice) for i in items if i.kind is kind} for kind in (Kind.I, Kind.W)}
            if units_of[Kind.I] != units_of[Kind.W]:
                return False
        elif ABSENT in position[first : first + units]:
            return False
    return True


def _held_back(numbered: Numbered, priorities: Rows, entrance: dict[int, list[int]]) -> list[list[int]]:
    """The E passes that wait until a forward of the first stage has run: the first entry waits for its first forward,
    and so on. The priorities of its device determine how far E may run ahead.

    entrance: by number of a forward of the first stage, the E passes of its unit on all devices.
    """
    embedding = {number for shards in entrance.values() for number in shards}
    waiting, ahead = 0, 1
    units = []
    for number in priorities[numbered.rules.placement.first_device]:
        if number in embedding:
            waiting += 1
            ahead = max(ahead, waiting)
        elif number in entrance:
            waiting -= 1
            units.append(entrance[number])
    return units[ahead:]


def _run(numbered: Numbered, priorities: Rows, plans: Sequence[MemoryPlan], takes: Sequence[float]) -> Rows:
    """The passes of each device in the order in which they ran."""
    groups, units, rule, feeds = numbered.groups, numbered.units, numbered.rule, numbered.feeds
    devices = range(len(plans))
    # --- dependencies
    needs = [len(numbered.needs[at]) if at >= 0 else 0 for at in rule[: numbered.passes]]
    needs = [count if at != ABSENT else NEVER for count, at in zip(needs, numbered.position, strict=True)]
    missing = [len(route.producers) for route in numbered.rules.routes for _ in range(units)]
    followers: list[list[int]] = [[] for _ in numbered.needs]  # by rule, steps to passes that wait for this pass
    consumers: list[list[int]] = [
        [] for _ in numbered.rules.routes
    ]  # by route, first numbers of groups that wait for it
    for group, first in groups.items():
        for number in range(first, first + numbered.slices):
            for step in numbered.needs[rule[number]]:
                if number + step >= 0:
                    followers[rule[number + step]].append(-step)
        for route in numbered.rules.rule(group).waits:
            consumers[route.number].append(first)
    placement = numbered.rules.placement
    shards = [first for group, first in groups.items() if group.kind is Kind.E]
    forward = groups[PassGroup(placement.first_device, Kind.F, placement.first_stage)]
    entrance = {forward + unit: [first + unit for first in shards] for unit in range(units)}
    embedding = _held_back(numbered, priorities, entrance)
    for number in chain.from_iterable(embedding):
        needs[number] += 1
    held_back = iter(embedding)
    # --- passes that may run next, by rank: their index in the concatenated priorities
    ranked = list(chain.from_iterable(priorities))
    rank_of = [0] * numbered.passes
    for rank, number in enumerate(ranked):
        rank_of[number] = rank
    forward_heaps: list[list[int]] = [[] for _ in devices]  # heaps of ranks of ready passes
    other_heaps: list[list[int]] = [[] for _ in devices]
    heaps = [(forward_heaps if group.kind is Kind.F else other_heaps)[group.device] for group in groups]
    device_of = [group.device for group in groups]
    free = [True for _ in devices]
    rows: list[list[int]] = [[] for _ in devices]
    idle_devices = list(devices)  # free devices that may have a new ready pass
    events: list[tuple[float, int]] = []  # ends of passes, by rank; arrivals of transfers, with numbers above all ranks

    def met(number: int) -> None:
        """Count one need of a pass as met."""
        needs[number] = left = needs[number] - 1
        if not left:
            group = number // units
            heappush(heaps[group], rank_of[number])
            if free[device_of[group]]:
                idle_devices.append(device_of[group])

    def complete(number: int, now: float) -> None:
        """End a pass."""
        for step in followers[rule[number]]:
            met(number + step)
        for step in feeds[rule[number]]:
            transfer = number + step
            missing[transfer] -= 1
            if not missing[transfer]:
                if takes[transfer] > 0:
                    heappush(events, (now + takes[transfer], len(ranked) + len(missing) + transfer))
                else:
                    arrive(len(missing) + transfer)

    def arrive(transfer: int) -> None:
        """End a transfer, with its number among all transfers."""
        route, unit = divmod(transfer, units)
        for first in consumers[route]:
            met(first + unit)

    def choose(device: int) -> list[int]:
        """The heap with the next pass of `device`; an empty one if it has to wait. If its first ready forward has to
        wait, so do the others, which come later in the plan."""
        first_other, first_forward = other_heaps[device], forward_heaps[device]
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

    durations = [takes[number] for number in ranked]
    # Events this close together count as simultaneous: sums of the same times in another order differ by less.
    tolerance = 1e-9 * sum(durations) / (len(plans) * units)
    some_take_nothing = min(durations) <= 0
    now = 0.0
    for number in chain.from_iterable(numbered.rows):
        if not needs[number]:
            needs[number] = 1
            met(number)
    while True:
        while idle_devices:
            # Passes without duration come first, on all devices: they may make preferred passes ready.
            choosing: dict[int, None] = {}
            while idle_devices:
                device = idle_devices.pop()
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
                    start(device, ranked[rank])
                    free[device] = False
                    heappush(events, (now + takes[ranked[rank]], rank))
        if not events:
            break
        until = events[0][0] + tolerance
        while events and events[0][0] <= until:
            now, rank = heappop(events)
            if rank < len(ranked):
                device = device_of[ranked[rank] // units]
                free[device] = True
                idle_devices.append(device)
                complete(ranked[rank], now)
            else:
                arrive(rank - len(ranked))
    assert sum(map(len, rows)) == len(ranked), "list scheduling has completed"
    return rows


NEVER = 1 << 30
"""Number of needs of an absent pass."""
