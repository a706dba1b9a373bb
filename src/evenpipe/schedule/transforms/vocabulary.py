"""The vocabulary transform: add the passes of sharded embedding and output layers to any order.

Every pass of the base order has a virtual time, its start when the base order runs alone. From there, with k barriers
and the interval (the work of the busiest device per unit):

    B, I, W     k intervals later, which makes room between the last stage's F and its B
    S(i)        at the end of F(last, i)
    C(i)        half an interval after S(i); with one barrier only
    T(i)        one interval after S(i)
    E(i)        one interval before F(first, i)
    G(i)        one interval after B(first, i) as moved

Sorting each device by virtual time gives a correct order: no pass has an earlier time than its needs, and all devices
break ties in the same way. With equal costs and enough microbatches, the peak of a device grows by exactly k stage
activations per stage that it holds. With unequal costs it may grow by more, and devices may wait for each other in
every interval. So virtual times also serve as priorities for `list_schedule`, in which each device runs the earliest
ready pass, within that peak. The best candidate is used: first by staying within the peak, then by the shorter span,
then by the shorter step. If F, I and W of a stage differ, virtual times are computed from simplified costs, because
small differences break the pattern of the base order, and lengthen the step by some percent.

An order for evaluation gets E, S and C, with C(i) an interval after S(i): no pass waits for it, so the statistics have
time to arrive. Its lists have no memory limit.

With E and G, every device works from the start of the step to its end: the span of a schedule whose devices
start and end at different times (zb-h1, zb-h2, zbv) grows to its makespan.

Source: arXiv 2411.05288, section 5 (building blocks and their intervals) and appendix C (embedding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule.check import check_order
from evenpipe.schedule.collection import collecting_rarely
from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.held import peak_activations
from evenpipe.schedule.numbered import ABSENT, Numbered
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import SHARDING_KINDS, VOCABULARY_KINDS, Kind, Pass, parts_in
from evenpipe.schedule.rules import PassGroup
from evenpipe.schedule.simplified_costs import simplified_costs
from evenpipe.schedule.timing import timed
from evenpipe.schedule.vocabulary_mode import VocabularyMode
from evenpipe.schedule.walk import Walked
from evenpipe.words import refused

from .list_scheduling import Arranger, Length, Rows

MOVED = frozenset({Kind.B, Kind.I, Kind.W, Kind.R, Kind.L})
"""Passes that depend on the backward of the last stage, or prepare for such passes."""

INTERVAL = 2**20
"""Virtual times are whole numbers, with this many per interval: no tie is broken by rounding, and a half is exact."""

Ranks = Mapping[Kind, int]
"""Of passes with the same virtual time, the lower rank comes first. Passes of the base order have rank 1."""


@dataclass(frozen=True, slots=True)
class Priorities:
    """How virtual times determine the order of passes on a device.

    ranks: by number of barriers, 0 for evaluation. backwards, weights, outputs: intervals by which B and I, W, and T
    come later than by the rules above. reserve: for list scheduling, time added to every collective, in units of the
    mean work of a stage per unit.
    """

    ranks: Mapping[int, Ranks]
    backwards: float = 0
    weights: float = 0
    outputs: float = 0
    reserve: float = 0


FIXED = Priorities(
    {
        0: {Kind.E: 0, Kind.S: 2, Kind.C: 3},
        1: {Kind.E: 0, Kind.C: 2, Kind.S: 3, Kind.T: 4, Kind.G: 5},
        2: {Kind.E: 0, Kind.T: 2, Kind.S: 3, Kind.G: 4},
    }
)
"""For rows that run unchanged. E comes before the base order: it has no needs, and its rows travel far. Other kinds
come after it: first passes that the backward of the last stage waits for, then S, then passes that nothing waits
for."""

_EAGER = {
    0: {Kind.E: 0, Kind.S: 0, Kind.C: 3},
    1: {Kind.E: 0, Kind.C: 0, Kind.S: 0, Kind.T: 4, Kind.G: 5},
    2: {Kind.E: 0, Kind.T: 0, Kind.S: 0, Kind.G: 4},
}

_FILLING = Priorities(_EAGER, backwards=-0.25, weights=0.75, reserve=0.1)

LISTS = {
    0: (Priorities(_EAGER),),
    1: (_FILLING, Priorities(_EAGER), Priorities(_EAGER, weights=1, outputs=1)),
    2: (_FILLING, Priorities(_EAGER), Priorities(_EAGER, backwards=-1)),
}
"""For list scheduling, by number of barriers, 0 for evaluation. No idle time is planned, so passes that others wait for
come first. In the first list, weight gradients fill the gaps, and collectives may take longer than expected (by 0.3 F)
before a device waits; the third list keeps more passes between S and T, or gives the second barrier no extra time.
Without the second list the worst step of `benchmarks/arrangement.py` would be 1.2 % longer, without the third 5 %."""

ENOUGH = 1.001
"""Only the sorted rows and the first list are tried if the step is then at most this factor longer than the base order
plus the vocabulary passes."""


@collecting_rarely()
def add_vocabulary(order: Order, mode: str = "vocab-2", costs: Costs | None = None) -> Order:
    """`order` with E, S, T and G on every device, and C in mode vocab-2, or without it in mode vocab-1.

    An order that only evaluates gets E, S and C. `costs` (equal stages by default) decide the positions; vocabulary
    passes without a time take 0. No device holds more stage activations than `peak_limits`, unless `order` offloads or
    recomputes: such orders are sorted in any case. Raises InputError if the order is not sound, or has vocabulary
    passes or torch's sharding passes already, if all its costs are 0, and for another mode.
    """
    mode = VocabularyMode.of(mode)
    if mode not in (VocabularyMode.VOCAB_1, VocabularyMode.VOCAB_2):
        raise refused("mode", mode, "vocab-1 or vocab-2")
    costs = with_vocabulary_times(costs)
    validate_base(order)
    passes = Passes.of(split_joint_passes_at_loss(order), mode)
    return passes.arranger.order_of(passes.best(costs))


def with_vocabulary_times(costs: Costs | None) -> Costs:
    """Costs with all times of vocabulary passes, 0 by default; equal stages by default."""
    costs = EQUAL_COSTS if costs is None else costs
    missing: dict[str, Any] = {kind.value: 0 for kind in VOCABULARY_KINDS if getattr(costs, kind.value) is None}
    return replace(costs, **missing)


def split_joint_passes_at_loss(order: Order) -> Order:
    """`order` with each joint pass that runs F and B of the last stage for one microbatch split into its parts,
    because vocabulary passes come between them."""
    last = order.placement.last_stage

    def splits(item: Pass) -> bool:
        at_last_stage = [
            component for component in item.parts if component.stage == last and component.kind is not Kind.W
        ]
        return len({(component.microbatch, component.slice) for component in at_last_stage}) < len(at_last_stage)

    if not any(splits(item) for device in range(order.devices) for item in order.passes(device) if item.parts):
        return order
    rows = tuple(
        tuple(component for item in order.passes(device) for component in (item.parts if splits(item) else (item,)))
        for device in range(order.devices)
    )
    return replace(order, rows=rows)


def peak_limits(order: Order, mode: VocabularyMode) -> list[int]:
    """The stage activations each device may hold: as many as in `order`, plus one per barrier for each stage."""
    stages = map(order.placement.stages_of, range(order.devices))
    extra = mode.barriers
    return [int(peak_activations(order.passes(device))) + extra * len(held) for device, held in enumerate(stages)]


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of an order and the vocabulary passes, which all arrangements share.

    order: without vocabulary passes, and without a joint pass that has F and B of the last stage for one microbatch.
    mode: of the arrangements. arranger: of all passes; each row starts with the passes of the order, in its order.
    """

    order: Order
    mode: VocabularyMode
    arranger: Arranger

    @classmethod
    def of(cls, order: Order, mode: VocabularyMode) -> Passes:
        """The passes of an order, in a mode."""
        units = [divmod(unit, order.slices) for unit in range(order.units)]
        added = [Pass(kind, None, *unit) for kind in mode.kinds(forward_only=order.forward_only) for unit in units]
        rows = tuple((*parts_in(row), *added) for row in order.rows)
        combined = replace(order, rows=rows, vocabulary=mode)
        limits = None if order.forward_only else peak_limits(order, mode)
        return cls(order, mode, Arranger.of(combined, order, limits))

    def best(self, costs: Costs) -> Rows:
        """The rows of the shortest step with `costs` among all arrangements tried."""
        takes = self.arranger.numbered.durations(costs)
        best: Rows = []
        shortest = Length(inf, inf)
        for virtual, listed_by in self._virtual_costs(costs):
            times = VirtualTimes.of(self, virtual)
            enough = ENOUGH * (times.makespan + self._vocabulary_work(costs))
            for tried, rows in enumerate(self._arrangements(times, listed_by)):
                length = self.arranger.length(rows, takes)
                if not tried and self._holds_too_much(rows):  # lists keep to the limits
                    length = replace(length, span=inf)
                if not best or length.better_than(shortest):
                    best, shortest = rows, length
                if tried and shortest.makespan <= enough:
                    break
        return best

    def _virtual_costs(self, costs: Costs) -> list[tuple[Costs, Costs]]:
        """Costs for virtual times, each with the costs used for list scheduling.

        With virtual times by the given costs alone, the worst step of `benchmarks/arrangement.py` is 12 % longer, and
        steps in sharded modes are 0.9 % longer on average.
        """
        simple = simplified_costs(costs, self.order.placement)
        if simple is None:
            return [(costs.on_average, costs)]
        even, coarse = simple
        pairs = [(even, costs)]
        if any(Numbered(self.order).durations(coarse)):  # forwards alone may each take less than half a part
            pairs.append((coarse, coarse))
        return pairs

    def _arrangements(self, times: VirtualTimes, costs: Costs) -> Iterator[Rows]:
        """The rows sorted by virtual times, then lists."""
        yield times.sort(FIXED)
        takes = self.arranger.numbered.durations(costs)
        for priorities in LISTS[0 if self.order.forward_only else self.mode.barriers]:
            listed = self.arranger.listed(times.sort(priorities), takes, priorities.reserve * times.stage_work)
            if listed is not None:
                yield listed

    def _holds_too_much(self, rows: Rows) -> bool:
        limits = self.arranger.limits
        if limits is None:
            return False
        order = self.arranger.order_of(rows)
        return any(peak_activations(order.passes(device)) > limit for device, limit in enumerate(limits))

    def _vocabulary_work(self, costs: Costs) -> float:
        """The time of the vocabulary passes in one step, on the device where it is longest."""
        times = costs.device_times(self.order.placement)
        kinds = self.mode.kinds(forward_only=self.order.forward_only)
        return self.order.units * max(map(sum, zip(*(times[kind] or () for kind in kinds), strict=True)))


@dataclass(frozen=True, slots=True)
class VirtualTimes:
    """Virtual times of all passes.

    starts: by number. rows: numbers of each device, in the order that breaks ties of virtual time and rank. makespan:
    of the base order. stage_work: mean work of a stage per unit.
    """

    passes: Passes
    starts: list[int]
    rows: Rows
    makespan: float
    stage_work: float

    @classmethod
    def of(cls, passes: Passes, costs: Costs) -> VirtualTimes:
        """The virtual times by the rules above, with the base order timed by `costs`."""
        order, mode, numbered = passes.order, passes.mode, passes.arranger.numbered
        walked, scale = virtual_times(order, costs)
        base, units = walked.numbered, numbered.units
        companions = list(_companions(order, mode))
        is_incomplete = base.units < order.units or any(source not in base.groups for _, source, *_ in companions)
        if is_incomplete or ABSENT in base.position:
            check_order(order).raise_if_faulty()
        starts = [0] * numbered.passes
        for group, first in base.groups.items():
            delay = mode.barriers * INTERVAL if group.kind in MOVED else 0
            target = numbered.groups[group]
            starts[target : target + units] = [round(at * scale) + delay for at in walked.start[first : first + units]]
        insertions: list[tuple[int, int, Kind, int]] = []  # position of the source, turn, kind, unit
        sequence, kinds = walked.sequence(), mode.kinds(forward_only=order.forward_only)
        for kind, source, at_end, later in companions:
            base_first, target = base.groups[source], numbered.groups[source]
            times = starts[target : target + units]
            if at_end:
                times = [round(at * scale) for at in walked.end[base_first : base_first + units]]
            for device in range(order.devices):
                first = numbered.groups[PassGroup(device, kind)]
                starts[first : first + units] = [time + later for time in times]
            insertions += [(sequence[base_first + unit], len(insertions), kind, unit) for unit in range(units)]
        insertions.sort()
        rows = []
        for device, row in enumerate(numbered.rows):
            firsts = {kind: numbered.groups[PassGroup(device, kind)] for kind in kinds}
            rows.append([*row[: len(row) - len(insertions)], *(firsts[kind] + unit for _, _, kind, unit in insertions)])
        work = sum(walked.end[n] - walked.start[n] for row in walked.rows for n in row)
        makespan = Length.of_rows(walked).makespan
        return cls(passes, starts, rows, makespan, work / (order.units * order.placement.stages))

    def sort(self, priorities: Priorities) -> Rows:
        """Each device's passes by virtual time, then by rank."""
        numbered = self.passes.arranger.numbered
        ranks = priorities.ranks[0 if self.passes.order.forward_only else self.passes.mode.barriers]
        shares = dict.fromkeys(MOVED, priorities.backwards) | {Kind.W: priorities.weights, Kind.T: priorities.outputs}
        keys = [0] * numbered.passes
        for group, first in numbered.groups.items():
            offset = round(shares.get(group.kind, 0) * INTERVAL) * _RANKS + ranks.get(group.kind, 1)
            last = first + numbered.units
            keys[first:last] = [start * _RANKS + offset for start in self.starts[first:last]]
        return [sorted(row, key=keys.__getitem__) for row in self.rows]


def _companions(order: Order, mode: VocabularyMode) -> Iterator[tuple[Kind, PassGroup, bool, int]]:
    """Each kind of vocabulary pass, the passes that determine its virtual times, whether by their ends, and how
    much later it is."""
    placement = order.placement
    first, last = (
        partial(PassGroup, placement.first_device, stage=placement.first_stage),
        partial(PassGroup, placement.last_device, stage=placement.last_stage),
    )
    yield Kind.E, first(Kind.F), False, -INTERVAL
    yield Kind.S, last(Kind.F), True, 0
    if order.forward_only:
        yield Kind.C, last(Kind.F), True, INTERVAL
        return
    yield Kind.T, last(Kind.F), True, INTERVAL
    if mode.combining is Kind.C:
        yield Kind.C, last(Kind.F), True, INTERVAL // 2
    yield Kind.G, first(Kind.B), False, INTERVAL


def validate_base(order: Order) -> None:
    """Raise InputError for an order to which no vocabulary passes can be added."""
    if order.vocabulary.sharded:
        raise InputError(f"the order has the vocabulary passes of {order.vocabulary} already")
    if any(item and item.kind in SHARDING_KINDS for row in order.rows for item in row):
        raise InputError("vocabulary passes cannot be added between UNSHARD, RESHARD and REDUCE_GRAD")


def virtual_times(order: Order, costs: Costs) -> tuple[Walked, float]:
    """When all passes and transfers of the base order run, and the virtual time per unit of time."""
    walked = timed(order, costs)
    interval = interval_of(walked)
    if interval <= 0:
        raise InputError("costs.F and costs.B of at least one stage must be above 0 to place vocabulary passes")
    return walked, INTERVAL / interval


def interval_of(walked: Walked) -> float:
    """The work of the busiest device per unit, without vocabulary passes, of a timed order."""
    schedule = walked.numbered.schedule
    work = [
        sum(
            walked.end[number] - walked.start[number]
            for number, item in zip(numbers, schedule.order.passes(device), strict=True)
            if item.kind not in VOCABULARY_KINDS
        )
        for device, numbers in enumerate(walked.rows)
    ]
    return max(work) / schedule.units


_RANKS = 8
"""More than the number of ranks."""
