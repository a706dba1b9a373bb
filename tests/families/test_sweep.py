"""Runs some configurations of `make families`, and checks that errors are found and docs/families.md is current.
Families that run in fp64 also run in bf16, the default on a GPU."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace

import families_page
import pytest
import torch
import transformers
from family_configs import CONFIG_MAPPING, Configuration, configurations
from family_run import DifferentError, Reference, run, worst_error
from run_families import part_of

from evenpipe.errors import InputError
from evenpipe.model import build_stage, check_compute_dtype, describe, initialize
from evenpipe.parallel.parameters import StageParameters

RESULTS = json.loads(families_page.RESULTS.read_text(encoding="utf-8"))
ROWS = {Configuration(row["model_type"], row["variant"]): row for row in RESULTS["configurations"]}


EXPECTED = {
    Configuration("llama", "there is none"): ("traceback", "there is none"),
    Configuration("bert"): ("equal", ""),  # the head's bias has two names
    Configuration("falcon_h1"): ("equal", ""),  # scales rows that it looks up itself; sets buffers of layers
    Configuration("opt", "like 350m"): ("equal", ""),  # hidden states between layers are wider than the embedding
    Configuration("zaya"): ("equal", ""),  # its layers hand a second tensor on to each other
    Configuration("inkling2_text"): ("refused", "its layers receive trainable tensors besides the hidden states"),
}


def test_a_few_families_are_equal_or_refused_and_one_that_ends_a_process_is_told(own_fork_server, sample) -> None:
    chosen = sample(EXPECTED, 1)
    for configuration, outcome in zip(chosen, run(chosen), strict=True):
        word, sentence = EXPECTED[configuration]
        assert (outcome.model_type, outcome.variant) == (configuration.model_type, configuration.variant)
        assert outcome.word == word and re.search(sentence, outcome.sentence), outcome
        if word == "equal":
            assert outcome.tensor == "equal", outcome
            assert 0.0 < outcome.error < 1e-10 and 0.0 < outcome.tensor_error < 1e-10, outcome


def test_what_is_wrong_is_found() -> None:
    """Use a reference that lists the tied matrix under the head's name, with a tower that gets no gradient."""
    ones = partial(torch.ones, dtype=torch.float64)
    expected = {"head": ones(4), "layer": ones(3), "idle": None}
    reference = Reference(None, torch.float64, torch.empty(0), 2.0, expected, 1e-10)
    right = {"embedding": ones(4), "layer": ones(3)}
    description = SimpleNamespace(tied=True, head_name="head", embedding_name="embedding")
    assert worst_error(reference, description, 2.0, right) == 0.0
    for loss, changes, text in (
        (2.0 + 1e-9, {}, "the loss is"),
        (2.0, {"layer": ones(3) * (1 + 1e-9)}, "the gradient of layer is off by 1.0e-09"),
        (2.0, {"idle": ones(3)}, "the gradient of idle is off by"),
        (2.0, {"other": ones(3)}, r"gradients of \['other'\], which are no parameters"),
        (2.0, {"embedding": None}, "the gradient of embedding is off by 1.0e[+]00"),
        (2.0, {"layer": torch.full((3,), torch.nan)}, "the gradient of layer is off by inf"),
    ):
        changed = {name: gradient for name, gradient in (right | changes).items() if gradient is not None}
        with pytest.raises(DifferentError, match=text):
            worst_error(reference, description, loss, changed)


def test_every_model_type_has_a_configuration_that_can_be_made() -> None:
    every = configurations()
    types = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {one.model_type for one in every} == set(types)
    assert all(type(one.build()) is CONFIG_MAPPING[one.model_type] for one in every)
    parts = [part_of(every, f"{number}/7") for number in range(1, 8)]
    assert sorted(str(one) for part in parts for one in part) == sorted(map(str, every))


def test_the_page_is_of_the_version_that_is_installed_for_development_and_lists_nothing_wrong() -> None:
    constraints = (families_page.ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^transformers==(.*)$", constraints, re.MULTILINE)
    assert RESULTS["transformers"] == version
    assert f"transformers {version} has a causal language model" in families_page.FILE.read_text(encoding="utf-8")
    if transformers.__version__ == version:
        assert sorted(map(str, ROWS)) == sorted(map(str, configurations())), "run make families"
    assert {row[key] for row in ROWS.values() for key in ("word", "tensor", "pieces")} <= {"equal", "refused", ""}


# --- bf16 -------------------------------------------------------------------------------------------------------------

FP32_RESIDUALS = {"mamba", "mamba2", "falcon_mamba"}
"""Their layers return fp32 unless `residual_in_fp32` is off."""
EQUAL = [configuration for configuration, row in ROWS.items() if row["word"] == "equal"]
FEW = [Configuration(name) for name in ("bert", "falcon_h1", "gemma4", "mamba", "minimax", "openai-gpt", "opt")]


def run_in_bf16(configuration: Configuration) -> None:
    """Stages with fresh weights, forward and backward."""
    description = describe(configuration.build())
    if configuration.model_type in FP32_RESIDUALS and configuration.variant != "residual in its own dtype":
        with pytest.raises(InputError, match="set residual_in_fp32 to false in the model's config"):
            check_compute_dtype(description, torch.bfloat16)
        return
    check_compute_dtype(description, torch.bfloat16)
    tensors = (torch.randn(2, 6, description.hidden_size, dtype=torch.bfloat16),)
    positions = description.positions_of(torch.full((2, 6), 5)) if description.counts_positions else None
    for first, last in ((0, 2), (2, description.layers)):
        ends = {"is_first": first == 0, "is_last": last == description.layers}
        stage = build_stage(description, first, last, compute_dtype=torch.bfloat16, **ends)
        initialize(stage, description, seed=0)
        StageParameters(stage, torch.bfloat16).refresh()
        received = [tensor.detach().requires_grad_() for tensor in tensors]
        returned = stage(*received, position_ids=positions)
        tensors = returned if isinstance(returned, tuple) else (returned,)
        sum(tensor.float().square().sum() for tensor in tensors).backward()
        numbers = [*tensors, *(tensor.grad for tensor in received)]
        assert all(tensor.isfinite().all() for tensor in numbers), f"{configuration}: layers {first} to {last}"


@pytest.mark.parametrize(
    "chosen", [FEW, pytest.param(EQUAL, marks=pytest.mark.slow)], ids=["few", "all that are equal"]
)
def test_families_run_in_bf16(chosen: list[Configuration], sample) -> None:
    for configuration in sample(chosen, 2):
        run_in_bf16(configuration)
