"""Llama 3.2 Vision on text: layers that attend to images are skipped, and get no gradient, as in transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from evenpipe.model.spec import ModelSpec


def spec(config: PreTrainedConfig) -> ModelSpec:
    return ModelSpec(adapt=_call_layers_that_attend_to_images)


def _call_layers_that_attend_to_images(model: Any) -> None:
    """Call them like all other layers, since they may be the ends of a stage; they return their input."""
    for index in model.model.cross_attention_layers:
        if index < len(model.model.layers):
            model.model.layers[index].forward = _unchanged
    model.model.cross_attention_layers = []


def _unchanged(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return hidden_states.view_as(hidden_states)
