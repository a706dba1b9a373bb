"""What `--quick` leaves out, and that nothing is left out for good."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from sampling import choose

pytest_plugins = ["pytester"]

TESTS = """
import itertools
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_long(): pass

@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_half_long(case): pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("a", "pqr")
def test_two(a, b): pass

@pytest.mark.sampled
@pytest.mark.parametrize(("a", "b", "c"), list(itertools.product("pq", "xy", "mn")))
def test_pairs(a, b, c): pass

@pytest.mark.parametrize("odd", [False, True])
def test_parts(odd, sample):
    print("took", [number for number in sample(range(40), 4) if number % 2 == odd])
"""


@dataclass(frozen=True)
class Row:
    schedule: str
    mode: int
    tied: bool


ROWS = [Row(*values) for values in itertools.product("abcde", range(4), (False, True))]


def test_every_pair_of_values_is_chosen() -> None:
    assert choose([], None, random.Random(0)) == []
    chosen = choose(ROWS, None, random.Random(0))
    assert 20 <= len(chosen) <= 24, "5 x 4 pairs need 20 rows"
    assert chosen == [row for row in ROWS if row in chosen]
    for first, second in itertools.combinations(("schedule", "mode", "tied"), 2):
        pairs = {(getattr(row, first), getattr(row, second)) for row in ROWS}
        assert {(getattr(row, first), getattr(row, second)) for row in chosen} == pairs


def test_few_have_values_that_differ_and_a_seed_repeats_them() -> None:
    chosen = choose(ROWS, 5, random.Random(7))
    assert len({row.schedule for row in chosen}) == 5 and len({row.mode for row in chosen}) == 4
    assert chosen == choose(ROWS, 5, random.Random(7))
    assert {row for seed in range(60) for row in choose(ROWS, 5, random.Random(seed))} == set(ROWS)


def ran(pytester: pytest.Pytester, *options: str) -> dict[str, list[str]]:
    """Test -> cases that ran."""
    result = pytester.runpytest_subprocess("-p", "sampling", "-v", *options)
    assert result.ret == 0
    found: dict[str, list[str]] = {}
    for line in result.outlines:
        if "PASSED" in line:
            name, _, case = line.partition("::")[2].split()[0].partition("[")
            found.setdefault(name, []).append(case)
    return found


@pytest.fixture
def tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    pytester.makepyfile(TESTS)
    return pytester


def test_quick_takes_a_part_of_every_test(tests: pytest.Pytester) -> None:
    every = {"test_plain": 1, "test_long": 1, "test_half_long": 2, "test_two": 9, "test_pairs": 8, "test_parts": 2}
    assert {name: len(cases) for name, cases in ran(tests).items()} == every
    found = ran(tests, "--quick", "--seed=3")
    assert {name: len(cases) for name, cases in found.items()} == {
        "test_plain": 1, "test_half_long": 1, "test_two": 2, "test_pairs": len(found["test_pairs"]), "test_parts": 2
    }  # fmt: skip
    assert 4 <= len(found["test_pairs"]) < 8
    assert found == ran(tests, "--quick", "--seed=3")
    others = [ran(tests, "--quick", f"--seed={seed}")["test_two"] for seed in range(4, 8)]
    assert any(other != found["test_two"] for other in others)


def test_the_seed_is_told_and_the_same_on_all_workers(tests: pytest.Pytester) -> None:
    """Of `test_parts` each case takes its half of one choice, wherever it runs."""
    result = tests.runpytest_subprocess("-p", "sampling", "--quick", "-n2", "-q", "-rP", "-k", "parts")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["a part of all combinations: --quick --seed *"])
    seed = result.stdout.str().split("--seed ")[1].split()[0]
    took = [line for line in result.outlines if line.startswith("took")]
    assert sum(line.count(",") + (line != "took []") for line in took) == 4
    again = tests.runpytest_subprocess("-p", "sampling", "--quick", f"--seed={seed}", "-q", "-rP", "-k", "parts")
    assert sorted(line for line in again.outlines if line.startswith("took")) == sorted(took)


def test_the_parts_of_all_tests_are_all_files() -> None:
    root = Path(__file__).resolve().parent.parent
    parts = []
    for number in range(1, 8):
        command = ["make", "-n", "test-all", f"PART={number}/7"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        parts.append(re.findall(r"tests/[\w/]*/?test_\w+\.py", listed))
    files = [str(file.relative_to(root)) for file in root.glob("tests/**/test_*.py")]
    assert sorted(itertools.chain(*parts)) == sorted(files)
