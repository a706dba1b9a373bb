"""Steps that others have measured on H100, B200 and A100, and those that plans would predict for them.

`benchmarks/published_steps.py` says where the rows come from, which were fitted to, and which are not explained.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from published_steps import FITTED, Result, Row, groups, mean_error, results, rows

NUMBERS = {
    "A100-40GB, 8192 tokens": 56,
    "H100-94GB, 8192 tokens": 66,
    "H100-94GB, 16384 tokens": 46,
    "B200": 31,
}


def test_all_published_rows_are_there() -> None:
    found: dict[str, int] = {}
    for row in rows():
        found[row.group] = found.get(row.group, 0) + 1
    assert found == NUMBERS


@pytest.fixture(scope="module")
def predicted() -> list[Result]:
    return results(lambda row: row.group in FITTED)


@pytest.mark.parametrize("group", FITTED)
def test_rows_that_were_not_fitted_to_are_off_by_at_most_six_percent(group: str, predicted: list[Result]) -> None:
    ones = groups(predicted)[group]
    other = mean_error([one for one in ones if not one.fitted])
    assert other is not None and other <= 0.06
    assert abs(sum(one.error for one in ones) / len(ones)) < 0.03, "neither too fast nor too slow"


LAYOUTS = {(4, 1, 2, 1), (4, 1, 2, 2), (4, 2, 1, 1), (4, 2, 1, 2), (2, 2, 2, 1)}
"""Tensor and context ranks, devices and sequences per microbatch, of the steps on A100 that are explained."""


def explained(row: Row) -> bool:
    layout = row.tp, row.cp, row.pp, row.microbatch_size
    return row.card == "A100-40GB" and row.gpus <= 64 and layout in LAYOUTS


def test_steps_on_a100_without_a_fit_to_them() -> None:
    for one in results(explained):
        throughput = one.row.seconds / one.predicted  # relative to the measured one
        assert throughput == pytest.approx(1, rel=0.08), one.row
