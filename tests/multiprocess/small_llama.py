"""A Llama of four small layers: the model of tests that do not ask for a family."""

from __future__ import annotations

from functools import cache

import torch
from families import whole_model
from transformers import LlamaConfig

from evenpipe.model import Description, describe


def llama(vocabulary: int, tied: bool, dtype: torch.dtype, layers: int = 4):
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return whole_model(config, dtype)


@cache
def described(vocabulary: int, tied: bool, dtype: torch.dtype) -> Description:
    return describe(llama(vocabulary, tied, dtype))
