"""Random runs that are resumed with other batches, replicas and numbers of steps: which rows do they read?"""

from __future__ import annotations

import random
from collections.abc import Iterable

from rows_of_runs import Start, faults_of_run

RUNS_PER_CASE = 10


def faults_of_resumed_runs(seed: int, numbers: Iterable[int]) -> list[str]:
    """Return what is wrong with some runs for each number, with what they were."""
    faults = []
    for number in numbers:
        dice = random.Random(f"rows {seed} {number}")
        for _ in range(RUNS_PER_CASE):
            rows, packed, fraction = dice.randint(2, 60), dice.random() < 0.5, dice.choice((0.0, 0.1, 0.2))
            starts = [
                Start(steps=dice.randint(0, 9), replicas=dice.randint(1, 4), rows=dice.randint(1, 6))
                for _ in range(dice.randint(1, 10))
            ]
            found = faults_of_run(rows, starts, fraction=fraction, packed=packed)
            faults += [f"{fault} ({rows} rows, {fraction=}, {packed=}, {starts})" for fault in found]
    return faults
