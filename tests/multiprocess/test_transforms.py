"""A transform that adds low-rank terms to all linear layers: gradients are those of the changed model in one process,
whatever else a layer goes through: split backward, checkpointing, tensor ranks, experts, shares of sequences."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import check_cases, run_processes
from small_families import CONFIGS
from small_runs import TOKENS, Case, described, opened
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from evenpipe import InputError, LayerTransform, LinearTerm, Pipeline, add_term
from evenpipe.layers import compilation
from evenpipe.layers.weight_gradients import SplitBackward, WeightGradients, unsplit_matrices
from evenpipe.model import build_stage, describe_modules
from evenpipe.model.fp64 import InFp64
from evenpipe.model.linear import use_products
from evenpipe.model.products import Groups, Products
from evenpipe.model.transform import added_modules, apply_to_all, reset_added, transformed
from evenpipe.schedule import SCHEDULES
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.layers import whole_parts


class LowRankTerm(LinearTerm):
    inputs, outputs = ("down",), ("up",)

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        weight = layer.weight
        inside, outside = weight.shape if isinstance(layer, Conv1D) else reversed(weight.shape)
        like = {"bias": False, "dtype": weight.dtype, "device": weight.device}
        self.down, self.up = nn.Linear(inside, rank, **like), nn.Linear(rank, outside, **like)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(functional.dropout(self.down(hidden), 0.0))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down.weight, std=0.1)
        nn.init.normal_(self.up.weight, std=0.1)  # zeros would hide errors


@dataclass(frozen=True)
class LowRank:
    rank: int

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        for layer in layers.values():
            for linear in [one for one in layer.modules() if isinstance(one, (nn.Linear, Conv1D))]:
                add_term(linear, "low_rank", LowRankTerm(linear, self.rank))


@dataclass(frozen=True)
class OnlySome:
    """Of layers, which makes kinds of them that a small copy has to have."""

    inner: LayerTransform
    numbers: tuple[int, ...]

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        self.inner.apply(model, {number: layer for number, layer in layers.items() if number in self.numbers})


Reference = Callable[[Case], tuple[nn.Module, dict[str, int]]]
"""Returns the changed model, and by what its gradients are multiplied to get those that are expected."""


def with_low_rank_terms(case: Case) -> tuple[nn.Module, dict[str, int]]:
    transform, description = LowRank(3), described(case.family, case.tied)
    model = copy.deepcopy(description.model)
    apply_to_all(model, description.structure.layers_name, [transform])
    for name, module in added_modules(model, transformed(description, [transform]).added):
        reset_added(name, module, seed=0)
    return model, {}


FAMILIES = ("llama", "phi3", "gemma2", "gpt2", "mixtral", "qwen2-moe", "deepseek-v3")
CASES = [
    *(
        Case(family, devices=2, schedule=schedule, mode=mode, checkpointing=checkpointing)
        for family, (schedule, mode, checkpointing) in zip(
            itertools.cycle(FAMILIES),
            [
                (schedule, mode, checkpointing)
                for schedule in SCHEDULES
                for mode, checkpointing in zip(
                    ("vocab-2", "vocab-1", "first-last"), ("none", "full", "selective"), strict=True
                )
            ],
            strict=False,
        )
    ),
    *(
        Case(family, tensor_ranks=2, schedule=schedule, checkpointing=checkpointing)
        for family in FAMILIES
        for schedule in ("1f1b", "zb-h1")
        for checkpointing in ("none", "full", "selective")
    ),
    *(Case(family, devices=2, tensor_ranks=2, schedule="zbv") for family in FAMILIES),
    *(
        Case(family, replicas=2, members=2, schedule=schedule, data_parallel=kind, tensor_ranks=ranks)
        for family in ("mixtral", "qwen2-moe", "deepseek-v3")
        for schedule in ("1f1b", "zb-h1")
        for kind in ("replicate", "shard")
        for ranks in (1, 2)
    ),
    *(Case("llama", context_ranks=2, schedule=schedule) for schedule in ("1f1b", "zb-h1")),
    *(Case("llama", devices=2, slices=2, schedule=schedule) for schedule in ("1f1b", "zb-h1")),
]


COMPILED = [
    Case(family, schedule=schedule, checkpointing=checkpointing)
    for family in ("llama", "gpt2")
    for schedule in ("1f1b", "zb-h1")
    for checkpointing in ("none", "full", "selective")
]


def faults_of(
    cases: list[Case], transform: LayerTransform, reference_of: Reference, options: Mapping[str, Any] | None = None
) -> list[str]:
    faults = []
    compilation.compile_layer = partial(compilation.compile_layer, backend="aot_eager")  # in fp64, and quickly
    for case in cases:
        ((ids, labels),) = reference.batches(61, case.microbatches * case.replicas, TOKENS, 1)
        with InFp64(), contextlib.closing(opened(case, transforms=[transform], **(options or {}))) as pipeline:
            parts = [case.part(pipeline.replica, one) for one in (ids, labels)]
            loss, gradients = pipeline.step(*parts).loss, pipeline.full_gradients()
            if dist.get_rank():
                continue
            model, factors = reference_of(case)
            wanted = reference.train(model, [(ids, labels)])
        expected = {name: gradient * factors.get(name, 1) for name, gradient in wanted.gradients.items()}
        error, name = reference.worst(gradients, expected)
        if not (error <= 1e-10 and abs(loss / wanted.losses[0] - 1) <= 1e-10):
            faults.append(f"{case}: loss {loss} for {wanted.losses[0]}, gradient of {name} off by {error:.1e}")
    return faults


def test_gradients_are_those_of_one_process(sample) -> None:
    check_cases(partial(faults_of, transform=LowRank(3), reference_of=with_low_rank_terms), sample(CASES, 6))


class Doubled(Products):
    """Every product as if the weight were twice as large."""

    def output(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().output(hidden, 2 * weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return 2 * super().input_gradient(gradient, weight)

    def weight_gradient(self, gradient: Tensor, hidden: Tensor, *, transposed: bool = False) -> Tensor:
        return 2 * super().weight_gradient(gradient, hidden, transposed=transposed)

    def grouped_output(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        return 2 * super().grouped_output(rows, matrices, groups)

    def grouped_input_gradient(self, gradient: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        return 2 * super().grouped_input_gradient(gradient, matrices, groups)

    def grouped_weight_gradient(
        self, gradient: Tensor, rows: Tensor, groups: Groups, *, transposed: bool = False
    ) -> Tensor:
        return 2 * super().grouped_weight_gradient(gradient, rows, groups, transposed=transposed)


def multiplying(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The linear layers in a layer, and its experts."""
    return [
        (name, module)
        for name, module in layer.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) or "down_proj" in module._parameters
    ]


class WithDoubledProducts:
    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        for layer in layers.values():
            for _, module in multiplying(layer):
                use_products(module, Doubled())


def with_doubled_weights(case: Case) -> tuple[nn.Module, dict[str, int]]:
    """The gradient of W where a model has 2 W is twice that of its weight."""
    description = described(case.family, case.tied)
    model, factors = copy.deepcopy(description.model), {}
    for name, layer in model.get_submodule(description.structure.layers_name).named_children():
        for inner, module in multiplying(layer):
            for leaf, weight in module.named_parameters(recurse=False):
                if "bias" not in leaf:
                    weight.data *= 2
                    factors[f"{description.structure.layers_name}.{name}.{inner}.{leaf}"] = 2
    return model, factors


def test_products_of_another_kind_are_used_wherever_a_weight_is_multiplied(sample) -> None:
    """Once each: by split and whole backwards, tensor ranks, compiled layers, experts of a group."""
    doubled = partial(faults_of, transform=WithDoubledProducts(), reference_of=with_doubled_weights)
    check_cases(doubled, sample(CASES, 6))
    on_tensor_ranks = [case for case in CASES if case.tensor_ranks > 1]
    check_cases(partial(doubled, options={"tensor_overlap": "ring"}), sample(on_tensor_ranks, 2))
    check_cases(partial(doubled, options={"compile_layers": True}), sample(COMPILED, 2))


# --- what stays of a layer --------------------------------------------------------------------------------------------


def test_terms_are_cut_with_their_layers_and_split() -> None:
    """Over tensor ranks, none of the parts is computed whole because of its terms; all weight gradients can wait."""
    for family in ("llama", "gpt2", "qwen2-moe"):
        plain = described(family)
        changed = transformed(plain, [LowRank(2)])
        cuts = [cut_of_model(one, 2) for one in (plain, changed)]
        assert whole_parts(cuts[0]) == whole_parts(cuts[1])
        placements = cuts[1].placements(changed, 0, 1, 2)
        for name, placement in cuts[0].placements(plain, 0, 1, 2).items():
            assert placements[name] == placement
        terms = {name: one for name, one in placements.items() if name in changed.added}
        assert terms
        for name, placement in terms.items():
            end = name.removesuffix(".weight").rpartition(".")[0]
            assert placement.cuts[0].parts == 2, name
            is_last = end.removesuffix(".low_rank").endswith(("o_proj", "down_proj", "c_proj"))
            assert name.endswith("down.weight") == is_last
        stage = build_stage(changed, 0, 4, is_first=True, is_last=True)
        SplitBackward(WeightGradients()).apply(stage, {})
        before = build_stage(plain, 0, 4, is_first=True, is_last=True)
        SplitBackward(WeightGradients()).apply(before, {})
        assert unsplit_matrices(stage) == unsplit_matrices(before)


def checked_and_continued(folder: Path) -> None:
    """With the self-check, on two layers of six, from a folder, saved and loaded by another layout."""
    transform = OnlySome(LowRank(2), (1, 5))
    options = {"transforms": [transform], "microbatches": 2, "parameter_dtype": torch.float64}
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % 61
    state = {}
    for number, schedule in enumerate(("zb-h1", "1f1b")):
        with contextlib.closing(Pipeline(folder / "model", schedule=schedule, seed=number, **options)) as pipeline:
            if number:
                drawn = pipeline.full_state_dict()
                pipeline.load_checkpoint(folder / "runs" / "step-00000001")
                found = pipeline.full_state_dict()
                if dist.get_rank() == 0:
                    assert any("low_rank" in name and not torch.equal(drawn[name], found[name]) for name in found)
                    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in found)
                    assert {name.split(".")[2] for name in found if "low_rank" in name} == {"1", "5"}
                with pytest.raises(InputError, match=r"save_pretrained: transforms have added .*low_rank"):
                    pipeline.save_pretrained(folder / "written")
            else:
                optimizer = reference.adamw(list(pipeline.parameters()))
                pipeline.step(ids)
                optimizer.step()
                pipeline.save_checkpoint(folder / "runs", 1, optimizer)
                state = pipeline.full_state_dict()


def test_self_check_folders_and_checkpoints(tmp_path: Path) -> None:
    config = CONFIGS["llama"](num_hidden_layers=6)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    run_processes(checked_and_continued, 2, tmp_path)


class Removes:
    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        for layer in layers.values():
            layer.mlp = nn.Identity()


def test_transforms_that_are_not_possible_are_refused() -> None:
    with pytest.raises(InputError, match=r"transforms: model.layers.0.mlp.\w+.weight is missing behind them"):
        transformed(described("llama"), [Removes()])
    with pytest.raises(InputError, match="transforms is 3; it must be a list of LayerTransforms"):
        Pipeline(described("llama"), transforms=3)
    modules = describe_modules(nn.Embedding(61, 16), [nn.Identity()] * 2, None, nn.Linear(16, 61, bias=False))
    with pytest.raises(InputError, match="transforms: a model of plain modules"):
        transformed(modules, [LowRank(2)])
