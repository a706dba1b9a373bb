"""A search says how far it is, answers roughly at once if it is big, and ends early with what it has found."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planned_problems import problem

from evenpipe.memory.tracker import Tracker
from evenpipe.plan import configuration_search
from evenpipe.plan.configuration_search import PlanSearchResult, SearchInterrupted, search_configurations
from evenpipe.plan.evaluation import evaluate, timed
from evenpipe.plan.evaluation_cache import EvaluationCache
from evenpipe.plan.nearest import nearest
from evenpipe.plan.problem import Problem
from evenpipe.plan.ranking import Ranking, progress_text
from evenpipe.plan.space import Space

SPACE = Space(tp=(1,), cp=(1,), zero=(1,), schedules=("1f1b", "zb-h1"), vocabularies=("redistribute", "vocab-2"))
WANTED = 5


@pytest.fixture(scope="module")
def small() -> Problem:
    return problem(memory=26)


@pytest.fixture(scope="module")
def complete(small: Problem) -> PlanSearchResult:
    return search(small)


@pytest.fixture(autouse=True)
def always_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration_search, "PROGRESS_INTERVAL", 0.0)


def search(given: Problem, **options: Any) -> PlanSearchResult:
    return search_configurations(given, SPACE, **({"count": WANTED, "workers": 1} | options))


def plans_of(found: PlanSearchResult) -> list[dict[str, Any]]:
    return [plan.to_dict() for plan in found.plans]


def ctrl_c_when(reached: Callable[[PlanSearchResult], object]) -> Callable[[PlanSearchResult], None]:
    """Progress during which Ctrl-C is pressed, once."""
    pressed: list[PlanSearchResult] = []

    def progress(found: PlanSearchResult) -> None:
        if not pressed and reached(found):
            pressed.append(found)
            raise KeyboardInterrupt

    return progress


def as_if_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration_search, "MANY", 1)


# --- the first answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.sampled(1)
def test_the_rough_answer_comes_first_and_changes_nothing(
    small: Problem, complete: PlanSearchResult, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_big(monkeypatch)
    seen: list[tuple[int, float]] = []
    big = search(
        small,
        workers=workers,
        progress=lambda found: seen.append((found.evaluated, math.inf if found.best is None else found.best.seconds)),
    )
    assert plans_of(big) == plans_of(complete)
    assert (big.evaluated, big.bounded, big.refused) == (complete.evaluated, complete.bounded, complete.refused)
    assert big.rough == [] and big.ended == "" and big.left == 0
    first = next(best for evaluated, best in seen if evaluated == 0 and best < math.inf)
    assert first < 1.2 * complete.plans[0].seconds
    assert [best for _, best in seen] == sorted((best for _, best in seen), reverse=True), "it only becomes better"


def test_a_cache_that_an_ended_search_has_filled_changes_nothing(
    small: Problem, complete: PlanSearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_big(monkeypatch)
    cache = EvaluationCache()
    with pytest.raises(SearchInterrupted) as ending:
        search(small, cache=cache, progress=ctrl_c_when(lambda found: found.evaluated == 3))
    assert ending.value.found().plans
    again = search(small, cache=cache)
    assert plans_of(again) == plans_of(complete) and cache.hits > 0


# --- Ctrl-C ------------------------------------------------------------------------------------------------------

MOMENTS: dict[str, Callable[[PlanSearchResult], object]] = {
    "at once": lambda found: True,
    "with a first plan": lambda found: found.best is not None,
    "between two evaluations": lambda found: found.evaluated == 6,
}


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.sampled(2)
def test_ctrl_c_gives_what_was_found(small: Problem, big: bool, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if big:
        as_if_big(monkeypatch)
    with pytest.raises(SearchInterrupted) as ending:
        search(small, progress=ctrl_c_when(MOMENTS[moment]))
    found = ending.value.found()
    assert found.ended == "interrupt" and found.left > 0 and found.least_seconds > 0
    assert [plan.seconds for plan in found.plans] == sorted(plan.seconds for plan in found.plans)
    assert len({plan.configuration for plan in found.plans}) == len(found.plans)
    assert bool(found.plans) == (moment != "at once")
    if found.best is not None:  # it is what runs
        configuration = found.best.configuration
        whole = timed(small, configuration, sizes=(configuration.recipe.microbatches,))
        assert found.best.seconds == whole.seconds
        assert found.best.devices == evaluate(small, configuration).devices
    text = Ranking(found, WANTED).text(explain=True)
    assert "unfinished, interrupted after" in text
    assert ("no plan was found so far" in text) == (not found.plans) and "no plan fits" not in text
    values = Ranking(found, WANTED).to_dict()
    assert (values["finished"], values["ended_by"]) == (False, "interrupt")
    assert values["layouts_left"] + values["configurations_left"] == found.left


def test_a_second_ctrl_c_leaves_the_best_plan_unchecked(small: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_big(monkeypatch)
    checking: list[PlanSearchResult] = []

    def press(found: PlanSearchResult) -> None:
        if found.ended:
            checking.append(found)
        if found.best is not None:
            raise KeyboardInterrupt

    with pytest.raises(SearchInterrupted) as ending:
        search(small, progress=press)
    found = ending.value.found()
    assert checking and found.ended == "interrupt" and found.best is not None and found.best.fits
    assert "checking best step" in progress_text(checking[0])


class Freed:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_not_lost_while_an_object_is_freed(small: Problem) -> None:
    with pytest.raises(SearchInterrupted):
        search(small, progress=lambda found: Freed() and None)


class Freeing(Tracker):
    """Presses Ctrl-C when the memory of a counted tensor is freed."""

    _live = 0

    @property
    def live(self) -> int:
        return self._live

    @live.setter
    def live(self, size: int) -> None:
        freed, self._live = size < self._live, size
        if freed:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_not_lost_while_counted_memory_is_freed(small: Problem) -> None:
    with pytest.raises(SearchInterrupted):
        search(small, progress=lambda found: Freeing().add(torch.empty(8)) and None)


def test_ctrl_c_is_ctrl_c_for_those_who_do_not_ask(small: Problem) -> None:
    """Such as the searches for what would fit, whose answers would be wrong."""
    nothing = search(replace(small, memory_bytes=7 * 2**30, known={}))
    assert nothing.best is None
    with pytest.raises(KeyboardInterrupt):
        nearest(nothing, workers=1, progress=ctrl_c_when(lambda found: True))


# --- a time limit ------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever a search looks at the time."""
    ticks = itertools.count()
    monkeypatch.setattr(configuration_search.time, "monotonic", lambda: float(next(ticks)))


@pytest.mark.parametrize("seconds", [20.0, 90.0, 200.0])
@pytest.mark.sampled(1)
def test_a_search_that_ends_at_its_time_is_the_same_every_time(small: Problem, clock: None, seconds: float) -> None:
    one, two = (search(small, seconds=seconds) for _ in range(2))
    assert one.ended == two.ended == "time"
    assert plans_of(one) == plans_of(two)
    assert (one.left, one.least_seconds, one.evaluated) == (two.left, two.least_seconds, two.evaluated)


@pytest.mark.slow
def test_more_time_finds_no_worse_plan_and_less_is_left(
    small: Problem, complete: PlanSearchResult, clock: None
) -> None:
    ended = [search(small, seconds=seconds) for seconds in (40.0, 120.0, 200.0, 1000.0)]
    best = [math.inf if found.best is None else found.best.seconds for found in ended]
    assert best == sorted(best, reverse=True) and best[-1] == complete.plans[0].seconds
    least = [found.least_seconds for found in ended]
    assert least == sorted(least)
    for found in ended:
        assert found.best is not None or found.left
        if found.left and found.best is not None:
            assert min(found.least_seconds, found.best.seconds) <= complete.plans[0].seconds


@pytest.mark.parametrize("workers", [1, 2])
def test_without_time_there_is_no_plan_and_everything_is_left(small: Problem, workers: int) -> None:
    found = search(small, seconds=0.0, workers=workers)
    assert found.ended == "time" and found.best is None and found.layouts_left > 0
    assert "no plan was found so far" in Ranking(found, WANTED).text()


def test_what_would_fit_is_not_denied_if_there_was_no_time_to_look(small: Problem) -> None:
    nothing = search(replace(small, memory_bytes=2**30, known={}))
    near = nearest(nothing, workers=1, seconds=0.0)
    assert near.remedies == () and not near.finished
    assert "would not fit" not in near.text() and "not found in this time" in near.text()


def test_recomputation_that_was_excluded_is_what_would_help(small: Problem) -> None:
    """Then the answer does not say that full recomputation was tried."""
    tight, space = replace(small, memory_bytes=9 * 2**30, known={}), replace(SPACE, checkpointing=("none",))
    nothing = search_configurations(tight, space, count=1, workers=1)
    assert nothing.best is None
    near = nearest(nothing, workers=1)
    assert near.remedies[0].change == "--checkpointing least" and near.remedies[0].plan.fits
    assert near.rejection is not None and "recomputation" not in near.rejection.text()


# --- progress ----------------------------------------------------------------------------------------------------


def test_progress_says_what_is_left_and_the_best_plan(small: Problem) -> None:
    lines: list[str] = []
    found = search(small, progress=lambda found: lines.append(progress_text(found)))
    assert found.best is not None
    assert "no plan yet" in lines[0] and f"of {found.layouts} layouts" in lines[0]
    assert found.best.configuration.name in lines[-1] and "best step " in lines[-1]
