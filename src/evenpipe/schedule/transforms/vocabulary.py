"""The vocabulary transform: put the passes of sharded embedding and output layers into any order.

Every pass of the base order has a virtual time, its start when the base order runs alone. From there, with k barriers
and the interval (the work of the busiest device per microbatch):

    B, I, W     k intervals later, which makes room between the last stage's F and its B
    S(i)        at the end of F(last, i)
    C(i)        half an interval after S(i); with one barrier only
    T(i)        one interval after S(i)
    E(i)        one interval before F(first, i)
    G(i)        one interval after B(first, i) as moved

Each device sorted by virtual time is a correct order: no pass has an earlier time than what it needs, and where times
are equal all devices rank passes alike. With equal costs and microbatches enough, the peak of a device grows by exactly
k stage activations per stage that it holds. With unequal costs it may grow by more, and devices may wait for each other
in every interval anew. So virtual times are also taken as wishes for `list_schedule`, in which each device runs the
earliest pass that is ready, within that peak. The better of the two is the result: the one that keeps the peak, then
the one with the shorter span, then with the shorter step.

An order for evaluation gets E, S and C, and C(i) an interval after S(i): nobody waits for it, and the statistics have
all the time until then. It is sorted, as it holds nothing and every device has all its work as soon as it comes.

E and G put every device to work from the first moment of the step to the last: the span of a schedule whose devices
start and end at different times (zb-h1, zb-h2, zbv) grows to its makespan.

Source: arXiv 2411.05288, section 5 (building blocks and their intervals) and appendix C (embedding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import SHARDING_KINDS, VOCABULARY_KINDS, Kind, Pass, parts_of
from evenpipe.schedule.timeline import peak_activations
from evenpipe.schedule.timing import Run, durations, run

from .list_scheduling import Listed, list_schedule

MOVED = frozenset({Kind.B, Kind.I, Kind.W, Kind.R, Kind.L})
"""Passes that follow from the backward of the last stage, or prepare for what does."""

INTERVAL = 2**20
"""Virtual times are whole numbers, so many to an interval: rounding does not break ties, and half of it is exact."""

FIXED: Mapping[int, Mapping[Kind, int]] = {
    0: {Kind.E: 0, Kind.S: 2, Kind.C: 3},
    1: {Kind.E: 0, Kind.C: 2, Kind.S: 3, Kind.T: 4, Kind.G: 5},
    2: {Kind.E: 0, Kind.T: 2, Kind.S: 3, Kind.G: 4},
}
"""Ranks of what wants the same time in a fixed order, by number of barriers, 0 for evaluation. Passes of the base order
have 1. E comes before them: it needs nothing, and its rows have a way to go. The others come behind: first what the
backward of the last stage waits for, then S, then what nobody waits for."""

EAGER: Mapping[int, Mapping[Kind, int]] = {
    1: {Kind.E: 0, Kind.C: 0, Kind.S: 0, Kind.T: 4, Kind.G: 5},
    2: {Kind.E: 0, Kind.T: 0, Kind.S: 0, Kind.G: 4},
}
"""The same for a list, where nobody stands and waits: what others wait for comes first."""


def add_vocabulary(order: Order, barriers: int, costs: Costs | None = None) -> Order:
    """`order` with E, S, C, T and G on every device, and 1 barrier (vocab-2) or 2 (vocab-1).

    An order that only evaluates gets E, S and C; its barrier is one.
    `costs` (equal stages by default) decide where passes stand; vocabulary passes without a time there take none.
    No device holds more stage activations than `order` has it hold, and one per barrier and stage of the device;
    unless `order` offloads or recomputes: such orders are sorted in any case.
    Raises InputError when the order already has vocabulary passes or has torch's sharding passes, when it takes no
    time, and for another number of barriers.
    """
    if barriers not in ((1,) if order.forward_only else (1, 2)):
        accepted = "1, as for every evaluation" if order.forward_only else "1 (vocab-2) or 2 (vocab-1)"
        raise InputError(f"barriers must be {accepted}, not {barriers}")
    costs = EQUAL_COSTS if costs is None else costs
    missing: dict[str, Any] = {kind.value: 0 for kind in VOCABULARY_KINDS if getattr(costs, kind.value) is None}
    costs = replace(costs, **missing)
    times = VirtualTimes.of(order, barriers, costs)
    by_time = times.sort(FIXED)
    if order.forward_only:
        return by_time
    limits = peak_limits(order, barriers)
    listed = list_schedule(times.sort(EAGER), order, limits, costs)
    if listed is None or (_keeps(by_time, limits) and not _shorter(listed, by_time, costs)):
        return by_time
    return listed.order


def peak_limits(order: Order, barriers: int) -> list[int]:
    """Per device, the stage activations it may hold: those of `order`, and one per barrier and stage of the device."""
    stages = map(order.placement.stages_of, range(order.devices))
    return [int(peak_activations(order.passes(device))) + barriers * len(held) for device, held in enumerate(stages)]


def _keeps(order: Order, limits: list[int]) -> bool:
    return all(peak_activations(order.passes(device)) <= limit for device, limit in enumerate(limits))


def _shorter(listed: Listed, order: Order, costs: Costs) -> bool:
    """Whether `listed` has a shorter span than `order`, or the same and a shorter makespan."""
    graph = Graph.of(order)
    times = run(order, graph, durations(order, graph, costs))
    starts = [times.start[number] for number in graph.first[:-1]]
    ends = [times.end[number - 1] for number in graph.first[1:]]
    span, makespan = max(end - start for start, end in zip(starts, ends, strict=True)), max(ends) - min(starts)
    nothing = 1e-9 * makespan
    if abs(listed.span - span) > nothing:
        return listed.span < span
    return listed.makespan < makespan - nothing


@dataclass(frozen=True, slots=True)
class VirtualTimes:
    """Where every pass wants to stand.

    passes: every pass once: those of the base order as the event model ran them, then one per kind and microbatch of
    the vocabulary passes, which all devices share. base: per device, the places of its own, where a place is one whole
    number, of time, rank and index in `passes`, which sorts as passes should stand. vocabulary: (time, kind, index).
    """

    order: Order
    barriers: int
    passes: list[Pass]
    base: list[list[int]]
    vocabulary: list[tuple[int, Kind, int]]

    @classmethod
    def of(cls, order: Order, barriers: int, costs: Costs) -> VirtualTimes:
        """Those of `order` by the rules above."""
        if order.barriers:
            raise InputError(f"the order has vocabulary passes already, with {order.barriers} barriers")
        graph = Graph.of(order)
        if any(item.kind in SHARDING_KINDS for item in graph.items):
            raise InputError("vocabulary passes cannot be added between UNSHARD, RESHARD and REDUCE_GRAD")
        times = run(order, graph, durations(order, graph, costs))
        interval = interval_of(order, graph, times)
        if interval <= 0:
            raise InputError("costs: F and B of at least one stage must be above 0 to place vocabulary passes")
        unit = INTERVAL / interval
        passes: list[Pass] = []
        base: list[list[int]] = [[] for _ in range(order.devices)]
        companions: list[tuple[int, Pass]] = []
        delay = barriers * INTERVAL
        for number in times.happened:
            if number >= len(graph.items):
                continue
            row = base[graph.device_of[number]]
            for part in parts_of(graph.items[number]):
                start = round(times.start[number] * unit)
                if part.kind in MOVED:
                    start += delay
                if part.stage in (0, order.placement.stages - 1):
                    end = round(times.end[number] * unit)
                    companions += _companions(part, start, end, order, barriers)
                row.append((start * _RANKS + 1) << _INDEX_BITS | len(passes))
                passes.append(part)
        vocabulary = [(time, item.kind, index) for index, (time, item) in enumerate(companions, len(passes))]
        passes += [item for _, item in companions]
        return cls(order, barriers, passes, base, vocabulary)

    def sort(self, ranks: Mapping[int, Mapping[Kind, int]]) -> Order:
        """Each device's passes by virtual time, then by rank; what is equal in both stands as it happened."""
        rank = ranks[0 if self.order.forward_only else self.barriers]
        vocabulary = sorted((time * _RANKS + rank[kind]) << _INDEX_BITS | at for time, kind, at in self.vocabulary)
        rows, at = [], (1 << _INDEX_BITS) - 1
        for base in self.base:
            rows.append(tuple([self.passes[place & at] for place in sorted(base + vocabulary)]))
        return Order(self.order.placement, self.order.microbatches, tuple(rows), self.barriers, self.order.forward_only)


def _companions(part: Pass, start: int, end: int, order: Order, barriers: int) -> Iterator[tuple[int, Pass]]:
    """Time and pass of each vocabulary pass that goes by `part`, which runs from `start` to `end`."""
    microbatch = part.microbatch
    if part.kind is Kind.F and part.stage == 0:
        yield start - INTERVAL, Pass(Kind.E, None, microbatch)
    if part.kind is Kind.F and part.stage == order.placement.stages - 1:
        yield end, Pass(Kind.S, None, microbatch)
        if order.forward_only:
            yield end + INTERVAL, Pass(Kind.C, None, microbatch)
            return
        yield end + INTERVAL, Pass(Kind.T, None, microbatch)
        if barriers == 1:
            yield end + INTERVAL // 2, Pass(Kind.C, None, microbatch)
    if part.kind in {Kind.B, Kind.I} and part.stage == 0:
        yield start + INTERVAL, Pass(Kind.G, None, microbatch)


def interval_of(order: Order, graph: Graph, times: Run) -> float:
    """Work of the busiest device per microbatch."""
    work = [0.0] * order.devices
    for number, device in enumerate(graph.device_of):
        work[device] += times.end[number] - times.start[number]
    return max(work) / order.microbatches


_RANKS = 8
_INDEX_BITS = 32
