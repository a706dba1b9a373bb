"""AdamW over the parameters that a process holds, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from evenpipe.runtime.host_optimizer import HostAdamW
from evenpipe.train.config import OptimizerConfig


def adamw(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, directory: str | None = None
) -> torch.optim.AdamW | None:
    """AdamW with weight decay on matrices only; None for a process that holds no parameter that is trained.

    directory: of moments on the host of a process that computes on the CPU.

    The fused version, on CPU too: one pass over memory, and the same bits for any cut of a parameter on multiples of
    its vector width.
    """
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, config.weight_decay), (others, 0.0))
        if group
    ]
    if not groups:
        return None
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.epsilon,
        "fused": True,
    }
    if config.host_share:
        return HostAdamW(groups, share=config.host_share, directory=directory, **options)
    return torch.optim.AdamW(groups, **options)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Of the step with this number (0 is the first) among `steps`: linear from 0, then half a cosine.

    The last step has `minimum_learning_rate_ratio` of the highest rate, unless there are no steps after the warm-up.
    """
    warmup = min(config.warmup_steps, steps - 1)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    low = config.minimum_learning_rate_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
