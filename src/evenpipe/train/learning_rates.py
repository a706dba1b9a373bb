"""The learning rate of each step, with the shapes of transformers' `get_scheduler`.

    cosine               \\__       linear   \\      constant  ____      warmup-stable-decay  ___
                        /   \\_              / \\               /                              /   \\_

Step k here has the rate of step k + 1 in `get_scheduler` with one more warm-up step: in `get_scheduler`, the first step
has rate 0 and trains nothing, and only the step after the last one has the lowest rate. Two more differences:
"linear" ends at the lowest rate, like `get_polynomial_decay_schedule_with_warmup` with power 1, and the warm-up of
"warmup-stable-decay" starts at 0, like all others.
"""

from __future__ import annotations

import math

from evenpipe.train.run_sections import OptimizerConfig

DECAY_SHARE = 0.2
"""Share of all steps; with it, runs of arXiv 2405.18392 end with as low a loss as with a cosine."""


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the rate of a step (0 is the first) among `steps`: a linear warm-up from 0, then the schedule.

    The last step has `minimum_learning_rate_ratio` times the highest rate, unless the schedule is "constant" or there
    are no steps after the warm-up.
    """
    warmup = min(config.warmup_steps, steps - 1)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    start = warmup
    if config.schedule == "warmup-stable-decay":
        start = max(warmup, steps - 1 - decay_steps(steps, config))
    progress = max(0, step - start) / max(1, steps - 1 - start)
    low = config.minimum_learning_rate_ratio
    if config.schedule == "linear":
        return config.learning_rate * (low + (1 - low) * (1 - progress))
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def decay_steps(steps: int, config: OptimizerConfig) -> int:
    """Return the number of last steps over which "warmup-stable-decay" lowers the rate."""
    if config.decay_steps is not None:
        return config.decay_steps
    share = DECAY_SHARE if config.decay_share is None else config.decay_share
    return max(1, round(share * steps))
