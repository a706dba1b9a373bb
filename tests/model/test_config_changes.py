"""Tests which fields of a config change a model's results for the same weights."""

from __future__ import annotations

import json

import pytest
from families import EXPERTS, FAMILIES, tiny_config
from transformers import LlamaConfig, PreTrainedConfig

from evenpipe.errors import InputError
from evenpipe.model.config_changes import config_changes


def saved(config: PreTrainedConfig) -> dict:
    """Return a config as a checkpoint stores it."""
    return json.loads(json.dumps(config.to_dict()))


CHANGED, SAID, NOTHING = "the function", "said", "nothing"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CHANGES = [
    # family, field, value before, value now, expected effect
    ("llama", "num_attention_heads", 4, 8, CHANGED),
    ("llama", "hidden_act", "silu", "gelu", CHANGED),
    ("llama", "rms_norm_eps", 1e-6, 1e-5, CHANGED),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, {"rope_theta": 1e5}, CHANGED),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, YARN, CHANGED),
    ("llama", "rope_parameters", YARN, YARN | {"attention_factor": 2.0}, CHANGED),
    ("llama", "tie_word_embeddings", True, False, CHANGED),
    ("llama", "head_dim", 16, 32, CHANGED),
    ("mistral", "sliding_window", 8, 16, CHANGED),
    ("mistral", "sliding_window", 8, None, CHANGED),
    ("qwen2", "layer_types", ["full_attention"] * 4, ["sliding_attention"] + ["full_attention"] * 3, CHANGED),
    ("gemma2", "attn_logit_softcapping", 2.0, None, CHANGED),
    ("granite", "embedding_multiplier", 2.5, 1.0, CHANGED),
    ("gpt2", "scale_attn_weights", True, False, CHANGED),
    ("mixtral", "num_experts_per_tok", 2, 1, CHANGED),
    ("llama", "max_position_embeddings", 128, 256, SAID),
    ("phi3", "max_position_embeddings", 128, 256, CHANGED),  # rotary angles are stretched to the limit
    ("llama", "attention_dropout", 0.0, 0.1, SAID),
    ("gpt2", "resid_pdrop", 0.0, 0.1, SAID),
    ("bloom", "hidden_dropout", 0.0, 0.1, SAID),
    ("llama", "initializer_range", 0.02, 0.01, SAID),
    ("llama", "pad_token_id", 3, None, SAID),
    ("llama", "eos_token_id", 2, [2, 5], SAID),
    ("mixtral", "router_aux_loss_coef", 0.001, 0.1, SAID),
    ("mixtral", "router_jitter_noise", 0.0, 0.1, SAID),
    ("mixtral", "output_router_logits", False, True, SAID),
    ("llama", "use_cache", True, False, NOTHING),
    ("llama", "architectures", None, ["LlamaForCausalLM"], NOTHING),
    ("llama", "dtype", "float32", "bfloat16", NOTHING),
    ("llama", "id2label", {0: "a"}, {0: "b"}, NOTHING),
    ("llama", "_attn_implementation", "eager", "sdpa", NOTHING),
]


def test_what_a_field_changes() -> None:
    for family, field, before, now, effect in CHANGES:
        was, present = tiny_config(family, **{field: before}), tiny_config(family, **{field: now})
        changes, case = config_changes(saved(was), present), (family, field, now)
        assert [change.name.partition(".")[0] for change in changes][:1] == ([] if effect is NOTHING else [field]), case
        assert any(change.changes_function for change in changes) is (effect is CHANGED), case
        assert config_changes(saved(present), present) == [], case
    for family in (*FAMILIES, *EXPERTS):
        config = tiny_config(family)
        assert config_changes(saved(config), config) == [], family


def test_a_change_is_said_with_both_values() -> None:
    yarn, other = (tiny_config("llama", rope_parameters=YARN | {"factor": factor}) for factor in (4.0, 8.0))
    (change,) = config_changes(saved(yarn), other)
    assert str(change) == "rope_parameters.factor is now 8.0, was 4.0"
    (change,) = config_changes(saved(tiny_config("llama")), tiny_config("mistral"))  # the same shapes
    assert change.changes_function and str(change) == 'model_type is now "mistral", was "llama"'


def test_other_versions_of_transformers_wrote_other_fields() -> None:
    present = LlamaConfig(num_hidden_layers=2)
    before = saved(present)
    for name in ("head_dim", "attention_bias", "num_key_value_heads", "rope_parameters", "transformers_version"):
        del before[name]  # a version without these fields
    before |= {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32", "bad_words_ids": None}
    assert not any(change.changes_function for change in config_changes(before, present))
    (change,) = config_changes(saved(present) | {"scale_of_a_later_version": 1.0}, present)
    assert not change.changes_function and str(change) == "scale_of_a_later_version is now null, was 1.0"
    before["rope_theta"] = 500000.0
    assert [change.name for change in config_changes(before, present) if change.changes_function] == [
        "rope_parameters.rope_theta"
    ]


def test_a_config_that_transformers_refuses() -> None:
    with pytest.raises(InputError, match="'hidden_act' expected str, got int") as caught:
        config_changes(saved(LlamaConfig()) | {"hidden_act": 3}, LlamaConfig())
    assert "\n" not in str(caught.value)
