"""RWKV: in evaluation, every few layers halve the hidden states and their weights, which only keeps fp16 in range.

Stages leave it out: their weights stay those of training, and norms undo the factor.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from evenpipe.model.spec import ModelSpec


def spec(config: PreTrainedConfig) -> ModelSpec:
    return ModelSpec(adapt=_do_not_rescale)


def _do_not_rescale(model: Any) -> None:
    model.rwkv._rescale_layers = _nothing


def _nothing() -> None:
    """Leave weights, and the attribute that says that they are rescaled, as they are."""
