"""The figures of a step, as a run logs them."""

from __future__ import annotations

from typing import Any

from evenpipe.train.metrics import StepMetrics


def step(number: int, **changes: Any) -> StepMetrics:
    figures = {
        "step": number,
        "epoch": number / 4,
        "loss": 10.0 / number,
        "running_mean_loss": 11.0 / number,
        "tokens": 1024 * number,
        "tokens_per_second": 1234.5,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "busy": (0.934, 0.5),
        "seconds": 0.25,
        "teraflops_per_second": 0.01,
        "peak_memory_bytes": (300, 200),
    }
    return StepMetrics(**{**figures, **changes})
