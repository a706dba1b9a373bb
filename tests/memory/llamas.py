"""Descriptions of models as large as those of the Llama 3 family."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

from evenpipe.model import Description, describe

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


def llama(size: str = "8b", *, layers: int = 32, vocabulary: int = 128256) -> Description:
    config = LlamaConfig.from_json_file(MODELS / f"llama-3.1-{size}.json")
    config.num_hidden_layers, config.vocab_size = layers, vocabulary
    if size == "405b":  # runs of 2024 and 2025 had the heads of keys and values twice, as Meta first released them
        config.num_key_value_heads = 16
    return describe(config)
