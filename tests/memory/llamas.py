"""Descriptions of models as large as those of the Llama 3 family."""

from __future__ import annotations

from transformers import LlamaConfig

from evenpipe.model import Description, describe

WIDTHS = {"8b": (4096, 14336, 32, 8), "70b": (8192, 28672, 64, 8), "405b": (16384, 53248, 128, 16)}
"""Hidden size, inner size, heads, and heads of keys and values."""


def llama(size: str = "8b", *, layers: int = 32, vocabulary: int = 128256) -> Description:
    hidden, inner, heads, groups = WIDTHS[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    return describe(config)
