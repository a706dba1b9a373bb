"""The closure that torch lets callers pass to `Optimizer.step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure with gradients enabled, and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
