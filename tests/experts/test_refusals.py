"""Which models can share their experts: every type in transformers, and the reasons of those that cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from families import tiny_config
from family_configs import SETTINGS, Configuration, configurations, small_config
from torch import nn

from evenpipe.errors import InputError
from evenpipe.experts.refusals import check_experts
from evenpipe.model import describe
from evenpipe.model.description import Description
from evenpipe.model.modules import describe_modules
from evenpipe.model.structure import build_skeleton

EXPERTS = 4
"""Of every layer of the types here."""
ACCEPTED = [
    *["afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3"],
    *["deepseek_v32", "dots1", "dots3_note", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint"],
    *["gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa"],
    *["granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "inkling_text", "jamba", "kimi_linear"],
    *["kolibri1", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text"],
    *["mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe"],
    *["qwen3_next", "qwen4_exp", "qwen4_exp_text", "solar_open", "zaya"],
]
VARIANT = {"gemma4_text": "experts"}
NOT_CUT = ["deepseek_v4", "hy_v4", "inkling2_text"]
"""Their experts could be shared, but no pipeline can cut them into stages."""
OWN_EXPERTS = ["dbrx", "jetmoe", "llama4_text", "longcat_flash"]
"""Their experts do not run through the interface."""


@cache
def some_description() -> Description:
    return describe(tiny_config("llama"))


def described(config: transformers.PreTrainedConfig, model_class: type | None = None) -> Description:
    """Return a description of which only what `check_experts` reads is that of the config, so types that cannot be cut
    have one too."""
    skeleton = build_skeleton(config, torch.float32, model_class)
    return replace(some_description(), config=config, skeleton=skeleton, architecture=type(skeleton).__name__)


def refusal(description: Description, ep: int) -> str:
    check_experts(description, 1)
    with pytest.raises(InputError) as caught:
        check_experts(description, ep)
    sentence = str(caught.value)
    assert sentence.startswith(f"ep is {ep}; it must be ") and sentence.count(". ") == 0
    assert description.architecture in sentence or description.config is None
    return sentence


def test_types_whose_experts_can_be_shared(sample) -> None:
    for model_type in sample(ACCEPTED + NOT_CUT, 8):
        config = Configuration(model_type, VARIANT.get(model_type, "plain")).build()
        description = described(config) if model_type in NOT_CUT else describe(config)
        for ep in range(1, EXPERTS + 1):
            check_experts(description, ep)
        assert "must be at most 4, the number of experts in " in refusal(description, EXPERTS + 1)


@pytest.mark.slow
def test_every_other_type_is_refused() -> None:
    refused = {}
    for other in configurations():
        if other.model_type in ACCEPTED + NOT_CUT and VARIANT.get(other.model_type, other.variant) == other.variant:
            continue
        try:
            description = described(other.build())
        except Exception:  # types that need packages, or other settings: tests/families
            continue
        refused[str(other)] = refusal(description, 2)
    assert len(refused) > 100 and {*OWN_EXPERTS, "doge (experts)", "llama", "gpt2"} <= refused.keys()
    assert {sentence.split(" has ")[1] for sentence in refused.values()} == {
        "no experts that run through transformers' experts interface."
    }


def test_layers_without_experts_do_no_harm() -> None:
    check_experts(describe(tiny_config("qwen3_moe", mlp_only_layers=[1])), 5)
    dense = small_config("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0})
    assert "has no experts" in refusal(described(dense), 2)


def test_plain_modules_and_a_norm_behind_every_expert() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    description = describe_modules(nn.Embedding(11, 8), layers, nn.LayerNorm(8), nn.Linear(8, 11, bias=False))
    assert "plain modules do not say which of them are experts" in refusal(description, 2)
    config = small_config("muse_spark_text", SETTINGS.get("muse_spark_text", {}))
    description = described(config, transformers.MuseSparkTextModel)
    assert "normalises what every expert returns (layers." in refusal(description, 2)


def without_a_name(model: nn.Module, experts: nn.Module) -> None:
    experts.up_proj = experts.gate_up_proj
    del experts.gate_up_proj


def with_shared_modules(model: nn.Module, experts: nn.Module) -> None:
    model.model.layers[3].mlp.experts = model.model.layers[1].mlp.experts


def with_shared_parameters(model: nn.Module, experts: nn.Module) -> None:
    model.model.layers[3].mlp.experts.down_proj = model.model.layers[1].mlp.experts.down_proj


def first_product(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module, nn.Module], None]:
    def replace_it(model: nn.Module, experts: nn.Module) -> None:
        experts.gate_up_proj = nn.Parameter(change(experts.gate_up_proj))

    return replace_it


def with_one_more(name: str, part: nn.Module | nn.Parameter) -> Callable[[nn.Module, nn.Module], None]:
    return lambda model, experts: setattr(experts, name, part)


SHARED = "has the same experts in model.layers.1.mlp.experts and model.layers.3.mlp.experts."
CHANGES = [
    (
        without_a_name,
        "has the parameters down_proj, up_proj in model.layers.1.mlp.experts, and experts that are shared have"
        " down_proj, gate_up_proj.",
    ),
    (
        with_one_more("scale", nn.Parameter(torch.ones(EXPERTS))),
        "has the parameters down_proj, gate_up_proj, scale in model.layers.1",
    ),
    (
        with_one_more("norm", nn.LayerNorm(8)),
        "has the parameters down_proj, gate_up_proj, norm.bias, norm.weight in model.layers.1",
    ),
    (
        first_product(lambda matrix: matrix.transpose(0, 1)),
        "has model.layers.1.mlp.experts.gate_up_proj of the shape [192, 4, 64], and experts that are shared have"
        " [4, rows, columns].",
    ),
    (first_product(lambda matrix: matrix.flatten(1)), "gate_up_proj of the shape [4, 12288], and experts"),
    (with_shared_modules, SHARED),
    (with_shared_parameters, SHARED),
]


@pytest.mark.parametrize("place", ["skeleton", "model"])
def test_experts_of_another_form(place: str) -> None:
    description = describe(tiny_config("mixtral"))
    for change, sentence in CHANGES:
        model = copy.deepcopy(description.skeleton)
        change(model, model.model.layers[1].mlp.experts)
        assert sentence in refusal(replace(description, **{place: model}), 2)
