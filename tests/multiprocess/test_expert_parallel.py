"""Replicas that share the experts of every layer train as one process, in every layout."""

from __future__ import annotations

import itertools
import random

import pytest
from drawn_runs import CHECKPOINTING, MODES, SCHEDULES, Case, drawn, of_families, run_cases
from harness import check_cases

FAMILIES = ("mixtral", "mixtral of 5 experts", "mixtral, router loss", "qwen3-moe", "deepseek-v3", "gpt-oss")
GRIDS = ((2, 2, 1, 1, 2), (4, 1, 1, 1, 2), (4, 1, 1, 1, 4), (2, 1, 2, 1, 2), (2, 1, 1, 2, 2))
"""Replicas, devices, context ranks, tensor ranks, members of a group."""
LARGE_GRIDS = ((4, 2, 1, 1, 2), (2, 2, 1, 2, 2), (2, 2, 2, 1, 2))
"""Of eight processes."""


def of_layouts() -> list[Case]:
    """One family in every layout: on several devices in half of the schedules, on one in one."""
    dice, cases = random.Random(3), []
    for grid, mode, checkpointing in itertools.product(GRIDS, MODES, CHECKPOINTING):
        for schedule in dice.sample(SCHEDULES, 4 if grid[1] > 1 else 1):
            slices = {"slices": 1} if schedule == "dualpipe-v" else {}
            cases.append(
                drawn(dice, "mixtral", grid, schedule=schedule, mode=mode, checkpointing=checkpointing, **slices)
            )
    return cases


def test_every_family_with_shared_experts_trains_as_in_one_process(sample) -> None:
    check_cases(run_cases, sample(of_families(2, FAMILIES, GRIDS), 4))


@pytest.mark.slow
def test_every_family_trains_on_eight_processes() -> None:
    check_cases(run_cases, of_families(2, FAMILIES, LARGE_GRIDS))


def test_every_layout_with_shared_experts_trains_as_in_one_process(sample) -> None:
    check_cases(run_cases, sample(of_layouts(), 4))
