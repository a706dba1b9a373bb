"""Builds the pipeline of a configuration on one process, for training and for measuring."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from evenpipe.runtime.pipeline import Pipeline
from evenpipe.train.config import Config
from evenpipe.train.model_source import pipeline_model
from evenpipe.vocabulary import LossOptions


def build_pipeline(
    config: Config,
    tokenizer_size: int,
    end_of_text_id: int,
    torch_device: torch.device,
    **changes: Any,
) -> Pipeline:
    """Return the `Pipeline` of a configuration. Raises InputError like `Pipeline`.

    changes: arguments of `Pipeline` in place of the configured ones.
    """
    options: dict[str, Any] = {
        "recipe": config.recipe(),
        "loss": LossOptions(**asdict(config.loss)),
        "compute_dtype": compute_dtype(config),
        "seed": config.training.seed,
        "self_check": config.model.self_check,
        "trust_remote_code": config.model.trust_remote_code,
        "torch_device": torch_device,
        "timeout_seconds": config.pipeline.timeout_seconds,
    }
    model = pipeline_model(config, tokenizer_size, end_of_text_id)
    return Pipeline(model, **{**options, **changes})


def compute_dtype(config: Config) -> torch.dtype | None:
    """Return the configured dtype; None lets the pipeline decide."""
    name = config.model.compute_dtype
    return None if name == "auto" else getattr(torch, name)
