"""Tiny configs of the families that must be exact, with every multiplier and soft-cap away from its default."""

from __future__ import annotations

import copy

import torch
import transformers
from torch.nn import functional

from evenpipe.model import build_stage, copy_parameters

VOCABULARY, PADDING = 503, 3
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": PADDING,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 96}
WINDOW = {"sliding_window": 8}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
ROTARY_BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
}
LONG_ROTARY = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.2 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}

# name -> (config class, settings beside the common ones)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {**GROUPED, **MIXED, "use_sliding_window": True}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 24, "attention_bias": True}),
    "mistral": ("MistralConfig", {**GROUPED, **WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {**GROUPED, **MIXED, "head_dim": 16, "query_pre_attn_scalar": 24, "attention_bias": True}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**GROUPED, **MIXED, "head_dim": 16, "query_pre_attn_scalar": 24, "rope_parameters": ROTARY_BY_TYPE}
        | {"final_logit_softcapping": 3.0},
    ),
    "phi3": ("Phi3Config", {**GROUPED, **WINDOW, "rope_parameters": LONG_ROTARY}),
    "olmo2": ("Olmo2Config", {**GROUPED, "attention_bias": True}),
    "granite": (
        "GraniteConfig",
        {**GROUPED, "attention_bias": True, "embedding_multiplier": 2.5, "logits_scaling": 3.0}
        | {"residual_multiplier": 0.7, "attention_multiplier": 0.4},
    ),
    "smollm3": ("SmolLM3Config", {**GROUPED, "no_rope_layers": [1, 1, 0, 1], "attention_bias": True}),
    "gpt_neox": ("GPTNeoXConfig", {**COMMON, "intermediate_size": 96, "use_parallel_residual": False}),
    "cohere2": ("Cohere2Config", {**GROUPED, **MIXED, "logit_scale": 0.3, "attention_bias": True}),
    "starcoder2": ("Starcoder2Config", {**GROUPED, **WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    # Not promised, but exact too: learned positions, tuples from layers, a bias on the head, a norm before the layers.
    "gpt2": ("GPT2Config", {**COMMON, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "bloom": ("BloomConfig", {**COMMON, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "phi": ("PhiConfig", {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "nanochat": ("NanoChatConfig", {**GROUPED, "final_logit_softcapping": 3.0}),
    "hyperclovax": ("HyperCLOVAXConfig", {**GROUPED, "embedding_multiplier": 2.5, "logits_scaling": 0.3}),
    "modernbert-decoder": ("ModernBertDecoderConfig", {**COMMON, "intermediate_size": 96, "local_attention": 8}),
    "olmo3": ("Olmo3Config", {**GROUPED, **MIXED}),
}
NAMED = list(FAMILIES)[:13]

# Mixtures of experts. Only the first four are promised.
EXPERTS: dict[str, tuple[str, dict]] = {
    "mixtral": ("MixtralConfig", {**GROUPED, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**GROUPED, "head_dim": 24, "attention_bias": True, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "olmoe": ("OlmoeConfig", {**GROUPED, "num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True}),
    "gpt_oss": (
        "GptOssConfig",
        {**GROUPED, **WINDOW, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "swiglu_limit": 0.3},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 48},
    ),
    "phimoe": (
        "PhimoeConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}
        | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 2.5}
        | {"logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**GROUPED, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2}
        | {"topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "q_lora_rank": 24}
        | {"kv_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 40, "moe_layer_start_index": 1}
        | {"moe_layer_end_index": 3, "moe_num_shared_experts": 1},
    ),
    "minimax_m2": ("MiniMaxM2Config", {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "flex_olmo": ("FlexOlmoConfig", {**GROUPED, "num_experts": 5, "num_experts_per_tok": 2}),
}
PROMISED_EXPERTS = list(EXPERTS)[:4]
ROUNDING = 1e-12
"""Tolerance if transformers divides logits by a number and we multiply by its inverse; otherwise the error is 0.0."""


def tiny_config(name: str, *, tied: bool = False, **changes) -> transformers.PreTrainedConfig:
    class_name, settings = (FAMILIES | EXPERTS)[name]
    config_class = getattr(transformers, class_name)
    config = config_class(**(settings | {"tie_word_embeddings": tied} | changes))
    config._experts_implementation = "eager"  # the grouped product of experts takes no fp64
    return config


def whole_model(config, dtype: torch.dtype = torch.float64, seed: int = 0) -> transformers.PreTrainedModel:
    """Return a whole model with noise on every parameter (norms of ones and biases of zero would hide errors)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def tokens_and_labels(batch: int = 2, sequence: int = 12, vocabulary: int = VOCABULARY):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocabulary, (batch, sequence), generator=generator)
    labels = torch.randint(0, vocabulary, (batch, sequence), generator=generator)
    tokens[0, 3] = tokens[1, 0] = labels[1, 5] = PADDING
    labels[0, 6] = -100
    return tokens, labels


def loss_and_gradients(model, tokens, labels, **arguments) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False, **arguments).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def build_stages(description, cuts, dtype=torch.float64):
    """Build the stages between the cuts; the first and last own the model's ends, even without layers."""
    bounds = [0, *cuts, description.layers]
    count = len(bounds) - 1
    return [
        build_stage(description, bounds[i], bounds[i + 1], is_first=i == 0, is_last=i == count - 1, dtype=dtype)
        for i in range(count)
    ]


def loss_and_gradients_in_stages(description, cuts, tokens, labels, **arguments):
    """Compute like the pipeline in one process, detached at the cuts; weights are copied from `description.model`."""
    stages = build_stages(description, cuts)
    weights = {}
    for name in description.vocabulary_names:
        weights[name] = description.model.get_parameter(name).detach().clone().requires_grad_()
    embedding = weights[description.embedding_name]
    head = embedding if description.tied else weights[description.head_name]
    bias = weights[description.head_bias_name] if description.head_bias_name else None
    hidden = functional.embedding(tokens, embedding, padding_idx=description.padding_index)
    inputs, outputs = [], []
    for stage in stages:
        copy_parameters(stage, description)
        inputs.append(hidden.detach().requires_grad_() if inputs else hidden)
        hidden = stage(inputs[-1], **arguments)
        outputs.append(hidden)
    logits = functional.linear(hidden, head, bias) * description.logit_scale
    if description.soft_cap is not None:
        logits = description.soft_cap * torch.tanh(logits / description.soft_cap)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    for index in range(len(stages) - 1, 0, -1):
        outputs[index - 1].backward(inputs[index].grad)
    gradients = {name: weight.grad for name, weight in weights.items()}
    for stage in stages:
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters()}
    return loss.item(), gradients
