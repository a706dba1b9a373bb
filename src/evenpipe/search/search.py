"""Search for the best order of a small case: first named schedules, then the solver, then the proof.

The result is timed by the event model (`schedule.timing`), in which transfers take time but do not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evenpipe import words
from evenpipe.compare.stage_costs import check_vocabulary_times, costs_for_stages, with_whole_vocabulary
from evenpipe.errors import InputError
from evenpipe.schedule.check import check_order
from evenpipe.schedule.check_limit import limits_per_device
from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.links import LINKS
from evenpipe.schedule.order import Order
from evenpipe.schedule.placement import Placement
from evenpipe.schedule.timeline import Timeline
from evenpipe.schedule.timing import time_order
from evenpipe.schedule.vocabulary_mode import MODES, VocabularyMode
from evenpipe.simulate import best_bound
from evenpipe.words import refused

from .named_orders import NamedOrder, named_orders
from .optimal_order import OrderProblem, refuse_large, solve

SEARCHED = tuple(mode for mode in MODES if mode != "interlaced")
"""Modes that can be searched; in interlaced mode, S and T leave no choice of order."""

EXACT, ROUNDED = 1e-9, 1e-4
"""Relative distance to the bound below which an order counts as best; `ROUNDED` if the solver had to round times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best known order, and a bound on how good it can be.

    source: "search", or the name of the schedule if no shorter order was found. value: the minimised value. bound:
    lower bound. proved: whether the order is proved to be best. named: the named schedules, best first.
    """

    problem: OrderProblem
    order: Order
    timeline: Timeline
    source: str
    value: float
    bound: float
    proved: bool
    named: tuple[NamedOrder, ...]

    @property
    def gap(self) -> float:
        """Return the relative distance to the bound."""
        return above(self.value, self.bound)

    def to_dict(self) -> dict[str, Any]:
        return {
            "objective": self.problem.objective,
            "value": self.value,
            "bound": self.bound,
            "gap": self.gap,
            "proved": self.proved,
            "source": self.source,
            "named": [{"schedule": entry.name, "value": entry.value} for entry in self.named],
            "microbatches": self.problem.microbatches,
            "stage_device": list(self.problem.placement.stage_device),
            **self.timeline.to_dict(),
        }

    def text(self) -> str:
        objective = self.problem.objective
        timeline = self.timeline
        step = f"step {timeline.makespan:g}, of which devices lose {100 - 100 * timeline.mean_busy:.1f} % on average"
        if self.proved:
            verdict = f"{objective} {self.value:g}: no order is shorter"
        else:
            verdict = (
                f"{objective} {self.value:g}: the lower bound is {self.bound:g}, at most {100 * self.gap:.1f} % less"
            )
        source = "found by search" if self.source == "search" else f"'{self.source}'; no shorter order was found"
        lines = [step, verdict, f"order: {source}"]
        if self.named:
            ranks = [
                f"{entry.name} {entry.value:g} (+{100 * above(entry.value, self.value):.1f} %)" for entry in self.named
            ]
            lines.append("named schedules with these passes: " + ", ".join(ranks))
        else:
            lines.append("no named schedule has these passes in this placement and memory")
        lines.append(
            f"bubble {timeline.bubble:g}, {100 * timeline.bubble_rate:.1f} % of the span of the slowest device"
        )
        lines.append(f"most stage activations in flight, per device: {' '.join(map(str, timeline.peak_in_flight))}")
        return "\n".join(lines)


def above(value: float, reference: float) -> float:
    """Return how far `value` is above `reference`, relative to `reference`; 0 if nothing takes time."""
    return value / reference - 1 if reference else 0.0


def search(problem: OrderProblem, *, seconds: float = 30.0, workers: int = 1, seed: int = 0) -> SearchResult | None:
    """Return the shortest order within the limits of `problem` that can be found in `seconds`; None if no order fits.

    Starts from the best named schedule, so the result is never worse. Raises InputError as `solve` does, and if no
    order is found in time.
    """
    if not 0 < seconds < math.inf:
        raise refused("seconds", seconds, "a number above 0")
    if workers < 1:
        raise refused("workers", workers, "a whole number of at least 1")
    refuse_large(problem.size)
    named = named_orders(problem)
    order, source, value = (named[0].order, named[0].name, named[0].value) if named else (None, "", math.inf)
    bound, tolerance = lower_bound(problem), EXACT
    if value > bound * (1 + EXACT):
        solution = solve(problem, hint=order, bound=bound, seconds=seconds, workers=workers, seed=seed)
        if solution.impossible:
            return None
        bound, tolerance = solution.bound, EXACT if solution.exact else ROUNDED
        if solution.order is not None:
            report = check_order(solution.order)
            assert report.ok, f"the solver's order is not sound: {report.faults[0]}"
            solution_value = problem.value(time_order(solution.order, problem.costs))
            if solution_value < value * (1 - EXACT):
                order, source, value = solution.order, "search", solution_value
    if order is None:
        raise InputError(
            f"search found no order within {seconds:g} seconds; give it more time or a higher memory limit"
        )
    return SearchResult(
        problem=problem,
        order=order,
        timeline=time_order(order, problem.costs),
        source=source,
        value=value,
        bound=min(bound, value),
        proved=value <= bound * (1 + tolerance),
        named=tuple(named),
    )


def lower_bound(problem: OrderProblem) -> float:
    """Return a lower bound on all orders of `problem`, without a search."""
    links = {name: link for name, link in problem.costs.links.items() if name in LINKS}
    return best_bound(
        problem.placement,
        problem.microbatches,
        replace(problem.costs, links=links),  # The event model does not know the links of single hops.
        of=problem.objective,
        split=problem.split_backward,
        vocabulary=problem.vocabulary,
        max_in_flight=problem.max_in_flight,
        proved=True,
    ).value


def order_problem_of(
    *,
    devices: int,
    microbatches: int,
    stages_per_device: int | None = None,
    placement: str | None = None,
    split_backward: bool = False,
    vocabulary: str = "balanced",
    costs: Costs | None = None,
    max_in_flight: float | Sequence[float] | None = None,
    objective: str = "span",
) -> OrderProblem:
    """The problem for the values of a user. `costs` are those of a stage, as in `plan_cases`, and by default equal
    costs of a device; if the mode does not shard the vocabulary layers, the first and last stage do their work. Raises
    InputError for impossible values."""
    for name, value in (
        ("devices", devices),
        ("microbatches", microbatches),
        ("stages_per_device", 1 if stages_per_device is None else stages_per_device),
    ):
        if value < 1:
            raise refused(name, value, "at least 1")
    refuse_large(2 * devices * microbatches * (stages_per_device or 1))
    mode = VocabularyMode.of(vocabulary)
    if mode not in SEARCHED:
        raise InputError(f"search knows the vocabulary modes {', '.join(SEARCHED)}, not {mode}")
    if placement is None:
        placement = "linear" if stages_per_device in (None, 1) else "looped"
    limits = None
    if max_in_flight is not None:
        limits = tuple(math.floor(limit) for limit in limits_per_device(max_in_flight, devices))
    stages = placement_of(placement, devices, stages_per_device)
    if costs is None:
        costs = costs_for_stages(EQUAL_COSTS, devices, stages.stages)
    check_vocabulary_times(costs, mode)
    return OrderProblem(
        placement=stages,
        microbatches=microbatches,
        costs=costs if mode.sharded else with_whole_vocabulary(costs, stages),
        vocabulary=mode,
        split_backward=split_backward,
        max_in_flight=limits,
        objective=objective,
    )


def placement_of(text: str, devices: int, stages_per_device: int | None) -> Placement:
    """Return the placement that a user names: linear, looped, v, or the device of each stage as in 0,1,1,0.

    Raises InputError for anything else, and if the placement contradicts the numbers of devices and stages.
    """
    count = stages_per_device
    if text == "linear" and count in (None, 1):
        return Placement.linear(devices)
    if text == "looped":
        return Placement.looped(devices, 2 if count is None else count)
    if text == "v" and count in (None, 2):
        return Placement.v_shape(devices)
    if text in ("linear", "v"):
        has = "1 stage" if text == "linear" else "2 stages"
        raise InputError(f"placement '{text}' has {has} per device, not {count}")
    try:
        stage_device = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise refused("placement", text, "linear, looped, v, or the device of each stage such as 0,1,1,0") from None
    if count is not None and len(stage_device) != count * devices:
        has = words.count(len(stage_device), "stage")
        raise InputError(f"placement '{text}' has {has}, not {count} on each of {words.count(devices, 'device')}")
    return Placement(devices, stage_device)
