"""The vocabulary transform: put the passes of sharded embedding and output layers into any order.

Every pass of the base order has a virtual time, its start when the base order runs alone. From there, with k barriers
and the interval (the work of the busiest device per microbatch):

    B, I, W     k intervals later, which makes room between the last stage's F and its B
    S(i)        at the end of F(last, i)
    C(i)        half an interval after S(i); with one barrier only
    T(i)        one interval after S(i)
    E(i)        one interval before F(first, i)
    G(i)        one interval after B(first, i) as moved

An order for evaluation gets E, S and C, and C(i) an interval after S(i): nobody waits for it, and the statistics have
all the time until then.

Each device sorted by virtual time is a correct order: no pass has an earlier time than what it needs, and where times
are equal all devices rank passes alike. With equal costs and microbatches enough, the peak of a device grows by exactly
k stage activations per stage that it holds. Source: arXiv 2411.05288, section 5 (building blocks and their intervals)
and appendix C (embedding).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import SHARDING_KINDS, Kind, Pass, parts_of
from evenpipe.schedule.timing import Run, durations, run

MOVED = frozenset({Kind.B, Kind.I, Kind.W, Kind.R, Kind.L})
"""Passes that follow from the backward of the last stage, or prepare for what does."""

INTERVAL = 2**20
"""Virtual times are whole numbers, so many to an interval: rounding does not break ties, and half of it is exact."""

Timed = tuple[int, int, int, Pass]
"""Virtual time, then two ranks for equal times, then the pass."""


def add_vocabulary(order: Order, barriers: int, costs: Costs | None = None) -> Order:
    """`order` with E, S, C, T and G on every device, and 1 barrier (vocab-2) or 2 (vocab-1).

    An order that only evaluates gets E, S and C; its barrier is one.
    The times of F, B, I and W in `costs` (equal stages by default) set the virtual times; those of the vocabulary
    passes have no influence. Raises InputError when the order already has vocabulary passes or has torch's sharding
    passes, when it takes no time, and for another number of barriers.
    """
    if barriers not in ((1,) if order.forward_only else (1, 2)):
        accepted = "1, as for every evaluation" if order.forward_only else "1 (vocab-2) or 2 (vocab-1)"
        raise InputError(f"barriers must be {accepted}, not {barriers}")
    times = VirtualTimes.of(order, barriers, EQUAL_COSTS if costs is None else costs)
    return Order(order.placement, order.microbatches, sorted_by_virtual_time(times), barriers, order.forward_only)


@dataclass(frozen=True, slots=True)
class VirtualTimes:
    """Where every pass wants to stand. `base` has one list per device; all devices share `vocabulary`."""

    base: tuple[tuple[Timed, ...], ...]
    vocabulary: tuple[Timed, ...]

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

        def whole(time: float) -> int:
            return round(time / interval * INTERVAL)

        ranks = _RANKS[0 if order.forward_only else barriers]
        base: list[list[Timed]] = [[] for _ in range(order.devices)]
        vocabulary: list[Timed] = []
        for number, (item, device) in enumerate(zip(graph.items, graph.device_of, strict=True)):
            for part in parts_of(item):
                moved = barriers * INTERVAL if part.kind in MOVED else 0
                start, end = whole(times.start[number]) + moved, whole(times.end[number])
                base[device].append((start, 0, times.sequence[number], part))
                for kind, time in _companions(part, start, end, order, barriers):
                    assert part.microbatch is not None
                    vocabulary.append((time, ranks[kind], part.microbatch, Pass(kind, None, part.microbatch)))
        return cls(tuple(map(tuple, base)), tuple(sorted(vocabulary, key=_place)))


def _companions(part: Pass, start: int, end: int, order: Order, barriers: int) -> Iterator[tuple[Kind, int]]:
    """Kind and time of the vocabulary passes that go by `part`, which runs from `start` to `end`."""
    if part.kind is Kind.F and part.stage == 0:
        yield Kind.E, start - INTERVAL
    if part.kind is Kind.F and part.stage == order.placement.stages - 1:
        yield Kind.S, end
        if order.forward_only:
            yield Kind.C, end + INTERVAL
            return
        yield Kind.T, end + INTERVAL
        if barriers == 1:
            yield Kind.C, end + INTERVAL // 2
    if part.kind in {Kind.B, Kind.I} and part.stage == 0:
        yield Kind.G, start + INTERVAL


def interval_of(order: Order, graph: Graph, times: Run) -> float:
    """Work of the busiest device per microbatch."""
    work = [0.0] * order.devices
    for number, device in enumerate(graph.device_of):
        work[device] += times.end[number] - times.start[number]
    return max(work) / order.microbatches


def sorted_by_virtual_time(times: VirtualTimes) -> tuple[tuple[Pass, ...], ...]:
    """Each device's passes by virtual time; of equal ones the base order comes first, as it stood."""
    return tuple(tuple(item for *_, item in sorted((*row, *times.vocabulary), key=_place)) for row in times.base)


def _place(timed: Timed) -> tuple[int, int, int]:
    return timed[:3]


# Of passes that want the same time E comes first, before those of the base order, whose rank is 0: it needs nothing,
# and its rows have a way to go. The others come behind them: first what the backward of the last stage waits for, then
# S, then what nobody waits for. By number of barriers, 0 for evaluation.
_RANKS = {
    0: {Kind.E: -1, Kind.S: 1, Kind.C: 2},
    1: {Kind.E: -1, Kind.C: 1, Kind.S: 2, Kind.T: 3, Kind.G: 4},
    2: {Kind.E: -1, Kind.T: 1, Kind.S: 2, Kind.G: 3},
}
