"""Small configs of the families that tests of tensor parallelism train, with every size that a cut must divide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import (
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

USUAL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GRANITE = {"embedding_multiplier": 2.5, "residual_multiplier": 0.7, "attention_multiplier": 0.4, "logits_scaling": 3.0}
DEEPSEEK_HEADS = {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK_EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


def small(config_class: Callable[..., PreTrainedConfig], *without: str, **own: Any) -> Callable[..., PreTrainedConfig]:
    """A config class with the usual settings, but without some, and with its own."""
    return partial(config_class, **{name: value for name, value in USUAL.items() if name not in without} | own)


CONFIGS = {
    "llama": small(LlamaConfig),
    "qwen2": small(Qwen2Config),
    "qwen3": small(Qwen3Config, head_dim=4),
    "phi3": small(Phi3Config),
    "gemma2": small(Gemma2Config, head_dim=4, **SLIDING),
    "gemma3": small(Gemma3TextConfig, head_dim=4, **SLIDING),
    "gpt-neox": small(GPTNeoXConfig, "num_key_value_heads"),
    "starcoder2": small(Starcoder2Config, residual_dropout=0.0, embedding_dropout=0.0),
    "gpt2": small(
        GPT2Config, "intermediate_size", "num_key_value_heads", n_inner=24, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "olmo2": small(Olmo2Config),
    "granite": small(GraniteConfig, attention_bias=True, mlp_bias=True, **GRANITE),
    "cohere2": small(Cohere2Config, **SLIDING),
    "mixtral": small(MixtralConfig, num_local_experts=4, **EXPERTS),
    "qwen3-moe": small(Qwen3MoeConfig, head_dim=4, num_experts=4, moe_intermediate_size=8, **EXPERTS),
    "deepseek-v3": small(
        DeepseekV3Config,
        num_key_value_heads=4,
        moe_intermediate_size=8,
        **DEEPSEEK_HEADS,
        **DEEPSEEK_EXPERTS,
        **EXPERTS,
    ),
}
WHOLE = {"bloom": small(BloomConfig, "num_key_value_heads", "intermediate_size", "max_position_embeddings")}
"""Families with a part that every tensor rank computes whole."""
