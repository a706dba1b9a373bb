"""Experts of one layer of a tiny model, and gradients to compare."""

from __future__ import annotations

from typing import Any

import torch
from families import tiny_config, whole_model

WIDTH = 64


def experts_of(family: str, dtype: torch.dtype = torch.float64, implementation: str = "eager", **changes: Any) -> Any:
    """The experts of the last layer; "eager" is transformers' loop over them."""
    config = tiny_config(family, **changes)
    config._experts_implementation = implementation
    model = whole_model(config, dtype)
    return next(module for module in model.base_model.layers[-1].modules() if hasattr(module, "_apply_gate"))
