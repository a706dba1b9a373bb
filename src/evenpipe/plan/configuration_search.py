"""Find the fastest configurations that fit, without evaluating all of them.

This is a best-first search: layouts are sorted by a bound on their step time, their configurations by a sharper bound
(`bounds`), and the first ones are evaluated. The search ends when no bound is at least half a percent below the time of
the last wanted plan. So the result is that of an exhaustive search, except for two rules, the second of them empirical:

    more sequences per microbatch never need less memory: if a configuration does not fit, larger ones are skipped
    the loss of a schedule against its bound on a layout is at least half its loss on other layouts with as many
    devices, and with sharded vocabulary layers at least half its loss with whole ones

The search does not assume that the least model parallelism that fits is the fastest (arXiv 2411.06465: within twice the
least). That result was obtained with 1F1B and whole vocabulary layers, and would exclude deep pipelines whose
schedules avoid bubbles.

Most steps are extrapolated, and layouts share programs (`programs`). At the end the wanted plans are evaluated with
separate programs, and whole steps of the fastest plan are timed until a plan timed this way is the fastest. So the
memory of the wanted plans, and the time of the fastest one, are those of the actual run.

A search of many layouts first gives a rough answer: the best 1F1B plan of all layouts, then the best schedule and
vocabulary mode in the layout of that plan, each found by a separate search. If the search has to end early, these are
plans like all others; otherwise they are dropped, so they do not affect the result.

Evaluations run in worker processes, a fixed number at a time, so the result does not depend on the number of processes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Any, Literal, NamedTuple

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
"""The most configurations evaluated at the same time; fewer if that is more than two per wanted plan."""

LOSS_SHARE = 0.5
"""Share of a schedule's smallest loss on any layout that is expected as its loss on other layouts."""

ENOUGH = 3
"""Number of layouts on which a schedule is evaluated before its loss counts."""

WORTH = 0.995
"""The search ignores plans that cannot be faster than this share of the time of the last wanted plan: pass times are
not known more precisely, and many plans differ by less."""

MANY = 400
"""Number of layouts from which on a search gives a rough answer first."""

QUICK = ("1f1b", "redistribute")
"""Schedule and vocabulary mode of the rough answer, if the space has them: their orders are quick to generate."""

PROGRESS_INTERVAL = 0.2
"""Least time between two calls of `Progress`, in seconds."""


class Rejected(NamedTuple):
    """A configuration, or a whole layout, that certainly does not fit, as shown without a full evaluation."""

    layout: Recipe
    configuration: Configuration | None
    bound: Bound


@dataclass(slots=True)
class PlanSearchResult:
    """The results of a search. plans: evaluations that fit, fastest first. failed: evaluations that do not fit."""

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
    """Number of layouts that would be fast enough but are not in the space, by the reason that `refuses` returns."""
    ended: Literal["", "time", "interrupt"] = ""
    """Why the search ended early. In that case, times and memory of all plans but the first are those of shared
    programs (`Programs.of`)."""
    seconds: float = 0.0
    """Duration of the search."""
    layouts_left: int = 0
    """Number of layouts not examined that may have a faster plan than the last wanted one."""
    configurations_left: int = 0
    """Number of configurations of other layouts, likewise."""
    least_seconds: float = 0.0
    """Lower bound on the step time of everything that is left, as far as bounds and losses tell."""

    rough: list[Evaluation] = field(default_factory=list)
    """Plans of the rough answer, fastest first; empty after the search has ended."""

    @property
    def best(self) -> Evaluation | None:
        return min((*self.plans[:1], *self.rough[:1]), key=_rank, default=None)

    @property
    def left(self) -> int:
        return self.layouts_left + self.configurations_left

    def best_of(self, vocabulary: str) -> Evaluation | None:
        """Return the fastest pipeline with this vocabulary mode among the plans found."""
        return next((plan for plan in self.plans if _mode(plan.configuration) == vocabulary), None)


Progress = Callable[[PlanSearchResult], None]
"""Called now and then with the results so far; its plans are sorted, but not yet final as after a complete search.
`ended` is already set while the best plan of a search that ended early is being checked."""


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C during a search."""

    def __init__(self, search: _Search) -> None:
        super().__init__()
        self._search = search

    def found(self) -> PlanSearchResult:
        """Return the results so far, with the best plan checked; another Ctrl-C meanwhile leaves it unchecked."""
        with suppress(KeyboardInterrupt):
            if not self._search.result.ended:
                self._search.end_early("interrupt")
        self._search.result.ended = "interrupt"
        return self._search.final_result()


class _TimeIsUpError(Exception):
    """The search has reached its time limit."""


@collecting_rarely()
def search_configurations(
    problem: Problem,
    space: Space | None = None,
    *,
    count: int = 10,
    each_vocabulary: bool = False,
    workers: int | None = None,
    cache: EvaluationCache | None = None,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> PlanSearchResult:
    """Return the `count` fastest plans; with `each_vocabulary` also the fastest pipeline of every vocabulary mode.

    space: None: `usual_space`.
    workers: processes, by default one per core; 1 evaluates in this process.
    seconds: time limit. After it the search ends as soon as the current evaluation is done and the best plan checked.

    Raises InputError as `layouts`, and SearchInterrupted on Ctrl-C.
    """
    watch = _Watch(seconds, progress)
    search = _Search(problem, space or usual_space(problem), count, watch, cache, each_vocabulary=each_vocabulary)
    watch.search = search
    try:
        try:
            with watch.deferring_interrupts(), _pool(problem, workers, watch) as evaluate_all:
                search.answer_roughly(evaluate_all)
                search.run(evaluate_all)
                search.settle(evaluate_all, count)
        except _TimeIsUpError:
            search.end_early("time")
    except KeyboardInterrupt:
        raise SearchInterrupted(search) from None
    return search.final_result()


class _Watch:
    """Reports the progress of a search and ends it at its time limit."""

    def __init__(self, limit: float, progress: Progress | None) -> None:
        self.started = self.reported = time.monotonic()
        self.limit, self.progress = limit, progress
        self.search: _Search | None = None
        self.answer: Callable[[], object] = lambda: None

    @contextmanager
    def deferring_interrupts(self) -> Iterator[None]:
        """Hold Ctrl-C back until the next `check` if it comes in a callback for freed memory, such as that of
        `memory.tracker`, or in a `__del__`: Python ignores exceptions there."""
        with _defer_interrupts(_is_freeing) as self.answer:
            yield

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def check(self) -> None:
        """Report progress if the last report is old enough. Raises _TimeIsUpError after the time limit."""
        self.answer()
        if self.seconds >= self.limit:
            raise _TimeIsUpError
        if self.search is not None and time.monotonic() - self.reported >= PROGRESS_INTERVAL:
            self.report(self.search.progress_so_far())

    def report(self, result: PlanSearchResult) -> None:
        if self.progress is not None:
            self.progress(result)
        self.reported = time.monotonic()


_Sizes = list[tuple[float, Recipe]]
"""Layouts that differ only in the sequences of a microbatch, fewest first, each with its bound."""


class _Search:
    def __init__(
        self,
        problem: Problem,
        space: Space,
        count: int,
        watch: _Watch,
        cache: EvaluationCache | None = None,
        *,
        each_vocabulary: bool = False,
    ) -> None:
        """each_vocabulary: the fastest plan of each vocabulary mode is also wanted."""
        self.problem, self.space, self.count, self.each_vocabulary = problem, space, count, each_vocabulary
        self.watch, self.cache = watch, cache or EvaluationCache()
        self.result = PlanSearchResult(problem, space)
        self.numbers = itertools.count()
        self.heap: list[tuple[float, int, _Sizes | Configuration]] = []
        self.requested: dict[Configuration, Configuration] = {}  # by evaluated configuration: the one with open fields
        self.sharp_bounds: dict[Configuration, float] = {}  # for configurations with an `order_bound`
        self.times: list[float] = []  # times of the plans that fit, ascending
        self.best_of: dict[str, float] = {}  # by vocabulary mode
        self.losses: dict[Any, list[float]] = defaultdict(list)  # by `_families`: times over bounds
        self.too_large: dict[Any, int] = {}  # by the other fields: sequences per microbatch that do not fit
        most_on_host = max(1.0 if share is None else share for share in space.host_shares)
        slices = problem.sequence >= LONG if space.slices is None else space.slices != (1,)
        alike: dict[Any, _Sizes] = {}
        for layout in layouts(problem, space):
            self.result.layouts += 1
            bound = layout_bound(problem, layout, most_on_host, slices=slices)
            if bound.shortfall:
                self.result.rejected.append(Rejected(layout, None, bound))
            else:
                alike.setdefault(_axes(layout), []).append((bound.seconds, layout))
        for sizes in alike.values():
            self._push_layouts(sorted(sizes, key=lambda entry: entry[1].batch.microbatch_size))
        self.result.least_seconds = min((bound for bound, *_ in self.heap), default=0.0)

    def answer_roughly(self, evaluate_all: _EvaluateAll) -> None:
        """If there are many layouts, search the usual pipelines of all layouts, then all pipelines of the best of these
        layouts."""
        schedule, mode = QUICK
        modes = self.space.vocabularies
        usual = replace(
            self.space,
            schedules=(schedule,) if schedule in self.space.schedules else self.space.schedules[:1],
            vocabularies=(mode,) if mode in modes else modes[:1],
            offload=self.space.offload[:1],
            host_shares=self.space.host_shares[:1],
        )
        if self.result.layouts < MANY or usual == self.space:
            return
        self._search_subspace(usual, evaluate_all)
        if self.result.rough:
            recipe = self.result.rough[0].configuration.recipe
            axes: dict[str, Any] = {axis: (getattr(recipe.parallelism, axis),) for axis in (*AXES, "zero")}
            sizes = (recipe.batch.microbatch_size,)
            self._search_subspace(replace(self.space, **axes, microbatch_sizes=sizes), evaluate_all)

    def _search_subspace(self, space: Space, evaluate_all: _EvaluateAll) -> None:
        """Add the fastest plans of a part of the space to the rough plans."""
        search = _Search(self.problem, space, 1, self.watch)
        search.requested, search.result.plans = self.requested, self.result.rough
        search.run(evaluate_all)

    def run(self, evaluate_all: _EvaluateAll) -> None:
        """Search until no better plan is possible."""
        while batch := self._next():
            limits = [self._limit(_mode(configuration)) for configuration in batch]
            evaluations = self.cache.evaluated(batch, limits, evaluate_all, "roughly")
            for configuration, evaluation in zip(batch, evaluations, strict=True):
                self.requested[evaluation.configuration] = configuration
                self._add(evaluation)
                if evaluation.late or evaluation.fits:
                    loss = evaluation.seconds / self.sharp_bounds[configuration]
                    for family in _families(configuration):
                        self.losses[family].append(loss)
            self.watch.check()
        self.result.rough.clear()

    def progress_so_far(self) -> PlanSearchResult:
        """Return the results so far, with the numbers of layouts and configurations left."""
        result, limit = self.result, self._limit(*self.space.vocabularies)
        left = [node for bound, _, node in self.heap if bound < limit]
        result.layouts_left = sum(len(node) for node in left if isinstance(node, list))
        result.configurations_left = sum(isinstance(node, Configuration) for node in left)
        result.seconds = self.watch.seconds
        return result

    def end_early(self, reason: Literal["time", "interrupt"]) -> None:
        """Add the rough plans to the others, and check which plan is the fastest, in this process."""
        result = self.result
        result.ended = reason
        known = {plan.configuration for plan in result.plans}
        for plan in result.rough:
            if plan.configuration not in known:
                known.add(plan.configuration)
                insort(result.plans, plan, key=_rank)
        result.rough.clear()
        self.watch.report(self.progress_so_far())
        self.settle(partial(_evaluate_alone, self.problem), 0)

    def final_result(self) -> PlanSearchResult:
        """Return the final results."""
        self.result.seconds = self.watch.seconds
        self.result.failed.sort(key=lambda plan: plan.configuration.name)
        return self.result

    def settle(self, evaluate_all: _EvaluateAll, count: int) -> None:
        """Sort the plans, evaluate the best and the `count` fastest ones with separate programs, and time whole steps
        of the best plan until a plan timed this way is the fastest; with `each_vocabulary`, of the best plan of every
        mode."""
        plans, exact, timed = self.result.plans, set[Configuration](), set[Configuration]()
        while True:
            self.result.failed += (plan for plan in plans if not plan.fits)
            plans[:] = sorted((plan for plan in plans if plan.fits), key=_rank)
            leading = self._leading()
            shown = sorted({*range(len(plans))[:count], *leading})
            inexact = [n for n in shown if plans[n].configuration not in exact]
            first = next((n for n in leading if plans[n].configuration not in timed), None)
            if inexact:
                configurations = [self.requested[plans[n].configuration] for n in inexact]
                evaluated = self.cache.evaluated(
                    configurations, [math.inf] * len(configurations), evaluate_all, "times"
                )
                for n, configuration, plan in zip(inexact, configurations, evaluated, strict=True):
                    plans[n], self.requested[plan.configuration] = plan, configuration
                    exact.add(plan.configuration)
            elif first is not None:
                plans[first] = self.cache.whole(plans[first], partial(timed_whole, self.problem))
                timed.add(plans[first].configuration)
            else:
                return

    def _leading(self) -> Collection[int]:
        """Return the position of the fastest plan, or the positions of the fastest plan of every mode."""
        leading: dict[str | None, int] = {}
        for position, plan in enumerate(self.result.plans):
            leading.setdefault(_mode(plan.configuration) if self.each_vocabulary else None, position)
        return leading.values()

    def _push_layouts(self, sizes: _Sizes) -> None:
        if sizes:
            self._push(min(seconds for seconds, _ in sizes), sizes)

    def _push(self, bound: float, node: _Sizes | Configuration) -> None:
        heapq.heappush(self.heap, (bound, next(self.numbers), node))

    def _next(self) -> list[Configuration]:
        """Return the configurations to evaluate together next; empty at the end. If the loss of a schedule and mode is
        not yet known, only the first of its configurations is evaluated, and the others wait for it."""
        batch: list[Configuration] = []
        unknown: set[Any] = set()
        while self.heap and len(batch) < min(TOGETHER, 2 * self.count):
            self.watch.check()
            seconds, _, node = heapq.heappop(self.heap)
            if not batch:
                self.result.least_seconds = max(self.result.least_seconds, seconds)
            if seconds >= self._limit(*self.space.vocabularies):
                self.heap.clear()
            elif isinstance(node, list):
                self._open(node)
            elif self._skip(node):
                continue
            elif node not in self.sharp_bounds:
                bound = work_bound(self.problem, node, traced=True)
                if bound.shortfall:
                    self._reject(node, bound)
                else:
                    self.sharp_bounds[node] = max(bound.seconds, order_bound(self.problem, node, bound.recomputation))
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
        """Return the time that a plan with one of these vocabulary modes must beat; None stands for a single device."""
        limits = [self.times[self.count - 1] if len(self.times) >= self.count else math.inf]
        if self.each_vocabulary:
            limits += [self.best_of.get(mode, math.inf) for mode in modes if mode is not None]
        return WORTH * max(limits)

    def _expected(self, configuration: Configuration) -> float:
        """Return the bound on the step time with the empirical factor."""
        known = [self.losses[family] for family in _families(configuration)] if configuration.recipe.devices > 1 else []
        loss = max((min(losses) for losses in known if len(losses) >= ENOUGH), default=1.0)
        return self.sharp_bounds[configuration] * (1 + LOSS_SHARE * (loss - 1))

    def _open(self, sizes: _Sizes) -> None:
        """Compute the bounds of all configurations of the layout with the fewest sequences per microbatch that may be
        fast enough. The other layouts are opened later, if any of these configurations may fit."""
        limit, may_fit = self._limit(*self.space.vocabularies), False
        (_, layout), *larger = (entry for entry in sizes if entry[0] < limit)
        if reason := refuses(self.problem, self.space, layout):
            self.result.refused[reason] += 1 + len(larger)
            return
        for configuration in configurations(self.problem, self.space, layout, head_layers(self.problem, layout)):
            self.result.bounded += 1
            if self._skip(configuration):
                continue
            bound = work_bound(self.problem, configuration)
            if bound.shortfall:
                self._reject(configuration, bound)
            else:
                may_fit = True
                self._push(bound.seconds, configuration)
        if may_fit:
            self._push_layouts(larger)

    def _skip(self, configuration: Configuration) -> bool:
        return configuration.recipe.batch.microbatch_size >= self.too_large.get(_all_but_size(configuration), math.inf)

    def _reject(self, configuration: Configuration, bound: Bound) -> None:
        self.result.rejected.append(Rejected(configuration.recipe, configuration, bound))
        self._does_not_fit(configuration)

    def _does_not_fit(self, configuration: Configuration) -> None:
        key, size = _all_but_size(configuration), configuration.recipe.batch.microbatch_size
        self.too_large[key] = min(size, self.too_large.get(key, size))

    def _add(self, evaluation: Evaluation) -> None:
        result, configuration = self.result, evaluation.configuration
        result.evaluated += 1
        if not evaluation.fits:
            result.failed.append(evaluation)
            if not evaluation.fault:
                self._does_not_fit(configuration)
            return
        if evaluation.late:
            return
        insort(result.plans, evaluation, key=_rank)
        self.times.append(evaluation.seconds)
        self.times.sort()
        mode = _mode(configuration)
        if mode is not None:
            self.best_of[mode] = min(evaluation.seconds, self.best_of.get(mode, math.inf))


def head_layers(problem: Problem, layout: Recipe) -> float:
    """Return the time of the whole output layer, in layers."""
    layers, head = split_times(problem, replace(layout, activation_checkpointing="none"))
    return head / layers[-1]


def _rank(plan: Evaluation) -> tuple[float, str]:
    return plan.seconds, plan.configuration.name


def _mode(configuration: Configuration) -> str | None:
    """Return the vocabulary mode of a pipeline; None for a single device."""
    return configuration.recipe.vocabulary if configuration.recipe.devices > 1 else None


def _families(configuration: Configuration) -> tuple[Any, Any]:
    """Return keys of the families of configurations with similar losses: over all vocabulary modes, and with the same
    one."""
    recipe = configuration.recipe
    family = configuration.schedule, recipe.schedule_options, configuration.offload, recipe.devices, recipe.slices
    return family, (*family, recipe.vocabulary)


def _all_but_size(configuration: Configuration) -> Any:
    recipe = configuration.recipe
    memory_fields = configuration.checkpointing, configuration.offload, configuration.host_share, recipe.slices
    return (
        _axes(recipe),
        configuration.schedule,
        recipe.schedule_options,
        recipe.vocabulary,
        configuration.layers_per_stage,
        memory_fields,
    )


def _axes(recipe: Recipe) -> Any:
    """Return a key shared by layouts that differ only in the number of sequences per microbatch and what follows from
    it."""
    sizes = recipe.parallelism
    return (*(getattr(sizes, axis) for axis in AXES), sizes.zero)


# --- processes -----------------------------------------------------------------------------------------------

_EvaluateAll = Callable[[Sequence[Configuration], Sequence[float], ArrangedBy], Iterator[Evaluation]]
"""Evaluates configurations, each with its time limit."""

_problem: Problem | None = None
"""The problem of this process, if it is a worker."""

_idle = threading.Lock()
"""Held by a worker except during an evaluation: half a result in the pipe to the parent would block it forever."""


@contextmanager
def _pool(problem: Problem, workers: int | None, watch: _Watch) -> Iterator[_EvaluateAll]:
    """Yield a function that evaluates in worker processes. These are forked if possible, so that they have the model
    and the libraries from the start, and end with the context, whatever they are doing."""
    processes = cores() if workers is None else workers
    if processes == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield partial(_evaluate_alone, problem, watch=watch)
        return
    global _problem  # noqa: PLW0603 - read by forked processes
    _problem = problem
    context = multiprocessing.get_context("fork")
    ending = context.Event()
    executor: Executor = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(ending,))
    try:
        yield partial(_evaluate_in, executor, watch)
    finally:
        _problem = None
        with _uninterrupted():
            ending.set()
            executor.shutdown(cancel_futures=True)


def _is_freeing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name not in ("on_freed", "__del__"):
        frame = frame.f_back
    return frame is not None


def _uninterrupted() -> AbstractContextManager[object]:
    """Defer Ctrl-C until the end of the context: an executor interrupted in the middle of a call never ends."""
    return _defer_interrupts(lambda frame: True)


@contextmanager
def _defer_interrupts(when: Callable[[FrameType | None], bool]) -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C when it arrives in a frame for which `when` is true. Yields a function that delivers a deferred
    Ctrl-C, as the end of the context does."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if when(frame):
            held.append(frame)
        else:
            previous(number, frame)

    def answer() -> None:
        if held:
            frame = held[0]
            held.clear()
            previous(signal.SIGINT, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield answer
    finally:
        signal.signal(signal.SIGINT, previous)
        answer()


def _start_worker(ending: Event) -> None:
    # One thread each: OpenMP's thread pool does not survive a fork, so a product that uses it would never end.
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    _idle.acquire()
    threading.Thread(target=_end_worker, args=(ending,), daemon=True).start()


def _end_worker(ending: Event) -> None:
    ending.wait()
    _idle.acquire()
    os._exit(0)


def _evaluate_in(
    executor: Executor, watch: _Watch, batch: Sequence[Configuration], limits: Sequence[float], by: ArrangedBy
) -> Iterator[Evaluation]:
    """Evaluate in worker processes, checking the watch while they compute."""
    with _uninterrupted():
        running = [
            executor.submit(_evaluate_here, configuration, limit, by)
            for configuration, limit in zip(batch, limits, strict=True)
        ]
    for future in running:
        while not future.done():
            watch.check()
            with _uninterrupted():
                wait([future], timeout=PROGRESS_INTERVAL)
        yield future.result()


def _evaluate_here(configuration: Configuration, limit: float, by: ArrangedBy) -> Evaluation:
    assert _problem is not None
    _idle.release()
    try:
        return evaluate(replace(_problem, arranged_by=by), configuration, limit)
    finally:
        _idle.acquire()


def _evaluate_alone(
    problem: Problem,
    batch: Sequence[Configuration],
    limits: Sequence[float],
    by: ArrangedBy,
    watch: _Watch | None = None,
) -> Iterator[Evaluation]:
    """Evaluate in this process."""
    for configuration, limit in zip(batch, limits, strict=True):
        if watch is not None:
            watch.check()
        yield evaluate(replace(problem, arranged_by=by), configuration, limit)


def cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
