"""Small configs of the families that tests of tensor parallelism train, with every size that a cut must divide."""

from __future__ import annotations

from transformers import (
    Cohere2Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

USUAL = {
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


def _without(*names: str) -> dict:
    return {name: value for name, value in USUAL.items() if name not in names}


CONFIGS = {
    "llama": lambda: LlamaConfig(**USUAL),
    "llama-tied": lambda: LlamaConfig(**USUAL | {"tie_word_embeddings": True}),
    "qwen2": lambda: Qwen2Config(**USUAL),
    "qwen3": lambda: Qwen3Config(**USUAL, head_dim=4),
    "phi3": lambda: Phi3Config(**USUAL),
    "gemma2": lambda: Gemma2Config(**USUAL | {"tie_word_embeddings": True}, head_dim=4, sliding_window=4),
    "gpt-neox": lambda: GPTNeoXConfig(**_without("num_key_value_heads")),
    "starcoder2": lambda: Starcoder2Config(**USUAL, residual_dropout=0.0, embedding_dropout=0.0),
    "gpt2": lambda: GPT2Config(
        vocab_size=61, n_embd=16, n_layer=4, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "olmo2": lambda: Olmo2Config(**USUAL),
    "cohere2": lambda: Cohere2Config(**USUAL | {"tie_word_embeddings": True}),
    "mixtral": lambda: MixtralConfig(
        **USUAL, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    ),
}
