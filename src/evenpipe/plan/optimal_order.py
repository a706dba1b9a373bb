"""The best order of a small case, found and proved by constraint programming (OR-tools CP-SAT).

Every pass is an interval of a known length with an unknown start. On a device no two overlap; what a pass needs ends
before it starts, transfers included (`schedule.dependencies`, as in the event model); and the stage activations of a
device, each held from the start of its F to the end of the pass that releases it, never exceed the limit.

Two things are taken for granted because they cost nothing. Microbatches are alike, so each kind of pass runs them in
turn: exchanging the names of two of them turns any order into such a one. And a device that runs a stage whose
predecessors are all first stages of their devices starts when the first microbatch arrives: nothing else can come
first. Span is therefore counted from that instant, as the event model does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule.costs import Costs, PassTimes
from evenpipe.schedule.dependencies import Dependencies
from evenpipe.schedule.flows import vocabulary_kinds
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import ROLE, Kind, Pass
from evenpipe.schedule.placement import Placement
from evenpipe.schedule.timeline import Timeline
from evenpipe.schedule.timing import time_order

from .whole_costs import WholeCosts

LARGEST = 4000
"""Passes of the largest case that is tried."""

RANK = {Kind.E: 0, Kind.S: 1, Kind.C: 2, Kind.T: 3, Kind.G: 4}
"""Of vocabulary passes without duration that start together, the one that others need comes first."""

Where = tuple[int, Kind, int | None, int]
"""Device, role (B for I), stage and microbatch of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is looked for: the shortest order with these passes.

    memory_limit: stage activations that a device may hold, per device; None for no limit.
    objective: "span", the longest of any device, or "makespan", the whole step.
    split_backward: I and W in the place of B.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    barriers: int = 0
    split_backward: bool = False
    memory_limit: tuple[int, ...] | None = None
    objective: str = "span"

    def passes(self) -> list[list[Pass]]:
        """Per device, all that it has to run."""
        kinds = (Kind.F, Kind.I, Kind.W) if self.split_backward else (Kind.F, Kind.B)
        shared = sorted(vocabulary_kinds(self.barriers, False))
        rows = []
        for device in range(self.placement.devices):
            whats: list[tuple[Kind, int | None]] = [
                (kind, stage) for stage in self.placement.stages_of(device) for kind in kinds
            ]
            whats += [(kind, None) for kind in shared]
            rows.append([Pass(kind, stage, i) for kind, stage in whats for i in range(self.microbatches)])
        return rows

    @property
    def size(self) -> int:
        """How many passes these are."""
        shared = len(vocabulary_kinds(self.barriers, False)) * self.placement.devices
        return self.microbatches * ((3 if self.split_backward else 2) * self.placement.stages + shared)

    def value(self, timeline: Timeline) -> float:
        """What is to be as small as possible."""
        return timeline.span if self.objective == "span" else timeline.makespan


def refuse_large(passes: int) -> None:
    """Raise InputError for a case of more passes than are tried."""
    if passes > LARGEST:
        raise InputError(f"search is for small cases: this one has {passes} passes, expected at most {LARGEST}")


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found within its time: an order, if any, and what no order can be shorter than.

    bound holds for the true times; `exact` says that the solver did not have to round them. impossible: no order at all
    fits the memory limit.
    """

    order: Order | None
    bound: float
    exact: bool
    impossible: bool = False


def solve(
    problem: Problem,
    *,
    hint: Order | None = None,
    bound: float = 0.0,
    seconds: float = 30.0,
    workers: int = 1,
    seed: int = 0,
) -> Solution:
    """Look for the shortest order, for at most `seconds`.

    hint: an order of the same passes, to begin with. bound: what is known not to be possible below.
    The same arguments give the same order wherever the search ends by itself; ended by the clock it depends on it.
    Raises InputError when OR-tools is not installed, when the case is too large, and for stage passes without duration.
    """
    cp_model = _solver_module()
    refuse_large(problem.size)
    rows = problem.passes()
    kinds = {item.kind.value for row in rows for item in row}
    if problem.costs.B is None:
        kinds |= {"I", "W"}  # of which B is the sum
    whole = WholeCosts.of(problem.costs, "".join(kinds))
    model = _Model(cp_model, problem, rows, PassTimes(whole.costs, problem.placement), whole)
    model.limit_memory()
    # A bound of the true times, rounded away from them by less than one unit per pass, stays one.
    model.minimise(math.ceil(bound / whole.unit * (1 - 1e-9) - 1e-6) if whole.exact else 0)
    if hint is not None:
        model.suggest(time_order(hint, whole.costs))
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = seconds
    parameters.random_seed = seed
    parameters.num_workers = workers
    parameters.interleave_search = True  # all strategies in turn: the outcome does not depend on their speed
    status = solver.solve(model.model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solution(
        model.order(solver) if found else None,
        max(bound, solver.best_objective_bound * whole.unit) if status != cp_model.INFEASIBLE else math.inf,
        whole.exact,
        status == cp_model.INFEASIBLE,
    )


class _Model:
    """The variables and constraints of one problem."""

    def __init__(
        self, cp_model: Any, problem: Problem, rows: Sequence[Sequence[Pass]], times: PassTimes, whole: WholeCosts
    ) -> None:
        self.problem, self.rows = problem, rows
        self.model = cp_model.CpModel()
        self.takes: dict[Where, int] = {}
        self.start: dict[Where, Any] = {}
        delays = [whole.costs.transfer_time(route.kind) for route in self._dependencies.routes]
        total = sum(times.of(item, device) for device, row in enumerate(rows) for item in row)
        self.horizon = int(total + sum(delays) * problem.microbatches)
        for device, row in enumerate(rows):
            intervals = []
            for item in row:
                where = _where(device, item)
                takes = self.takes[where] = int(times.of(item, device))
                if item.stage is not None and takes == 0:
                    raise InputError(f"costs: {item.kind.value} of stage {item.stage} takes no time; search needs some")
                start = self.start[where] = self.model.new_int_var(0, self.horizon - takes, str(item))
                intervals.append(self.model.new_fixed_size_interval_var(start, takes, str(item)))
            self.model.add_no_overlap(intervals)
        self._require(whole.costs)
        self._start_at_once(whole.costs)

    @property
    def _dependencies(self) -> Dependencies:
        return Dependencies(self.problem.placement, self.problem.barriers)

    def end(self, where: Where) -> Any:
        """When a pass has ended."""
        return self.start[where] + self.takes[where]

    def _require(self, costs: Costs) -> None:
        """Needs between passes, and microbatches in turn."""
        dependencies = self._dependencies
        for device, row in enumerate(self.rows):
            for item in row:
                here = _where(device, item)
                start = self.start[here]
                i = here[3]
                rule = dependencies.rule(device, item.kind, item.stage)
                for kind, stage in rule.after:
                    self.model.add(start >= self.end((device, ROLE[kind], stage, i)))
                for route in rule.waits:
                    delay = int(costs.transfer_time(route.kind))
                    for site in route.producers:
                        self.model.add(start >= self.end((site.device, ROLE[site.kind], site.stage, i)) + delay)
                if i > 0:
                    self.model.add(start >= self.end((*here[:3], i - 1)))

    def _start_at_once(self, costs: Costs) -> None:
        """When each device can only begin, by device; None where that depends on the order."""
        placement = self.problem.placement
        self.heads: list[int | None] = [None] * placement.devices
        if self.problem.barriers:  # E(0) comes first everywhere: the first F waits for all of them
            self.heads = [0] * placement.devices
            return
        clock = 0
        for stage, device in enumerate(placement.stage_device):
            if self.heads[device] is not None:
                return
            self.heads[device] = clock
            where = (device, Kind.F, stage, 0)
            self.model.add(self.start[where] == clock)
            clock += self.takes[where] + int(costs.p2p)

    def limit_memory(self) -> None:
        """Stage activations: [start of F, end of the pass that releases], at most so many at a time."""
        limits = self.problem.memory_limit
        if limits is None:
            return
        released_by = Kind.W if self.problem.split_backward else Kind.B
        count = self.problem.microbatches
        for device, limit in enumerate(limits):
            stages = self.problem.placement.stages_of(device)
            held = []
            for stage in stages:
                for i in range(count):
                    start, end = self.start[device, Kind.F, stage, i], self.end((device, released_by, stage, i))
                    if i + limit < count:  # alone it holds no more either
                        self.model.add(self.start[device, Kind.F, stage, i + limit] >= end)
                    if len(stages) > 1:
                        length = self.model.new_int_var(0, self.horizon, "")
                        held.append(self.model.new_interval_var(start, length, end, ""))
            if held:
                self.model.add_cumulative(held, [1] * len(held), limit)

    def minimise(self, bound: int) -> None:
        """The objective; `bound` is known not to be possible below."""
        objective = self.model.new_int_var(bound, max(bound, self.horizon), "objective")
        last = self.problem.microbatches - 1
        for device, row in enumerate(self.rows):
            head: Any = self.heads[device]
            if head is None:  # whichever F comes first: the one of the first stage
                head = self.start[device, Kind.F, self.problem.placement.stages_of(device)[0], 0]
            begin = head if self.problem.objective == "span" else 0
            for item in row:
                if item.microbatch == last:
                    self.model.add(objective >= self.end(_where(device, item)) - begin)
        self.model.minimize(objective)

    def suggest(self, timeline: Timeline) -> None:
        """Begin with a run in the same whole units."""
        for row in timeline.events:
            for event in row:
                if isinstance(event.item, Pass):
                    self.model.add_hint(self.start[_where(event.device, event.item)], round(event.start))

    def order(self, solver: Any) -> Order:
        """The passes by start. Of those that start together the ones without duration come first, as they are needed.

        What a pass needs ends before it starts, so no pass stands before what it needs.
        """
        rows = []
        for device, row in enumerate(self.rows):
            placed = []
            for item in row:
                where = _where(device, item)
                start = solver.value(self.start[where])
                placed.append((start, start + self.takes[where], RANK.get(item.kind, 0), where[3], item))
            rows.append(tuple(item for *_, item in sorted(placed, key=lambda entry: entry[:4])))
        return Order(self.problem.placement, self.problem.microbatches, tuple(rows), self.problem.barriers)


def _where(device: int, item: Pass) -> Where:
    assert item.microbatch is not None, "a pass of a problem has a microbatch"
    return device, ROLE[item.kind], item.stage, item.microbatch


def _solver_module() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise InputError("search needs OR-tools, which is not installed: pip install 'evenpipe[search]'") from None
    return cp_model
