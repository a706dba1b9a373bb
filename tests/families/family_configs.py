"""Small configurations of every model type for which transformers has a causal language model.

Every type has a configuration "plain": the values of COMMON that its config knows, no dropout, and its entry in
SETTINGS. VARIANTS has further configurations, as changes of the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, LAYERS = 251, 4

COMMON: dict[str, Any] = (
    {"vocab_size": VOCABULARY, "hidden_size": 64, "max_position_embeddings": 128, "is_decoder": True}
    | {"pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2, "scale_embedding": True}
    | dict.fromkeys(("num_hidden_layers", "decoder_layers"), LAYERS)
    | dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim"), 96)
    # heads; of linear attention and state spaces too
    | dict.fromkeys(("num_attention_heads", "decoder_attention_heads", "linear_num_value_heads", "linear_num_heads"), 4)
    | dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads"), 2)
    | dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16)
    | {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
    # attention to a part of the sequence, and parts that are computed together
    | dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "rotary_dim"), 8)
    | dict.fromkeys(("mamba_chunk_size", "mamba_dt_rank", "time_step_rank", "chunk_size"), 8)
    | {"index_topk": 4, "index_head_dim": 16}
    # experts
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2)
    | dict.fromkeys(("n_group", "num_expert_group", "topk_group", "first_k_dense_replace"), 1)
    | dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 40)
    | dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 48)
    # latent attention
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24)
    | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16}
    # multipliers and caps, away from values that hide them
    | {"embedding_multiplier": 2.5, "logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
    | {"logit_scale": 0.3, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}
)
"""Passed to configs that have the field, under this name or their own name for it."""

TOWER = {"num_hidden_layers": 1, "num_blocks": 1, "depth": 1, "num_heads": 4} | {
    "image_size": 32,
    "patch_size": 16,
    "out_hidden_size": 64,
}
"""The same for towers for images or sound."""

MIXED = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2

SETTINGS: dict[str, dict[str, Any]] = {
    "afmoe": {"global_attn_every_n_layers": 2, "num_dense_layers": 1},
    "bailing_hybrid": {"layer_types": LINEAR, "num_experts": 4},
    "blt": {"encoder_hash_byte_group_vocab": 251},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"layer_types": MIXED, "mlp_layer_types": ["dense", "sparse"] * 2},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "cpmant": {"dim_head": 16, "dim_ff": 96, "position_bias_num_buckets": 32, "position_bias_max_distance": 64},
    "ctrl": {"dff": 96},
    "dbrx": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16, "hc_mult": 2},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 48,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "head_dim": 32,
        "per_layer_config": {},
    },
    "electra": {"embedding_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "falcon_h1": {
        "ssm_multipliers": [1.3, 0.7, 0.9, 1.2, 0.8],
        "mlp_multipliers": [0.8, 1.2],
        "key_multiplier": 0.7,
        "attention_out_multiplier": 0.6,
        "attention_in_multiplier": 1.4,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "lm_head_multiplier": 0.6,
    },
    "gemma3n_text": {
        "layer_types": MIXED,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 251,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_text": {
        "layer_types": MIXED,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "gemma4_unified_text": {"layer_types": MIXED, "global_head_dim": 32},
    "gpt2": {"n_inner": 96},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 16},
    "inkling2_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"layer_types": LINEAR, "num_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 4},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 16},
    "minicpm3": {"scale_emb": 3, "dim_model_base": 32},
    "moshi": {"ffn_dim": 96},
    "nemotron_h": {
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 48,
        "use_mamba_kernels": False,
    },
    "opt": {"word_embed_proj_dim": 64},
    "prophetnet": {"num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_layers": 4},
    "qwen4_exp_text": {
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"lru_width": 64},
    "reformer": {
        "attn_layers": ["local"] * 4,
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "local_attn_chunk_length": 4,
    },
    "rembert": {"input_embedding_size": 64, "output_embedding_size": 64},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 251,
        "shape_embed_dim": 16,
        "shape_vocab_size": 251,
    },
    "roformer": {"embedding_size": 64},
    "rwkv": {"attention_hidden_size": 64, "context_length": 128},
    "whisper": {"max_target_positions": 128, "max_source_positions": 16},
    "xmod": {"default_language": "en_XX"},
    "xlnet": {"d_head": 16, "d_inner": 96},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""Further settings that a type needs to be built or to be small."""

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASES = {"attention_bias": True, "mlp_bias": True}
ROUTER = {"output_router_logits": True}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bamba": {"z-loss": {"z_loss_coefficient": 0.1}},
    "bert": {"untied": UNTIED},
    "big_bird": {"block sparse": {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}},
    "bloom": {"residual behind the norm": {"apply_residual_connection_post_layernorm": True}, "untied": UNTIED},
    "cohere": {"norms of queries and keys": {"use_qk_norm": True}, "untied": UNTIED},
    "cohere2": {"untied": UNTIED},
    "deepseek_v2": {"whole queries": {"q_lora_rank": None}},
    "deepseek_v3": {"whole queries": {"q_lora_rank": None}, "groups": {"n_routed_experts": 8, "n_group": 2}},
    "dbrx": {"router loss": ROUTER},
    "doge": {
        "experts": {"is_moe": True, "num_experts": 16},
        "router loss": {"is_moe": True, "num_experts": 16} | ROUTER,
    },
    "electra": {"narrow embeddings": {"embedding_size": 32}},
    "ernie4_5_moe": {"router loss": ROUTER},
    "falcon": {
        "new architecture": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "one norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "alibi": {"alibi": True},
        "one after the other": {"parallel_attn": False, "bias": True, "multi_query": False},
        "untied": UNTIED,
    },
    "gemma": {"untied": UNTIED},
    "gemma2": {"untied": UNTIED},
    "gemma3_text": {"mixed layers": {"layer_types": MIXED}, "untied": UNTIED},
    "gemma4_text": {
        "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
        "inputs per layer": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 251},
        "shared keys": {"num_kv_shared_layers": 2},
    },
    "glm4_moe": {"norms of queries and keys": {"use_qk_norm": True}},
    "glm_moe_dsa": {"shared indexers": {"indexer_types": ["full", "shared"] * 2}},
    "gpt2": {
        "untied": UNTIED,
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    },
    "gpt_bigcode": {"a key per head": {"multi_query": False}},
    "gpt_neox": {"one after the other": {"use_parallel_residual": False}, "tied": TIED},
    "gpt_oss": {"router loss": ROUTER},
    "granite": {"biases, tied": BIASES | TIED},
    "granitemoe": {"router loss": ROUTER},
    "granitemoehybrid": {
        "mixed layers": {"layer_types": LINEAR},
        "dense": {"layer_types": LINEAR, "num_local_experts": 0, "num_experts_per_tok": 0},
    },
    "jamba": {"router loss": ROUTER},
    "jetmoe": {"router loss": ROUTER},
    "llama": {"tied": TIED, "biases": BIASES},
    "llama4_text": {"dense and mixtures": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 96}},
    "mamba": {"residual in its own dtype": {"residual_in_fp32": False}},
    "mamba2": {"tied": TIED},
    "minimax": {"router loss": ROUTER},
    "mistral": {"tied": TIED},
    "mixtral": {"router loss": ROUTER, "tied": TIED},
    "mpt": {"learned positions": {"attn_config": {"alibi": False}}},
    "nemotron_h": {"dense": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}},
    "olmo": {"clipped": {"clip_qkv": 0.2, "attention_bias": True}, "tied": TIED},
    "olmoe": {"clipped": {"clip_qkv": 0.2, "attention_bias": True}, "router loss": ROUTER},
    "opt": {
        "like 350m": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
        "norm behind": {"do_layer_norm_before": False},
        "untied": UNTIED,
    },
    "persimmon": {"without norms of queries": {"qk_layernorm": False}},
    "phi": {"norms of queries and keys": {"qk_layernorm": True}},
    "phimoe": {"biases": {"attention_bias": True, "lm_head_bias": True}},
    "qwen2": {"mixed layers": {"use_sliding_window": True, "layer_types": MIXED}, "tied": TIED},
    "qwen2_moe": {"dense layers": {"mlp_only_layers": [1]}, "router loss": ROUTER},
    "qwen3": {"tied": TIED, "biases": {"attention_bias": True}},
    "qwen3_moe": {"dense layers": {"mlp_only_layers": [1]}, "router loss": ROUTER},
    "qwen3_next": {"mixed layers": {"layer_types": LINEAR}, "router loss": ROUTER},
    "recurrent_gemma": {"attention first": {"block_types": ["attention", "recurrent"]}},
    "rembert": {"wider output": {"output_embedding_size": 96}},
    "roformer": {"narrow embeddings": {"embedding_size": 32}},
    "smollm3": {"untied": UNTIED},
    "stablelm": {"parallel": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}},
    "starcoder2": {"untied": UNTIED},
    "zaya": {"sliding": {"layer_types": ["hybrid", "hybrid_sliding"] * 2}},
}
"""Type -> name of the variant -> changes."""


@dataclass(frozen=True)
class Configuration:
    """One row of the table."""

    model_type: str
    variant: str = "plain"

    def __str__(self) -> str:
        return self.model_type if self.variant == "plain" else f"{self.model_type} ({self.variant})"

    def build(self) -> PreTrainedConfig:
        """Return the config of transformers."""
        changes = {} if self.variant == "plain" else VARIANTS[self.model_type][self.variant]
        return small_config(self.model_type, SETTINGS.get(self.model_type, {}) | changes)


def configurations() -> list[Configuration]:
    """Return all configurations of every type for which the installed transformers has a causal language model."""
    return [
        Configuration(model_type, variant)
        for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        for variant in ("plain", *VARIANTS.get(model_type, {}))
    ]


def small_config(model_type: str, settings: dict[str, Any]) -> PreTrainedConfig:
    """Return a config of that type with the common values that it knows, and the given ones.

    In a config with nested configs, the language model's config is as for its own type, and towers for other inputs
    have one layer.
    """
    config_class = CONFIG_MAPPING[model_type]
    values = dict(_known(config_class, COMMON)) | settings
    for name, part in _parts(config_class):
        if name in settings and not isinstance(settings[name], dict):
            continue
        beside = settings.get(name, {})
        if name in ("text_config", "decoder"):
            values[name] = small_config(part.model_type, SETTINGS.get(part.model_type, {}) | beside)
        else:
            values[name] = dict(_known(part, COMMON | TOWER)) | {"model_type": part.model_type} | beside
    return config_class(**values)


def _fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return a config's fields and their defaults."""
    every = {name: value for one in reversed(config_class.__mro__) for name, value in vars(one).items()}
    return {name: value for name, value in every.items() if not isinstance(value, property) and not callable(value)}


def _known(config_class: type[PreTrainedConfig], wanted: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    fields = _fields(config_class)
    if "kv_lora_rank" in fields:  # latent attention has keys and values for every head
        wanted = wanted | {"num_key_value_heads": 4}
    for name, value in wanted.items():
        own = name if name in fields else config_class.attribute_map.get(name, name)
        if own in fields:
            yield own, value
    for name, default in fields.items():
        if ("drop" in name or "jitter" in name) and isinstance(default, float):
            yield name, 0.0


def _parts(config_class: type[PreTrainedConfig]) -> Iterator[tuple[str, type[PreTrainedConfig]]]:
    """Yield (name, class) of the nested configs of a config."""
    for name, part in getattr(config_class, "sub_configs_defaults", {}).items():
        model_type = getattr(part, "model_type", None)
        found = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else getattr(part, "config_class", part)
        if found is not AutoConfig:
            yield name, found
