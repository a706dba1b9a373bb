"""A model that computes in bf16 has the dtypes that `from_pretrained(dtype=torch.bfloat16)` of transformers gives it.

Not only those of parameters that a family lists (`_keep_in_fp32_modules_strict`): some build routers or decays in fp32.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from families import tiny_config
from family_configs import Configuration, configurations

from evenpipe.errors import InputError
from evenpipe.model import build_stage, describe
from evenpipe.parallel.parameters import StageParameters

KEPT = {
    "bailing_hybrid": {"A_log", "conv1d.weight", "dt_bias"},
    "beam": {"mlp.gate.weight"},
    "ernie4_5_moe": {"gate.weight", "e_score_correction_bias"},
    "flint": {"mlp.gate.weight", "sinks"},
    "hunyuan_v1_moe": {"wg.weight"},
    "inkling_text": {"sconv.conv1d.weight", "global_scale"},
    "olmo_hybrid": {"A_log"},
    "llama": set(),
    "afmoe": set(),  # keeps its norms only in a model of fp16
}
"""Ends of the names of some parameters."""


def dtypes_of(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def loaded_dtypes(config: transformers.PreTrainedConfig) -> dict[str, torch.dtype]:
    """Return name -> dtype of all parameters and buffers of a model that transformers loads in bf16."""
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    return dtypes_of(
        type(model).from_pretrained(
            None, config=copy.deepcopy(model.config), state_dict=model.state_dict(), dtype=torch.bfloat16
        )
    )


def dtypes_in_stages(config: transformers.PreTrainedConfig) -> dict[str, torch.dtype]:
    """Return name -> dtype of what products read in two stages that compute in bf16."""
    description, dtypes = describe(config), {}
    for first, last in ((0, 2), (2, description.layers)):
        ends = {"is_first": first == 0, "is_last": last == description.layers}
        stage = build_stage(description, first, last, **ends, compute_dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in stage.parameters()} == {torch.float32}
        masters = dict(StageParameters(stage, torch.bfloat16, fp32_parameters=stage.fp32_parameters))
        dtypes |= dtypes_of(stage)
        assert {master.dtype for master in masters.values()} == {torch.float32}
        assert all(stage.get_parameter(name) is masters[name] for name in stage.fp32_parameters & masters.keys())
    return dtypes


def check_dtypes(config: transformers.PreTrainedConfig) -> dict[str, torch.dtype]:
    found, expected = dtypes_in_stages(config), loaded_dtypes(config)
    assert found.keys() <= expected.keys()
    assert found == {name: expected[name] for name in found}
    missing = expected.keys() - found.keys() - set(describe(config).vocabulary_names)
    assert all(name.startswith("lm_head") or "embed" in name for name in missing), missing
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", KEPT)
def test_dtypes_are_those_that_transformers_loads(family: str) -> None:
    found = check_dtypes(Configuration(family).build())
    wide = {name for name, dtype in found.items() if dtype == torch.float32 and ".layers." in name}
    for end in KEPT[family]:
        assert any(name.endswith(end) for name in wide), end
    assert KEPT[family] or not wide


@pytest.mark.slow
def test_dtypes_of_every_family_are_those_that_transformers_loads() -> None:
    outcomes = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "families.json").read_text())[
        "configurations"
    ]
    trained = {(outcome["model_type"], outcome["variant"]) for outcome in outcomes if outcome["word"] == "equal"}
    checked = [item for item in configurations() if (item.model_type, item.variant) in trained]
    assert len(checked) == len(trained) > 200
    for configuration in checked:
        check_dtypes(configuration.build())


def test_parameters_of_a_stage_in_bf16_are_kept_too() -> None:
    description = describe(tiny_config("ernie4_5_moe"))
    stage = build_stage(description, 1, 3, is_first=False, is_last=False, dtype=torch.bfloat16)
    wide = {name for name, parameter in stage.named_parameters() if parameter.dtype == torch.float32}
    assert len(wide) == 4 and all("mlp.gate" in name for name in wide)


class KeepsItsHead(transformers.LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ("lm_head",)


def test_a_vocabulary_matrix_that_stays_in_fp32_is_refused() -> None:
    description = describe(KeepsItsHead(tiny_config("llama")))
    build_stage(description, 0, 2, is_first=True, is_last=False)
    with pytest.raises(InputError, match=r"^compute_dtype = torch.bfloat16: transformers keeps lm_head.weight"):
        build_stage(description, 0, 2, is_first=True, is_last=False, compute_dtype=torch.bfloat16)
