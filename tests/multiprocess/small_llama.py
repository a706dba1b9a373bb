"""A Llama of four small layers: the model of tests that do not ask for a family."""

from __future__ import annotations

from functools import cache

import torch
from families import whole_model
from transformers import LlamaConfig

from evenpipe.model import Description, describe


def llama(vocabulary: int, tied: bool, dtype: torch.dtype, layers: int = 4):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return whole_model(LlamaConfig(**sizes, **heads, vocab_size=vocabulary, num_hidden_layers=layers), dtype)


@cache
def described(vocabulary: int, tied: bool, dtype: torch.dtype) -> Description:
    return describe(llama(vocabulary, tied, dtype))
