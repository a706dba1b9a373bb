"""Learning rates are those of transformers' `get_scheduler`, one step later and with one step more of warm-up."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from evenpipe.train.learning_rates import learning_rate
from evenpipe.train.run_sections import OptimizerConfig

RATE = 3e-4


def ours(steps: int, **options) -> list[float]:
    config = OptimizerConfig(learning_rate=RATE, **options)
    return [learning_rate(step, steps, config) for step in range(steps)]


def theirs(name: str, steps: int, warmup: int, **options) -> list[float]:
    """Of steps 1 to `steps`, after one more step of warm-up."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler(name, optimizer, warmup + 1, steps, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


LOW = 0.1
WSD = "warmup-stable-decay"
ZERO = {"minimum_learning_rate_ratio": 0.0}
CASES = [
    # ours, name and options of theirs
    ({"schedule": "constant"}, "constant_with_warmup", {}),
    ({"schedule": "linear", **ZERO}, "linear", {}),
    ({"schedule": "linear"}, "polynomial", {"lr_end": LOW * RATE, "power": 1.0}),
    ({"schedule": "cosine"}, "cosine_with_min_lr", {"min_lr_rate": LOW}),
    ({"schedule": "cosine", **ZERO}, "cosine", {}),
    ({"schedule": WSD, "decay_steps": 7, **ZERO}, "warmup_stable_decay", {"num_decay_steps": 7}),
    ({"schedule": WSD, "decay_share": 0.25, **ZERO}, "warmup_stable_decay", {"num_decay_steps": 10}),
    ({"schedule": WSD, **ZERO}, "warmup_stable_decay", {"num_decay_steps": 8}),  # a fifth of the steps
]


def test_rates_are_those_of_transformers() -> None:
    steps = 40
    for options, name, their_options in CASES:
        for warmup in (0, 1, 6):
            expected = theirs(name, steps, warmup, **their_options)
            assert ours(steps, warmup_steps=warmup, **options) == pytest.approx(expected), (options, warmup)


def test_the_decay_of_warmup_stable_decay_ends_at_the_lowest_rate_as_theirs() -> None:
    """Only the warm-up differs: theirs starts at the lowest rate."""
    found = ours(40, warmup_steps=6, schedule="warmup-stable-decay", decay_steps=7)
    expected = theirs("warmup_stable_decay", 40, 6, num_decay_steps=7, min_lr_ratio=LOW)
    assert found[6:] == pytest.approx(expected[6:])
    assert found[-1] == pytest.approx(LOW * RATE)
    assert found[0] < expected[0]


def test_a_run_may_be_shorter_than_its_warm_up_and_its_decay() -> None:
    for schedule in ("linear", "constant", "warmup-stable-decay"):
        for steps in (1, 2, 5):
            rates = ours(steps, warmup_steps=3, schedule=schedule)
            assert len(rates) == steps and max(rates) == RATE and min(rates) > 0
    rates = ours(6, warmup_steps=2, schedule="warmup-stable-decay", decay_steps=100)
    assert rates[2] == RATE and rates[-1] == pytest.approx(LOW * RATE) and rates[2:] == sorted(rates[2:], reverse=True)
