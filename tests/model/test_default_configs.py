"""Checks every config class for which transformers has a causal language model, at its default (real) size.

The self-check passes on a small copy, or a sentence says why the model cannot be trained in stages.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from evenpipe.errors import InputError
from evenpipe.model import describe, self_check

SECONDS = 10.0
"""CPU time for description and self-check together; on an idle CPU they take at most half of it."""

# Settings that a default lacks, without which transformers cannot build or run the model, or that make it less usual.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "falcon": {"new_decoder_architecture": True, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8, "num_experts": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "ministral": {"head_dim": 128},
    "qwen2": {"use_sliding_window": True},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 48},
}

# Words of the message -> refused types.
REFUSED = {
    "transformers cannot build a causal language model from this": (
        *("gemma4_unified_assistant", "musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text", "reformer"),
    ),
    "it needs exactly one list of layers": ("blt", "hrm_text", "xlm"),
    r"its embedding is \(\d+, \d+\) and its output layer \(\d+, \d+\)": ("rembert",),
    r"its parameters \S+ and \S+ are one tensor": ("prophetnet", "zamba", "zamba2"),
    "a small copy of it, cut in three, does not run": ("deepseek_v4", "hy_v4"),
    r"receive trainable tensors besides the hidden states \(block_states\)": ("inkling2_text",),
    # Before anything else, transformers asks for a package that is needed to see.
    r"num_kv_shared_layers = \d+ lets layers use the keys and values of others|pip install timm": (
        *("gemma3n", "gemma3n_text"),
    ),
    "its forward.* needs more of .* it stops at `.*` in modeling_": ("cpmant", "gemma4", "xlnet", "xmod"),
    "does not run on labels of the shape of the token ids": ("git",),
}
REASONS = {name: reason for reason, names in REFUSED.items() for name in names}
WITHOUT_A_DEFAULT = {"gemma4_assistant": "hidden_size_per_layer_input must be 0"}
"""Types whose config class refuses its own defaults -> the message."""

QUICK = [
    *("bailing_hybrid", "bart", "dbrx", "falcon", "hunyuan_v1_moe", "kimi_linear", "longcat_flash", "mamba2", "xlstm"),
    *("git", "glm", "roberta", "xlnet", "zaya", "llama", "gemma4_text", "mixtral"),
]
"""Types that used to have no small copy, take long, or be refused without a reason; and some usual ones."""


def check_default(name: str) -> None:
    """In the time allowed, and without a change of what is the caller's."""
    config = CONFIG_MAPPING[name](**NEEDED.get(name, {}))
    before, threads = copy.deepcopy(config.to_dict()), torch.get_num_threads()
    torch.manual_seed(9)
    state = torch.get_rng_state()
    start = time.process_time()
    if name in REASONS:
        with pytest.raises(InputError, match=REASONS[name]) as caught:
            self_check(describe(config))
        assert "\n" not in str(caught.value)
    else:
        self_check(describe(config))
    assert time.process_time() - start < SECONDS
    assert config.to_dict() == before and torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.sampled(2)
def test_some_defaults_pass_or_are_refused_with_the_reason(name) -> None:
    check_default(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_every_default_passes_or_is_refused_with_the_reason(name) -> None:
    if name in WITHOUT_A_DEFAULT:
        with pytest.raises(Exception, match=WITHOUT_A_DEFAULT[name]):
            CONFIG_MAPPING[name]()
    elif name not in QUICK:
        check_default(name)


def test_a_setting_without_which_the_model_does_not_run_is_called_for() -> None:
    with pytest.raises(
        InputError, match=r"DeepseekV2ForCausalLM does not run with this config.*topk.*modeling_deepseek"
    ):
        self_check(describe(CONFIG_MAPPING["deepseek_v2"]()))
