"""`--quick`: of the many combinations that tests run, those that this run takes.

Tests marked `slow` are left out, and of the cases of a parametrized test marked `sampled(n)` only n run. Where a test
takes its cases in one launch of processes, the fixture `sample` chooses them. Combinations have several factors
(schedule, vocabulary mode, ...), and as many pairs of their values as possible are among those chosen.

What is chosen depends on a seed that is another one in every run; `--seed` repeats a choice.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def choose(
    cases: Sequence[Case],
    count: int | None,
    chance: random.Random,
    factors_of: Callable[[Case], Sequence[Any]] | None = None,
) -> list[Case]:
    """`count` cases in their order, or, with None, so many that every pair of values is among them that is in any case.

    Greedy: always one of those that bring the most values and pairs that are not there yet. `factors_of` returns the
    values of a case, by default `factors`.
    """
    brings = []
    for case in cases:
        values = list(enumerate((factors_of or factors)(case)))
        brings.append({*values, *itertools.combinations(values, 2)})
    missing = set[Any]().union(*brings)
    left = list(range(len(cases)))
    chance.shuffle(left)
    chosen: list[int] = []
    while left and (missing if count is None else len(chosen) < count):
        best = max(left, key=lambda number: len(brings[number] & missing))
        left.remove(best)
        chosen.append(best)
        missing -= brings[best]
    return [cases[number] for number in sorted(chosen)]


def factors(case: Any) -> list[str]:
    """A case is the parameters of a test, a tuple, or one value; of a dataclass each field is a factor."""
    if isinstance(case, pytest.Item):
        case = tuple(case.callspec.params.values())  # type: ignore[attr-defined]
    found = []
    for value in case if isinstance(case, tuple) else (case,):
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        found += [repr(getattr(value, field.name)) for field in fields] or [repr(value)]
    return found


def chance_of(config: pytest.Config, test: pytest.Item) -> random.Random:
    """The same for all parameters of a test, and on all workers of xdist."""
    return random.Random(f"{config.option.seed} {test.nodeid.partition('[')[0]}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is slow, and run a part of the combinations")
    parser.addoption("--seed", type=int, help="which part, 0 or more (default: another one in every run)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long; `--quick` leaves it out")
    config.addinivalue_line("markers", "sampled(n): `--quick` runs n of its cases; without n, every pair of parameters")
    if config.option.seed is None:
        config.option.seed = getattr(config, "workerinput", {}).get("seed", random.randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed  # a worker of xdist chooses as all others do


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.quick and reporter:  # workers of xdist have none
        reporter.write_line(f"a part of all combinations: --quick --seed {session.config.option.seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.quick:
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sampled")
        count = marker.args[0] if marker and marker.args else None
        kept |= set(choose(cases, count, chance_of(config, cases[0])) if marker else cases)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`sample(cases, count)`: all cases, or with `--quick` so many of them; without a count, every pair of values."""

    def sampled(cases: Iterable[Case], count: int | None = None) -> list[Case]:
        every = list(cases)
        return choose(every, count, chance_of(request.config, request.node)) if request.config.option.quick else every

    return sampled
