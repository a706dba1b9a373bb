"""A Llama of four small layers: the model of tests that do not ask for a family."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

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
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of ones hide errors
    return model


@cache
def described(vocabulary: int, tied: bool, dtype: torch.dtype) -> Description:
    return describe(llama(vocabulary, tied, dtype))
