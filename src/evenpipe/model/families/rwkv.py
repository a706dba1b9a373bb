"""RWKV: in evaluation, every few layers halve the hidden states and their weights, which only keeps fp16 in range.

Stages skip this: their weights stay those of training, and norms cancel the factor. A live model that was last used in
evaluation has the weights of evaluation.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from evenpipe.errors import InputError
from evenpipe.model.spec import ModelSpec


def spec(config: PreTrainedConfig) -> ModelSpec:
    return ModelSpec(adapt=_do_not_rescale)


def check_live(model: Any) -> None:
    """Refuse weights of evaluation. The first `rescale_every` layers have the same weights in evaluation."""
    if model.rwkv.layers_are_rescaled and 0 < model.config.rescale_every < len(model.rwkv.blocks):
        raise InputError(
            "model: its weights are those of evaluation, half as large every"
            f" {model.config.rescale_every} layers; expected those of training: run its forward once after train()"
        )


def _do_not_rescale(model: Any) -> None:
    model.rwkv._rescale_layers = _nothing


def _nothing() -> None:
    """Leave the weights, and the attribute that says whether they are rescaled, unchanged."""
