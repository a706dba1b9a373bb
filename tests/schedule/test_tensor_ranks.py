"""Programs complete with several tensor ranks per device, unless ranks of one device walk different rows."""

from __future__ import annotations

import itertools
import random

import pytest

from evenpipe.schedule import Pass, plan_program
from evenpipe.schedule.registry import SCHEDULES
from evenpipe.schedule.tensor_ranks import check_tensor_ranks

MODES = ("first-last", "interlaced", "vocab-1", "vocab-2")
CASES = list(itertools.product(sorted(SCHEDULES), (2, 3, 4), (0, 1), MODES, (2, 4)))


def program(schedule: str, devices: int, more: int, mode: str):
    return plan_program(schedule, devices, 2 * devices + more * 2, mode)[1]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("schedule", "devices", "more", "mode", "ranks"), CASES)
def test_every_program_completes_on_several_ranks(
    schedule: str, devices: int, more: int, mode: str, ranks: int
) -> None:
    assert not check_tensor_ranks(program(schedule, devices, more, mode), ranks)


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_that_exchanges_two_passes_is_found(seed: int) -> None:
    choice = random.Random(seed)
    ranks = choice.choice((2, 4))
    made = program(choice.choice(("1f1b", "zb-h1", "zbv")), choice.choice((2, 4)), 0, choice.choice(MODES))
    rows = [list(row) for row in made.rows for _ in range(ranks)]
    process = choice.randrange(len(rows))
    row = rows[process]
    passes = [place for place, item in enumerate(row) if isinstance(item, Pass)]
    pairs = [(one, other) for one, other in itertools.pairwise(passes) if row[one].kind != row[other].kind]
    one, other = choice.choice(pairs)
    row[one], row[other] = row[other], row[one]
    faults = check_tensor_ranks(made, ranks, rows)
    assert len(faults) == 2
    assert f"{ranks} tensor ranks the program cannot complete" in faults[0].what
