"""Find the fastest configurations that fit, without evaluating all of them.

Best-first search: layouts are sorted by a bound on their time, their configurations by a sharper one (`bounds`), and
the first are evaluated. When no bound is below the time of the last wanted plan by half a percent, the search ends. So
the result is that of an exhaustive search, except for two rules, the second one empirical:

    more sequences per microbatch never need less memory: if a configuration does not fit, larger ones are skipped
    a schedule loses on a layout at least half of what it loses against its bound on others with as many devices, and
    with the vocabulary sharded at least half of what it loses with it whole

The search does not assume that the least model parallelism that fits is the fastest (arXiv 2411.06465: within twice the
least): that was found with 1F1B and whole vocabulary layers, and would exclude deep pipelines without their bubbles.

Most steps are extrapolated, and layouts share programs (`programs`). At the end the wanted plans are evaluated with
programs of their own, and whole steps of the fastest are timed until one of these is the fastest. So their memory, and
its time, are those of what runs.

Evaluations run in processes, a fixed number at a time, so the result does not depend on the number of processes.
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, repeat
from typing import Any, NamedTuple

import torch

from evenpipe.costs.timed_model import split_times
from evenpipe.recipe.parallelism import AXES
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule.collection import collecting_rarely

from .bounds import Bound, layout_bound, order_bound, work_bound
from .configuration import Configuration
from .evaluation import Evaluation, evaluate, timed_whole
from .evaluation_cache import EvaluationCache
from .problem import ArrangedBy, Problem
from .space import LONG, Space, configurations, layouts, refuses, usual_space

TOGETHER = 8
"""Configurations that are evaluated at the same time."""

LOSS_SHARE = 0.5
"""Share of the smallest loss of a schedule on any layout that it is expected to lose on others."""

ENOUGH = 3
"""Layouts on which a schedule is evaluated before its loss counts."""

WORTH = 0.995
"""The search ignores plans that cannot be faster than this share of the time of the last wanted plan: pass times are
not known more precisely, and many plans differ by less."""

Progress = Callable[[int, int, float], None]
"""Called with evaluations done, configurations waiting, and the time of the best plan so far (infinite without)."""


class Rejected(NamedTuple):
    """A configuration, or a whole layout, that certainly does not fit; found without a full evaluation."""

    layout: Recipe
    configuration: Configuration | None
    bound: Bound


@dataclass(slots=True)
class Found:
    """The results of a search. plans: those that fit, fastest first. failed: evaluated, but do not fit."""

    problem: Problem
    space: Space
    plans: list[Evaluation] = field(default_factory=list)
    failed: list[Evaluation] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    evaluated: int = 0
    bounded: int = 0
    """Number of configurations excluded by a bound alone."""
    layouts: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Number of layouts that would be fast enough, but are not in the space, by the reason that `refuses` gives."""

    @property
    def best(self) -> Evaluation | None:
        return self.plans[0] if self.plans else None

    def best_of(self, vocabulary: str) -> Evaluation | None:
        """Return the fastest pipeline with a vocabulary mode among the plans seen."""
        return next((plan for plan in self.plans if _mode(plan.configuration) == vocabulary), None)


@collecting_rarely()
def search_configurations(
    problem: Problem,
    space: Space | None = None,
    *,
    wanted: int = 10,
    each_vocabulary: bool = False,
    workers: int | None = None,
    cache: EvaluationCache | None = None,
    progress: Progress | None = None,
) -> Found:
    """Return the `wanted` fastest plans; with `each_vocabulary` also the fastest pipeline of every vocabulary mode.

    space: None: `usual_space`.
    workers: processes, by default one per core; 1 evaluates in this process. Raises InputError as `layouts`.
    """
    run = _Search(problem, space or usual_space(problem), wanted, each_vocabulary, cache or EvaluationCache())
    with _pool(problem, workers) as evaluate_all:
        run.to_the_end(evaluate_all, progress)
        run.settle(evaluate_all)
    run.found.failed.sort(key=lambda plan: plan.configuration.name)
    return run.found


_Sizes = list[tuple[float, Recipe]]
"""Layouts that differ only in the sequences of a microbatch, fewest first, each with its bound."""


class _Search:
    def __init__(
        self, problem: Problem, space: Space, wanted: int, each_vocabulary: bool, cache: EvaluationCache
    ) -> None:
        self.problem, self.space, self.wanted, self.each = problem, space, wanted, each_vocabulary
        self.cache = cache
        self.found = Found(problem, space)
        self.numbers = count()
        self.heap: list[tuple[float, int, _Sizes | Configuration]] = []
        self.asked: dict[Configuration, Configuration] = {}  # by evaluated configuration: with its open fields
        self.sharp: dict[Configuration, float] = {}  # bounds of those that have that of `order_bound`
        self.times: list[float] = []  # times of the plans that fit, ascending
        self.best_of: dict[str, float] = {}  # by vocabulary mode
        self.losses: dict[Any, list[float]] = defaultdict(list)  # by `_families`: times over bounds
        self.too_large: dict[Any, int] = {}  # by the other fields: sequences per microbatch that do not fit
        most_on_host = max(1.0 if share is None else share for share in space.host_shares)
        slices = problem.sequence >= LONG if space.slices is None else space.slices != (1,)
        alike: dict[Any, _Sizes] = {}
        for layout in layouts(problem, space):
            self.found.layouts += 1
            bound = layout_bound(problem, layout, most_on_host, slices=slices)
            if bound.lacking:
                self.found.rejected.append(Rejected(layout, None, bound))
            else:
                alike.setdefault(_axes(layout), []).append((bound.seconds, layout))
        for sizes in alike.values():
            self._push_layouts(sorted(sizes, key=lambda one: one[1].batch.microbatch_size))

    def to_the_end(self, evaluate_all: _EvaluateAll, progress: Progress | None) -> None:
        """Search until no better plan is possible."""
        while batch := self._next():
            limits = [self._limit(_mode(one)) for one in batch]
            found = self.cache.evaluated(batch, limits, evaluate_all, "roughly")
            for one, evaluation in zip(batch, found, strict=True):
                self.asked[evaluation.configuration] = one
                self._take(evaluation)
                if evaluation.late or evaluation.fits:
                    loss = evaluation.seconds / self.sharp[one]
                    for family in _families(one):
                        self.losses[family].append(loss)
            if progress is not None:
                progress(self.found.evaluated, len(self.heap), self.times[0] if self.times else math.inf)

    def settle(self, evaluate_all: _EvaluateAll) -> None:
        """Sort the plans, evaluate those that are wanted as they run, and time whole steps of the fastest until one of
        these is the fastest; with `each_vocabulary` of every mode."""
        plans, own, whole = self.found.plans, set[Configuration](), set[Configuration]()
        while True:
            self.found.failed += (plan for plan in plans if not plan.fits)
            plans[:] = sorted((plan for plan in plans if plan.fits), key=_place)
            leading = self._leading()
            shown = sorted({*range(len(plans))[: self.wanted], *leading})
            rough = [n for n in shown if plans[n].configuration not in own]
            first = next((n for n in leading if plans[n].configuration not in whole), None)
            if rough:
                asked = [self.asked[plans[n].configuration] for n in rough]
                found = self.cache.evaluated(asked, [math.inf] * len(asked), evaluate_all, "times")
                for n, one, plan in zip(rough, asked, found, strict=True):
                    plans[n], self.asked[plan.configuration] = plan, one
                    own.add(plan.configuration)
            elif first is not None:
                plans[first] = self.cache.whole(plans[first], partial(timed_whole, self.problem))
                whole.add(plans[first].configuration)
            else:
                return

    def _leading(self) -> Collection[int]:
        """Return the places of the fastest plan, or of that of every mode."""
        leading: dict[str | None, int] = {}
        for place, plan in enumerate(self.found.plans):
            leading.setdefault(_mode(plan.configuration) if self.each else None, place)
        return leading.values()

    def _push_layouts(self, sizes: _Sizes) -> None:
        if sizes:
            self._push(min(seconds for seconds, _ in sizes), sizes)

    def _push(self, bound: float, node: _Sizes | Configuration) -> None:
        heapq.heappush(self.heap, (bound, next(self.numbers), node))

    def _next(self) -> list[Configuration]:
        """Return the configurations to evaluate together next; none at the end. Those of a schedule and mode whose loss
        is not known yet wait for the first of them."""
        batch: list[Configuration] = []
        unknown: set[Any] = set()
        while self.heap and len(batch) < TOGETHER:
            seconds, _, node = heapq.heappop(self.heap)
            if seconds >= self._limit(*self.space.vocabularies):
                self.heap.clear()
            elif isinstance(node, list):
                self._open(node)
            elif self._skip(node):
                continue
            elif node not in self.sharp:
                bound = work_bound(self.problem, node, traced=True)
                if bound.lacking:
                    self._reject(node, bound)
                else:
                    self.sharp[node] = max(bound.seconds, order_bound(self.problem, node, bound.again))
                    self._push(self._expected(node), node)
            elif (expected := self._expected(node)) > seconds:
                self._push(expected, node)
            elif seconds >= self._limit(_mode(node)):
                continue
            elif (family := _families(node)[-1]) in unknown and node.recipe.devices > 1:
                self._push(seconds, node)
                break
            else:
                batch.append(node)
                if not self.losses[family]:
                    unknown.add(family)
        return batch

    def _limit(self, *modes: str | None) -> float:
        """Return the time that a plan must beat that has one of these vocabulary modes; None: on a single device."""
        limits = [self.times[self.wanted - 1] if len(self.times) >= self.wanted else math.inf]
        if self.each:
            limits += [self.best_of.get(mode, math.inf) for mode in modes if mode is not None]
        return WORTH * max(limits)

    def _expected(self, one: Configuration) -> float:
        """Return the bound on the step with the empirical factor."""
        known = [self.losses[family] for family in _families(one)] if one.recipe.devices > 1 else []
        loss = max((min(losses) for losses in known if len(losses) >= ENOUGH), default=1.0)
        return self.sharp[one] * (1 + LOSS_SHARE * (loss - 1))

    def _open(self, sizes: _Sizes) -> None:
        """Compute bounds of all configurations of the layout with the fewest sequences per microbatch that may be fast
        enough; the others are opened later, if any of these may fit."""
        limit, may_fit = self._limit(*self.space.vocabularies), False
        (_, layout), *larger = (one for one in sizes if one[0] < limit)
        if reason := refuses(self.problem, self.space, layout):
            self.found.refused[reason] += 1 + len(larger)
            return
        for one in configurations(self.problem, self.space, layout, head_layers(self.problem, layout)):
            self.found.bounded += 1
            if self._skip(one):
                continue
            bound = work_bound(self.problem, one)
            if bound.lacking:
                self._reject(one, bound)
            else:
                may_fit = True
                self._push(bound.seconds, one)
        if may_fit:
            self._push_layouts(larger)

    def _skip(self, one: Configuration) -> bool:
        return one.recipe.batch.microbatch_size >= self.too_large.get(_all_but_size(one), math.inf)

    def _reject(self, one: Configuration, bound: Bound) -> None:
        self.found.rejected.append(Rejected(one.recipe, one, bound))
        self._does_not_fit(one)

    def _does_not_fit(self, one: Configuration) -> None:
        key, size = _all_but_size(one), one.recipe.batch.microbatch_size
        self.too_large[key] = min(size, self.too_large.get(key, size))

    def _take(self, evaluation: Evaluation) -> None:
        found, one = self.found, evaluation.configuration
        found.evaluated += 1
        if not evaluation.fits:
            found.failed.append(evaluation)
            if not evaluation.fault:
                self._does_not_fit(one)
            return
        if evaluation.late:
            return
        found.plans.append(evaluation)
        self.times.append(evaluation.seconds)
        self.times.sort()
        mode = _mode(one)
        if mode is not None:
            self.best_of[mode] = min(evaluation.seconds, self.best_of.get(mode, math.inf))


def head_layers(problem: Problem, layout: Recipe) -> float:
    """Return the time of the whole output layer, in layers."""
    layers, head = split_times(problem, replace(layout, checkpointing="none"))
    return head / layers[-1]


def _place(plan: Evaluation) -> tuple[float, str]:
    return plan.seconds, plan.configuration.name


def _mode(one: Configuration) -> str | None:
    """Return the vocabulary mode of a pipeline; None for a single device."""
    return one.recipe.vocabulary if one.recipe.devices > 1 else None


def _families(one: Configuration) -> tuple[Any, Any]:
    """Return what those have in common that lose similar shares: with any vocabulary mode, and with the same."""
    recipe = one.recipe
    family = one.schedule, recipe.schedule_options, one.offload, recipe.devices, recipe.slices
    return family, (*family, recipe.vocabulary)


def _all_but_size(one: Configuration) -> Any:
    recipe, keeps = one.recipe, (one.checkpointing, one.offload, one.host_share, one.recipe.slices)
    return _axes(recipe), one.schedule, recipe.schedule_options, recipe.vocabulary, one.layers_per_stage, keeps


def _axes(recipe: Recipe) -> Any:
    """Return what layouts have in common that differ only in the sequences of a microbatch, and what follows from
    them."""
    sizes = recipe.parallelism
    return (*(getattr(sizes, axis) for axis in AXES), sizes.zero)


# --- processes -----------------------------------------------------------------------------------------------

_EvaluateAll = Callable[[Sequence[Configuration], Sequence[float], ArrangedBy], Iterator[Evaluation]]
"""Evaluates configurations, each with its limit."""

_problem: Problem | None = None
"""Problem of this process, if it is a worker."""


@contextmanager
def _pool(problem: Problem, workers: int | None) -> Iterator[_EvaluateAll]:
    """Return worker processes. They are forked if possible, so that they have the model and the libraries at once."""
    processes = cores() if workers is None else workers
    if processes == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield lambda batch, limits, by: map(partial(evaluate, replace(problem, arranged_by=by)), batch, limits)
        return
    global _problem  # noqa: PLW0603 - what forked processes find
    _problem = problem
    # One thread each: the pool of threads of OpenMP does not survive a fork, so a product that wants it never ends.
    executor: Executor = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        yield lambda batch, limits, by: executor.map(_evaluate_here, batch, limits, repeat(by))
    finally:
        executor.shutdown(cancel_futures=True)
        _problem = None


def _evaluate_here(one: Configuration, limit: float, by: ArrangedBy) -> Evaluation:
    assert _problem is not None
    return evaluate(replace(_problem, arranged_by=by), one, limit)


def cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
