"""The best order of a small case, found and proved by constraint programming (OR-tools CP-SAT).

Every pass is an interval of known length with an unknown start. No two passes of a device overlap; the needs of a pass
end before it starts, including transfers (`schedule.rules`, as in the event model); and the stage activations of a
device, each held from the start of its F to the end of the pass that releases it, never exceed the limit.

Two assumptions exclude no better order. Microbatches are identical, so each kind of pass runs them in turn: exchanging
microbatches turns any order into such an order. And a device that runs a stage whose predecessors are all first stages
of their devices starts when the first microbatch arrives, because no other pass can come first. The span is therefore
counted from that instant, as in the event model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule.costs import Costs, PassTimes
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import ROLE, Kind, Pass
from evenpipe.schedule.placement import Placement
from evenpipe.schedule.rules import IF_PRESENT, Rules
from evenpipe.schedule.timeline import Timeline
from evenpipe.schedule.timing import time_order
from evenpipe.schedule.vocabulary_mode import VocabularyMode
from evenpipe.words import count

from .whole_costs import WholeCosts

LARGEST = 4000
"""Number of passes of the largest accepted case."""

RANK = {Kind.E: 0, Kind.S: 1, Kind.C: 2, Kind.T: 3, Kind.G: 4}
"""Order of vocabulary passes without duration that start at the same time: a pass follows those that it needs."""

Where = tuple[int, Kind, int | None, int]
"""Device, role (B for I), stage and microbatch of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProblem:
    """Find the shortest order with these passes.

    max_in_flight: maximum number of stage activations per device; None for no limit.
    objective: "span", the longest span of any device, or "makespan", the duration of the step.
    split_backward: I and W instead of B.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    vocabulary: VocabularyMode = VocabularyMode.FIRST_LAST
    split_backward: bool = False
    max_in_flight: tuple[int, ...] | None = None
    objective: str = "span"

    def passes(self) -> list[list[Pass]]:
        """Return, per device, all passes that it must run."""
        kinds = (Kind.F, Kind.I, Kind.W) if self.split_backward else (Kind.F, Kind.B)
        shared = sorted(self.vocabulary.kinds(forward_only=False))
        rows = []
        for device in range(self.placement.devices):
            kinds_and_stages: list[tuple[Kind, int | None]] = [
                (kind, stage) for stage in self.placement.stages_of(device) for kind in kinds
            ]
            kinds_and_stages += [(kind, None) for kind in shared]
            rows.append([Pass(kind, stage, i) for kind, stage in kinds_and_stages for i in range(self.microbatches)])
        return rows

    @property
    def size(self) -> int:
        return sum(map(len, self.passes()))

    def value(self, timeline: Timeline) -> float:
        return timeline.span if self.objective == "span" else timeline.makespan


def refuse_large(passes: int) -> None:
    """Raise InputError for a case with too many passes."""
    if passes > LARGEST:
        raise InputError(f"search is for small cases: this one has {count(passes, 'pass')}; expected at most {LARGEST}")


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of the solver within its time limit: an order, if it found one, and a lower bound for all orders.

    bound: valid for the true times. exact: the solver did not have to round times. impossible: no order fits the memory
    limit.
    """

    order: Order | None
    bound: float
    exact: bool
    impossible: bool = False


def solve(
    problem: OrderProblem,
    *,
    hint: Order | None = None,
    bound: float = 0.0,
    seconds: float = 30.0,
    workers: int = 1,
    seed: int = 0,
) -> Solution:
    """Search for the shortest order, for at most `seconds`.

    hint: an order of the same passes, as a start. bound: a known lower bound.
    The same arguments give the same order if the search ends before its time limit.
    Raises InputError if OR-tools is not installed, if the case is too large, and for stage passes without duration.
    """
    cp_model = _solver_module()
    refuse_large(problem.size)
    rows = problem.passes()
    kinds = {item.kind.value for row in rows for item in row}
    if problem.costs.B is None:
        kinds |= {"I", "W"}  # B is their sum
    integer = WholeCosts.of(problem.costs, "".join(kinds))
    model = _Model(cp_model, problem, rows, PassTimes(integer.costs, problem.placement), integer)
    model.limit_memory()
    # The margins keep this a valid bound despite floating-point rounding.
    model.minimise(math.ceil(bound / integer.unit * (1 - 1e-9) - 1e-6) if integer.exact else 0)
    if hint is not None:
        model.suggest(time_order(hint, integer.costs))
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = seconds
    parameters.random_seed = seed
    parameters.num_workers = workers
    parameters.interleave_search = True  # strategies take turns, so that the result does not depend on their speed
    status = solver.solve(model.model)
    solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solution(
        model.order(solver) if solved else None,
        max(bound, solver.best_objective_bound * integer.unit) if status != cp_model.INFEASIBLE else math.inf,
        integer.exact,
        status == cp_model.INFEASIBLE,
    )


class _Model:
    """The variables and constraints of a problem."""

    def __init__(
        self,
        cp_model: Any,
        problem: OrderProblem,
        rows: Sequence[Sequence[Pass]],
        times: PassTimes,
        integer: WholeCosts,
    ) -> None:
        self.problem, self.rows = problem, rows
        self.model = cp_model.CpModel()
        self.takes: dict[Where, int] = {}
        self.start: dict[Where, Any] = {}
        delays = [integer.costs.transfer_time(route.kind) for route in self._rules.routes]
        total = sum(times.of(item, device) for device, row in enumerate(rows) for item in row)
        self.horizon = int(total + sum(delays) * problem.microbatches)
        for device, row in enumerate(rows):
            intervals = []
            for item in row:
                where = _where(device, item)
                takes = self.takes[where] = int(times.of(item, device))
                if item.stage is not None and takes == 0:
                    raise InputError(f"costs.{item.kind.value} of stage {item.stage} takes no time; search needs some")
                start = self.start[where] = self.model.new_int_var(0, self.horizon - takes, str(item))
                intervals.append(self.model.new_fixed_size_interval_var(start, takes, str(item)))
            self.model.add_no_overlap(intervals)
        self._require(integer.costs)
        self._start_at_once(integer.costs)

    @property
    def _rules(self) -> Rules:
        return Rules(self.problem.placement, self.problem.vocabulary)

    def end(self, where: Where) -> Any:
        return self.start[where] + self.takes[where]

    def _require(self, costs: Costs) -> None:
        """Add needs between passes, and the order of microbatches."""
        rules = self._rules
        for device, row in enumerate(self.rows):
            for item in row:
                where = _where(device, item)
                start = self.start[where]
                i = where[3]
                rule = rules.of_pass(device, item.kind, item.stage)
                for kind, stage, step in rule.needs:
                    if step == 0 and kind not in IF_PRESENT:
                        self.model.add(start >= self.end((device, kind, stage, i)))
                for route in rule.waits:
                    delay = int(costs.transfer_time(route.kind))
                    for producer in route.producers:
                        self.model.add(start >= self.end((*producer, i)) + delay)
                if i > 0:
                    self.model.add(start >= self.end((*where[:3], i - 1)))

    def _start_at_once(self, costs: Costs) -> None:
        """Fix the start of each device and record it in `heads`; None if it depends on the order."""
        placement = self.problem.placement
        self.heads: list[int | None] = [None] * placement.devices
        if self.problem.vocabulary.sharded:  # E(0) comes first everywhere: the first F waits for all of them
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
        """Limit the stage activations held at the same time, each from the start of F to the end of its release."""
        limits = self.problem.max_in_flight
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
                    if i + limit < count:  # with several stages, implied by the cumulative limit below
                        self.model.add(self.start[device, Kind.F, stage, i + limit] >= end)
                    if len(stages) > 1:
                        length = self.model.new_int_var(0, self.horizon, "")
                        held.append(self.model.new_interval_var(start, length, end, ""))
            if held:
                self.model.add_cumulative(held, [1] * len(held), limit)

    def minimise(self, bound: int) -> None:
        """Set the objective; `bound` is a known lower bound."""
        objective = self.model.new_int_var(bound, max(bound, self.horizon), "objective")
        last = self.problem.microbatches - 1
        for device, row in enumerate(self.rows):
            head: Any = self.heads[device]
            if head is None:  # the F that comes first is that of the first stage
                head = self.start[device, Kind.F, self.problem.placement.stages_of(device)[0], 0]
            begin = head if self.problem.objective == "span" else 0
            for item in row:
                if item.microbatch == last:
                    self.model.add(objective >= self.end(_where(device, item)) - begin)
        self.model.minimize(objective)

    def suggest(self, timeline: Timeline) -> None:
        """Hint the solver with a timeline in the same integer units."""
        for row in timeline.events:
            for event in row:
                if isinstance(event.item, Pass):
                    self.model.add_hint(self.start[_where(event.device, event.item)], round(event.start))

    def order(self, solver: Any) -> Order:
        """Return the passes sorted by start. Among passes that start at the same time, those without duration come
        first, in the order of their needs.

        The needs of a pass end before it starts, so it comes after them.
        """
        rows = []
        for device, row in enumerate(self.rows):
            placed = []
            for item in row:
                where = _where(device, item)
                start = solver.value(self.start[where])
                placed.append((start, start + self.takes[where], RANK.get(item.kind, 0), where[3], item))
            rows.append(tuple(item for *_, item in sorted(placed, key=lambda entry: entry[:4])))
        return Order(self.problem.placement, self.problem.microbatches, tuple(rows), self.problem.vocabulary)


def _where(device: int, item: Pass) -> Where:
    assert item.microbatch is not None, "a pass of a problem has a microbatch"
    return device, ROLE[item.kind], item.stage, item.microbatch


def _solver_module() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise InputError("search needs OR-tools, which is not installed: pip install 'evenpipe[search]'") from None
    return cp_model
