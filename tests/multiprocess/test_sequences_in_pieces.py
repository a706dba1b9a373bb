"""With sequences in pieces, over context ranks or in slices or both, every layout trains as one process."""

from __future__ import annotations

import itertools
import random

import pytest
from drawn_runs import ALL, CHECKPOINTING, MODES, SCHEDULES, Case, drawn, of_families, run_cases
from harness import check_cases

GRIDS = (
    *((1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1), (1, 1, 1, 2), (1, 2, 1, 2)),  # slices only
    *((1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 3, 1), (1, 1, 4, 1), (2, 1, 2, 1), (1, 1, 2, 2)),
)
"""Replicas, devices, context ranks, tensor ranks."""
LARGE_GRIDS = ((2, 2, 2, 1), (1, 2, 4, 1), (1, 2, 2, 2))
"""Of eight processes."""


def of_layouts() -> list[Case]:
    """One family in every layout: on several devices in half of the schedules, on one in one."""
    dice, cases = random.Random(1), []
    for grid, mode, checkpointing in itertools.product(GRIDS, MODES, CHECKPOINTING):
        schedules = [name for name in SCHEDULES if name != "dualpipe-v" or grid[2] > 1]
        for schedule in dice.sample(schedules, 4 if grid[1] > 1 else 1):
            cases.append(drawn(dice, "llama", grid, schedule=schedule, mode=mode, checkpointing=checkpointing))
    return cases


def test_every_family_in_pieces_trains_as_in_one_process(sample) -> None:
    check_cases(run_cases, sample(of_families(0, ALL, GRIDS), 4))


@pytest.mark.slow
def test_every_family_trains_on_eight_processes() -> None:
    check_cases(run_cases, of_families(0, ALL, LARGE_GRIDS))


def test_every_layout_in_pieces_trains_as_in_one_process(sample) -> None:
    check_cases(run_cases, sample(of_layouts(), 4))
