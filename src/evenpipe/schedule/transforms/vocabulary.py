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
every interval. So virtual times are also priorities for `list_schedule`, in which each device runs the earliest ready
pass, within that peak. The result is the better of the two: the one that keeps the peak, then the one with the shorter
span, then with the shorter step. If F, I and W of a stage differ, virtual times of simpler costs are tried, too: lists
depend on small differences, and with simple times one is often found that is shorter by some percent.

An order for evaluation gets E, S and C, with C(i) an interval after S(i): no pass waits for it, so the statistics have
time to arrive. Its lists have no memory limit.

With E and G, every device works from the start of the step to its end: the span of a schedule whose devices
start and end at different times (zb-h1, zb-h2, zbv) grows to its makespan.

Source: arXiv 2411.05288, section 5 (building blocks and their intervals) and appendix C (embedding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule.collection import collecting_rarely
from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.held import peak_activations
from evenpipe.schedule.numbered import Numbered
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import SHARDING_KINDS, VOCABULARY_KINDS, Kind, Pass, parts_of
from evenpipe.schedule.simpler_costs import simpler
from evenpipe.schedule.timing import timed
from evenpipe.schedule.vocabulary_mode import VocabularyMode
from evenpipe.schedule.walk import Walked

from .list_scheduling import Arranger, Length, Rows

MOVED = frozenset({Kind.B, Kind.I, Kind.W, Kind.R, Kind.L})
"""Passes that follow from the backward of the last stage, or prepare for such passes."""

INTERVAL = 2**20
"""Virtual times are whole numbers, with this many per interval: no tie is broken by rounding, and a half is exact."""

Ranks = Mapping[Kind, int]
"""Of passes with the same virtual time, the lower rank comes first. Passes of the base order have rank 1."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Virtual times of passes. ranks: by number of barriers, 0 for evaluation. backwards, weights, outputs: intervals
    by which B and I, W, and T come later than the rules above; 0 for rows that run unchanged. reserve: for list
    scheduling, time added to every collective, in units of the mean work of a stage per unit."""

    ranks: Mapping[int, Ranks]
    backwards: float = 0
    weights: float = 0
    outputs: float = 0
    reserve: float = 0


FIXED = Wishes(
    {
        0: {Kind.E: 0, Kind.S: 2, Kind.C: 3},
        1: {Kind.E: 0, Kind.C: 2, Kind.S: 3, Kind.T: 4, Kind.G: 5},
        2: {Kind.E: 0, Kind.T: 2, Kind.S: 3, Kind.G: 4},
    }
)
"""For rows that run unchanged. E comes before the base order: it has no needs, and its rows travel far. The others come
after it: first passes that the backward of the last stage waits for, then S, then passes that nobody waits for."""

_EAGER = {
    0: {Kind.E: 0, Kind.S: 0, Kind.C: 3},
    1: {Kind.E: 0, Kind.C: 0, Kind.S: 0, Kind.T: 4, Kind.G: 5},
    2: {Kind.E: 0, Kind.T: 0, Kind.S: 0, Kind.G: 4},
}

_FILLING = Wishes(_EAGER, backwards=-0.25, weights=0.75, reserve=0.1)

LISTS = {
    0: (Wishes(_EAGER),),
    1: (_FILLING, Wishes(_EAGER), Wishes(_EAGER, weights=1, outputs=1)),
    2: (_FILLING, Wishes(_EAGER), Wishes(_EAGER, backwards=-1)),
}
"""For list scheduling, by number of barriers, 0 for evaluation. No device is idle by plan, so passes that others wait
for come first. The first entry is nearly always the best: weight gradients fill the gaps, and collectives may take
longer than expected (by 0.3 F) before a device waits. The others are tried if the step is longer than the base order
plus the vocabulary passes by more than a thousandth; the third keeps more between S and T, or gives the second barrier
no time of its own."""


@collecting_rarely()
def add_vocabulary(order: Order, mode: str = "vocab-2", costs: Costs | None = None) -> Order:
    """Return `order` with E, S, T and G on every device, and C in mode vocab-2, or without it in mode vocab-1.

    An order that only evaluates gets E, S and C. `costs` (equal stages by default) decide the positions; vocabulary
    passes without a time take 0. No device holds more stage activations than `peak_limits`, unless `order` offloads or
    recomputes: such orders are sorted in any case. Raises InputError if the order already has vocabulary passes or
    torch's sharding passes, if all its costs are 0, and for another mode.
    """
    mode = VocabularyMode.of(mode)
    if mode not in (VocabularyMode.VOCAB_1, VocabularyMode.VOCAB_2):
        raise InputError(f"mode is {mode}, expected vocab-1 or vocab-2")
    costs = complete(costs)
    refuse_unfit(order)
    passes = Passes.of(apart_at_the_loss(order), mode)
    best = passes.placed(costs, costs)
    # Virtual times of equal slices or passes keep the pattern of the order, which may be worth more.
    others = [costs.on_average] if costs.slices else []
    simple = simpler(costs, order.placement)
    for other in (*others, *simple[:1]):
        even = passes.placed(costs, other)
        best = even if even.better_than(best) else best
    for other in simple[1:]:  # so may an order that is arranged by coarse times throughout
        if not any(Numbered(passes.order).durations(other)):  # forwards alone, each less than half a part
            continue
        found = passes.placed(other, other)
        coarse = passes.timed(found.rows, passes.arranger.numbered.durations(costs))
        best = coarse if found.length.span < inf and coarse.better_than(best) else best
    return passes.arranger.order_of(best.rows)


def complete(costs: Costs | None) -> Costs:
    """Return costs with all times of vocabulary passes, 0 by default; equal stages by default."""
    costs = EQUAL_COSTS if costs is None else costs
    missing: dict[str, Any] = {kind.value: 0 for kind in VOCABULARY_KINDS if getattr(costs, kind.value) is None}
    return replace(costs, **missing)


def apart_at_the_loss(order: Order) -> Order:
    """Return `order` with a joint pass split into its parts where it runs F and B of the last stage for one microbatch:
    vocabulary passes come between them."""
    last = order.placement.last_stage

    def splits(item: Pass) -> bool:
        at_end = [part for part in item.parts if part.stage == last and part.kind is not Kind.W]
        return len({(part.microbatch, part.slice) for part in at_end}) < len(at_end)

    if not any(splits(item) for device in range(order.devices) for item in order.passes(device) if item.parts):
        return order
    rows = tuple(
        tuple(part for item in order.passes(device) for part in (item.parts if splits(item) else (item,)))
        for device in range(order.devices)
    )
    return replace(order, rows=rows)


def peak_limits(order: Order, mode: VocabularyMode) -> list[int]:
    """Return the stage activations each device may hold: those of `order`, and one per barrier for each stage."""
    stages = map(order.placement.stages_of, range(order.devices))
    more = mode.barriers
    return [int(peak_activations(order.passes(device))) + more * len(held) for device, held in enumerate(stages)]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows of numbers, and how long the order with these rows takes."""

    rows: Rows
    length: Length

    def better_than(self, other: Arrangement) -> bool:
        """Return whether it is shorter, as `Length.better_than`."""
        return self.length.better_than(other.length)


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of an order and those of the vocabulary, which all its arrangements share.

    order: without vocabulary passes. mode: of the arrangements. arranger: of all passes; a row has those of the order
    as they are there, and then those of the vocabulary, the same on all devices. vocabulary: by pass of the first and
    the last stage, the place, among those of the vocabulary, of the first one whose time follows from it.
    """

    order: Order
    mode: VocabularyMode
    arranger: Arranger
    vocabulary: dict[Pass, int]

    @classmethod
    def of(cls, order: Order, mode: VocabularyMode) -> Passes:
        """Return the passes of an order in which no joint pass holds F and B of the last stage for one microbatch."""
        ends = (order.placement.first_stage, order.placement.last_stage)
        places: dict[Pass, int] = {}
        vocabulary: list[Pass] = []
        rows = [[part for item in order.passes(device) for part in parts_of(item)] for device in range(order.devices)]
        for part in chain.from_iterable(rows):
            if part.stage in ends:
                places[part] = len(vocabulary)
                kinds = (kind for _, kind in _companions(part, 0, 0, order, mode))
                vocabulary += [Pass(kind, None, part.microbatch, part.slice) for kind in kinds]
        unordered = replace(order, rows=tuple((*row, *vocabulary) for row in rows), vocabulary=mode)
        limits = None if order.forward_only else peak_limits(order, mode)
        return cls(order, mode, Arranger.of(unordered, order, limits), places)

    def timed(self, rows: Rows, takes: Sequence[float]) -> Arrangement:
        """Return the arrangement with these rows; `takes` has durations by number."""
        return Arrangement(rows, self.arranger.length(rows, takes))

    def placed(self, costs: Costs, virtual: Costs) -> Arrangement:
        """Return the best arrangement by virtual times of `virtual`, in a step with `costs`."""
        times, takes = VirtualTimes.of(self, virtual), self.arranger.numbered.durations(costs)
        best = self.timed(times.sort(FIXED), takes)
        if self._holds_too_much(best.rows):
            best = replace(best, length=replace(best.length, span=inf))
        enough = (times.makespan + self._vocabulary_work(costs)) * 1.001
        for wishes in LISTS[0 if self.order.forward_only else self.mode.barriers]:
            listed = self.arranger.listed(times.sort(wishes), takes, wishes.reserve * times.stage_work)
            if listed is not None:
                arrangement = self.timed(listed, takes)
                best = arrangement if arrangement.better_than(best) else best
            if best.length.makespan <= enough:  # nothing else is tried
                break
        return best

    def _holds_too_much(self, rows: Rows) -> bool:
        limits = self.arranger.limits
        order = self.arranger.order_of(rows)
        return limits is not None and any(
            peak_activations(order.passes(device)) > most for device, most in enumerate(limits)
        )

    def _vocabulary_work(self, costs: Costs) -> float:
        """Return the time of the vocabulary passes in one step, on the device that has the most of it."""
        times = costs.device_times(self.order.placement)
        kinds = self.mode.kinds(forward_only=self.order.forward_only)
        return self.order.units * max(map(sum, zip(*(times[kind] or () for kind in kinds), strict=True)))


@dataclass(frozen=True, slots=True)
class VirtualTimes:
    """Virtual time of every pass.

    A place is one whole number made of time, rank and the number of the pass; sorted places give the order of passes.
    forwards, backwards, weights: per device, the places of F and O, of passes that follow from a backward, and of W.
    vocabulary: (time, kind, place among the vocabulary passes), as the event model ran the passes that these follow
    from. makespan: of the base order. stage_work: mean work of a stage per unit.
    """

    passes: Passes
    forwards: list[list[int]]
    backwards: list[list[int]]
    weights: list[list[int]]
    vocabulary: list[tuple[int, Kind, int]]
    makespan: float
    stage_work: float

    @classmethod
    def of(cls, passes: Passes, costs: Costs) -> VirtualTimes:
        """Return the virtual times by the rules above."""
        order, mode = passes.order, passes.mode
        walked, unit = virtual_times(order, costs)
        groups: list[list[list[int]]] = [[[] for _ in order.rows] for _ in range(3)]
        forwards, backwards, weights = groups
        group_of = {kind: backwards if kind in MOVED else forwards for kind in Kind} | {Kind.W: weights}
        delay_of = {kind: mode.barriers * INTERVAL if kind in MOVED else 0 for kind in Kind}
        at_the_ends = order.placement.first_stage, order.placement.last_stage
        ends: dict[int, tuple[Pass, ...]] = {}
        """Passes of the first and the last stage, by number."""
        work = 0.0
        for device, numbers in enumerate(walked.rows):
            place = 0
            for number, item in zip(numbers, order.passes(device), strict=True):
                virtual = round(walked.start[number] * unit)
                work += walked.end[number] - walked.start[number]
                for part in parts_of(item):
                    start = virtual + delay_of[part.kind]
                    group_of[part.kind][device].append((start * _RANKS + 1) << _INDEX_BITS | place)
                    place += 1
                    if part.stage in at_the_ends:
                        ends[number] = (*ends.get(number, ()), part)
        vocabulary: list[tuple[int, Kind, int]] = []
        for number in walked.happened:
            for part in ends.get(number, ()):
                start = round(walked.start[number] * unit) + delay_of[part.kind]
                found = _companions(part, start, round(walked.end[number] * unit), order, mode)
                at = passes.vocabulary[part]
                vocabulary += [(time, kind, at + turn) for turn, (time, kind) in enumerate(found)]
        makespan = Length.of_rows(walked).makespan
        stage_work = work / (order.units * order.placement.stages)
        return cls(passes, forwards, backwards, weights, vocabulary, makespan, stage_work)

    def sort(self, wishes: Wishes) -> Rows:
        """Return each device's passes by virtual time, then by rank; ties keep the order of the event model."""
        arranger = self.passes.arranger
        count, at = max(map(len, arranger.rows)), (1 << _INDEX_BITS) - 1
        rank = wishes.ranks[0 if self.passes.order.forward_only else self.passes.mode.barriers]
        later = [
            round(share * INTERVAL) * _RANKS << _INDEX_BITS
            for share in (wishes.backwards, wishes.weights, wishes.outputs)
        ]
        offset = {kind: rank_of << _INDEX_BITS for kind, rank_of in rank.items()}
        offset[Kind.T] = offset.get(Kind.T, 0) + later[2]
        vocabulary = sorted(
            (time * _RANKS << _INDEX_BITS | count + turn) + offset[kind]
            for turn, (time, kind, _) in enumerate(self.vocabulary)
        )
        turns = [index for _, _, index in self.vocabulary]
        rows = []
        for forwards, backwards, weights, numbers in zip(
            self.forwards, self.backwards, self.weights, arranger.rows, strict=True
        ):
            places = forwards + [place + later[0] for place in backwards] + [place + later[1] for place in weights]
            added = numbers[len(places) :]
            indices = [place & at for place in sorted(places + vocabulary)]
            rows.append([numbers[index] if index < count else added[turns[index - count]] for index in indices])
        return rows


def _companions(part: Pass, start: int, end: int, order: Order, mode: VocabularyMode) -> Iterator[tuple[int, Kind]]:
    """Return time and kind of each vocabulary pass derived from `part`, which runs from `start` to `end`."""
    if part.kind is Kind.F and part.stage == order.placement.first_stage:
        yield start - INTERVAL, Kind.E
    if part.kind is Kind.F and part.stage == order.placement.last_stage:
        yield end, Kind.S
        if order.forward_only:
            yield end + INTERVAL, Kind.C
            return
        yield end + INTERVAL, Kind.T
        if mode.combining is Kind.C:
            yield end + INTERVAL // 2, Kind.C
    if part.kind in {Kind.B, Kind.I} and part.stage == order.placement.first_stage:
        yield start + INTERVAL, Kind.G


def refuse_unfit(order: Order) -> None:
    """Raise InputError for an order to which no vocabulary passes can be added."""
    if order.vocabulary.sharded:
        raise InputError(f"the order has the vocabulary passes of {order.vocabulary} already")
    if any(item and item.kind in SHARDING_KINDS for row in order.rows for item in row):
        raise InputError("vocabulary passes cannot be added between UNSHARD, RESHARD and REDUCE_GRAD")


def virtual_times(order: Order, costs: Costs) -> tuple[Walked, float]:
    """Return when everything in the base order runs, and the virtual time per unit of time."""
    walked = timed(order, costs)
    interval = interval_of(walked)
    if interval <= 0:
        raise InputError("costs: F and B of at least one stage must be above 0 to place vocabulary passes")
    return walked, INTERVAL / interval


def interval_of(walked: Walked) -> float:
    """Return the work of the busiest device per unit, without vocabulary passes, of a timed order."""
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
_INDEX_BITS = 32
