"""What `--quick` leaves out, and that nothing is left out for good."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

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
    pairs = [tuple(case.rstrip("]").split("-")) for case in found["test_pairs"]]
    assert 4 <= len(pairs) < 8, "so many that every pair of values is among them"
    for first, second in itertools.combinations(range(3), 2):
        assert len({(values[first], values[second]) for values in pairs}) == 4
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
