"""From the first pass of a step to the last one the host never waits for a device."""

from __future__ import annotations

import itertools

import pytest
from walked import walk_without_values

from evenpipe.recipe.parallelism import Parallelism, for_replicas
from evenpipe.schedule import MODES, SCHEDULES, plan_program

CASES = [*itertools.product(SCHEDULES, MODES)]


@pytest.mark.parametrize(("schedule", "mode"), CASES, ids=map(" ".join, CASES))
@pytest.mark.sampled(24)
def test_a_step_reads_nothing_of_a_device(schedule: str, mode: str) -> None:
    """All passes and transfers, with gathered parameters and sums over replicas."""
    _, program = plan_program(schedule, 4, 4, mode)
    for parallelism in Parallelism(pp=4), Parallelism(pp=4, dp=2, data_parallel="shard"):
        copies = walk_without_values(for_replicas(program, parallelism, tied=False), 0)
        assert copies.copies and not copies.blocking
