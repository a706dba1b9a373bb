"""RoFormer: rotary angles come from a frozen table of parameters in the encoder, which acts in every layer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from evenpipe.model.spec import ModelSpec


def spec(config: PreTrainedConfig) -> ModelSpec:
    return ModelSpec(adapt=_keep_the_table_on_every_stage)


def _keep_the_table_on_every_stage(model: Any) -> None:
    positions = model.roformer.encoder.embed_positions
    table = positions.weight
    del positions.weight
    positions.register_buffer("weight", table.detach())
