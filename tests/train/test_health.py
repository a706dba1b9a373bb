"""The mark of health: which losses are usual for a run, and which ones say that its state is ruined."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from evenpipe.train.health import Health, are_finite
from evenpipe.train.recovery import first_ruined


def noisy(usual: float, spread: float, steps: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [usual + spread * draw.gauss(0, 1) for _ in range(steps)]


def falling(steps: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [2.5 + 8 * math.exp(-step / 60) + 0.1 * draw.gauss(0, 1) for step in range(steps)]


def heavy_tailed(steps: int, seed: int = 0) -> list[float]:
    """Batches of very different texts: now and then one is twice as hard."""
    draw = random.Random(seed)
    return [1.5 * math.exp(0.25 * draw.gauss(0, 1)) * (2 if draw.random() < 0.02 else 1) for _ in range(steps)]


def health_after(losses: list[float]) -> Health:
    health = Health()
    for loss in losses:
        health.add(loss)
    return health


USUAL = {
    "noise": noisy(3.0, 0.2, 2000),
    "little noise": noisy(3.0, 1e-4, 2000),
    "no noise": [3.0] * 100,
    "falling": falling(2000),
    "very different batches": heavy_tailed(5000),
    "first batch easier than all others": [1.0, *noisy(2.5, 0.1, 500)],
    "first batch harder than all others": [9.0, *noisy(2.5, 0.1, 500)],
    "a spike that is over": [*noisy(3.0, 0.1, 200), 5.0, 6.0, *noisy(3.0, 0.1, 20)],
    "one bad batch at the end": [*noisy(3.0, 0.1, 200), 4.0],
    "rising a little, as on new data": [2.0 + 0.0004 * step for step in range(1000)],
    "memorised": [*falling(300), *(0.001 * value for value in noisy(1.0, 0.3, 300))],
    "a single step": [11.0],
}


def test_no_usual_run_ends_unhealthy() -> None:
    assert [name for name, losses in USUAL.items() if health_after(losses).fault() is not None] == []


def test_no_checkpoint_of_long_runs_is_unhealthy(sample: Callable[..., list[int]]) -> None:
    """Judged after every step, of ten runs of each kind."""
    for seed in sample(range(10), 2):
        for losses in (noisy(3.0, 0.3, 3000, seed), falling(3000, seed), heavy_tailed(3000, seed)):
            health = Health()
            for loss in losses:
                health.add(loss)
                assert health.fault() is None, (seed, health)


RUINED = {
    # losses, steps at the end whose losses are bad
    "exploding at the start": ([5.7, 5.6, 9.0, 40.0], 2),
    "exploding later": ([*noisy(3.0, 0.1, 100), 4.5, 6.0, 7.5, 8.0], 4),
    "back to the beginning": ([*falling(500), *noisy(10.8, 0.05, 30)], 30),
    "rising slowly": ([*noisy(2.0, 0.02, 200), *(2.0 + 0.005 * step for step in range(400))], None),
    "twice as bad with noise": ([*noisy(1.5, 0.05, 300), *noisy(3.0, 0.05, 300)], 300),
    "large at once": ([*noisy(3.0, 0.1, 100), 1e30], 1),
}


def test_a_ruined_run_ends_unhealthy() -> None:
    for name, (losses, bad) in RUINED.items():
        health = health_after(losses)
        assert "the usual loss of the run was" in (health.fault() or ""), name
        if bad is not None:
            assert (health.above, first_ruined(health, len(losses) + 1)) == (bad, len(losses) - bad), name


def test_what_a_divergence_does_does_not_become_usual() -> None:
    before = health_after(noisy(3.0, 0.1, 100))
    after = health_after([*noisy(3.0, 0.1, 100), *noisy(9.0, 1.0, 5000)])
    assert (after.usual, after.limit) == (before.usual, before.limit)


def test_parameters_that_are_not_finite_are_noticed() -> None:
    numbers = {True: ([], [[]], [[1.0, -3e38], [0.0]]), False: ([[1.0], [math.nan, 2.0]], [[1.0], [2.0, -math.inf]])}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for finite, cases in numbers.items():
            for case in cases:
                assert are_finite(torch.tensor(values, dtype=dtype) for values in case) is finite
