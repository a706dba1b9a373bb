"""Stages whose result does not depend on their input, or on no parameter: layers that are skipped, gradients that are
stopped. Loss and gradients are those of one process, microbatch by microbatch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import reference
import torch
from families import tiny_config, whole_model
from harness import check_cases, run_processes
from patched_layers import LATER, TOKENS, Case, faults_of_cases, patched, pipeline_of
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from evenpipe import OffloadOptions, Pipeline
from evenpipe.errors import InputError


def without_grad(run, hidden, weight):
    with torch.no_grad():
        return run(hidden)


def by_chance(run, hidden, weight):
    return hidden if torch.rand(()) < 0.5 else run(hidden)


BEHAVIOURS = {
    "run": lambda run, hidden, weight: run(hidden),
    "skip": lambda run, hidden, weight: hidden,
    "above": lambda run, hidden, weight: run(hidden.detach()),  # is trained, and nothing below it
    "below": lambda run, hidden, weight: run(hidden).detach(),
    "no_grad": without_grad,
    "fresh": lambda run, hidden, weight: weight.expand_as(hidden) * 2,  # depends on a parameter only
    "constant": lambda run, hidden, weight: torch.ones_like(hidden),
    "turned": lambda run, hidden, weight: run(hidden.transpose(0, 1).contiguous().transpose(0, 1)),
    "random": by_chance,
}
KINDS = ("skip", "above", "below", "no_grad", "fresh", "constant")


def at(place: int, kind: str) -> tuple[str, ...]:
    return tuple(kind if index == place else "run" for index in range(4))


ONE = [
    *(Case(at(2, kind), 1) for kind in KINDS),
    *(Case((kind,) * 4, 1) for kind in KINDS),
    Case(at(1, "turned"), 1),
    # of one process, which draws as the reference does
    Case(("random",) * 4, 1, {"checkpointing": "selective"}),
    Case(("random",) * 4, 1, {"self_check": True, "recompute": True}),
]
TWO = [
    Case(at(place, kind + often), options={"schedule": schedule})
    for kind in KINDS
    for place, often, schedule in ((0, "?", "1f1b"), (1, "", "interleaved"), (2, "?", "zb-h1"), (3, "", "zbv"))
]
"""Every kind, at every place of a stage."""
HOST = OffloadOptions(activations="all")
TWO += [
    Case(("above?",) * 4, options={"checkpointing": "full", "schedule": "zbv"}),
    Case(("skip?",) * 4, options={"checkpointing": "full", "vocabulary": "first-last"}),
    Case(("skip",) * 4, options={"schedule": "zbv", "vocabulary": "redistribute"}),
    Case(("no_grad",) * 4, options={"schedule": "zb-h1"}),
    Case(at(2, "below?"), options={"schedule": "dualpipe-v"}),
    Case(at(3, "below"), options={"checkpointing": "selective", "tied": True}),
    Case(at(2, "skip?"), options={"recompute": True, "schedule": "zbv"}),
    Case(at(1, "below?"), options={"recompute": True}),
    Case(at(2, "above?"), options={"offload": HOST, "schedule": "zbv"}),
    Case(("below",) * 4, options={"offload": HOST, "recompute": True}),
    Case(at(2, "above"), options={"slices": 2, "schedule": "zbv"}),
    Case(("run", "below?", "skip?", "below"), options={"slices": 3}),
    Case(at(2, "skip?"), options={"compile_layers": True, "schedule": "zbv"}),
    Case(at(3, "above"), options={"compile_layers": True, "checkpointing": "full"}),
    Case(at(1, "below"), options={"self_check": True}),
]
FOUR = [
    Case(at(2, "above?"), processes=4, options={"tensor_parallel": 2}),
    Case(at(3, "skip?"), processes=4, options={"tensor_parallel": 2, "tensor_overlap": "ring"}),
    Case(at(1, "no_grad"), processes=4, options={"tensor_parallel": 2, "self_check": True, "schedule": "zb-h1"}),
    Case(at(1, "below?"), processes=4, options={"context_parallel": 2}),
    Case(at(3, "above"), processes=4, options={"context_parallel": 2, "slices": 2, "schedule": "zb-h1"}),
    Case(at(0, "fresh?"), processes=4, options={"replicas": 2, "data_parallel": "shard", "schedule": "zbv"}),
    Case(at(2, "skip"), processes=4, options={"replicas": 2}),
]


def faults(cases: list[Case]) -> list[str]:
    return faults_of_cases(cases, BEHAVIOURS)


@pytest.mark.parametrize("cases", [ONE, TWO, FOUR], ids=["one", "two", "four"])
def test_gradients_are_those_of_one_process(cases: list[Case], sample) -> None:
    check_cases(faults, sample(cases, 2))


def apart(mlp, hidden):
    """Trains its own matrices, and hands no gradient on."""
    hidden = hidden.detach()
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))


def faults_of_detached_blocks(cases: list[Case]) -> list[str]:
    with mock.patch.object(modeling_llama.LlamaMLP, "forward", apart):
        return faults_of_cases(cases, BEHAVIOURS)


def test_blocks_that_detach_what_tensor_ranks_have_gathered() -> None:
    layouts = [{}, {"tensor_overlap": "ring", "recompute": True}, {"checkpointing": "selective"}]
    check_cases(
        faults_of_detached_blocks,
        [Case(at(1, "run"), options={"tensor_parallel": 2, **layout}) for layout in layouts],
    )


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def experts_are_trained(kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    model = whole_model(tiny_config("mixtral", output_router_logits=True))
    own = modeling_mixtral.MixtralDecoderLayer.forward

    def forward(layer, hidden_states, *args, **kwargs):
        kind = kinds[layer.self_attn.layer_idx]
        return BEHAVIOURS[kind](lambda hidden: own(layer, hidden, *args, **kwargs), hidden_states, None)

    ids = torch.randint(5, model.config.vocab_size, (2, 4, 10), generator=torch.Generator().manual_seed(1))
    with mock.patch.object(modeling_mixtral.MixtralDecoderLayer, "forward", forward):
        pipeline = Pipeline(model, microbatches=2, parameter_dtype=torch.float64, self_check=False, **options)
        batches, total = ids[: pipeline.replicas], 0.0
        for microbatch in batches.flatten(0, 1).split(2):  # the loss of routers is one of every microbatch
            output = model(input_ids=microbatch, use_cache=False)
            loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), microbatch[:, 1:].flatten())
            loss = (loss + model.config.router_aux_loss_coef * output.aux_loss) / (2 * len(batches))
            loss.backward()
            total += loss.item()
        assert float(pipeline.step(batches[pipeline.replica]).loss) == pytest.approx(total, rel=1e-10)
        gradients = pipeline.full_gradients()
    if pipeline._is_very_first:
        wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        error, name = reference.worst({name: gradients.get(name, 0 * one) for name, one in wanted.items()}, wanted)
        assert error <= 1e-10, f"{name}: {error:.1e}"


ROUTED = [
    (("run", "above", "run", "skip"), {"schedule": "zbv"}),  # routers train what hidden states do not reach
    (("run", "skip", "run", "below"), {}),
    (("run", "above", "below", "skip"), {"replicas": 2, "expert_parallel": 2}),
]


@pytest.mark.parametrize(("kinds", "options"), ROUTED)
def test_experts_and_their_routers(kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    run_processes(experts_are_trained, 2, kinds, options)


# --- slices of a sequence ---------------------------------------------------------------------------------------------

FIRST, SECOND = [*range(LATER, LATER + 4), *range(4)], [*range(LATER - 6, LATER + 2)]
"""Positions with which a layer marked "?" behaves so on the first or the second of two slices only."""
UNEVEN = [
    ("skip?", FIRST, "layer 0 does not treat .* alike: it runs on slice 1, and not on slice 0"),
    ("skip?", SECOND, "layer 0 does not treat .* alike: it runs on slice 0, and not on slice 1"),
    ("below?", FIRST, "layer 0 does not treat .* alike: gradients do not reach it in slice 0, and do in a later one"),
]


def slices_are_refused(kind: str, positions: list[int], sentence: str) -> None:
    case = Case(at(0, kind), processes=1, options={"slices": 2})
    with patched(case.layers, BEHAVIOURS):
        pipeline = pipeline_of(case, BEHAVIOURS, 1)
        ids = torch.arange(2 * TOKENS).view(2, TOKENS)
        with pytest.raises(InputError, match=f"^slices: 2, but {sentence}; expected 1"):
            pipeline.step(ids, position_ids=torch.tensor([positions] * 2))
        pipeline.step(ids)  # the same pipeline goes on


@pytest.mark.parametrize(("kind", "positions", "sentence"), UNEVEN)
def test_slices_of_which_a_layer_treats_one_in_another_way(kind: str, positions: list[int], sentence: str) -> None:
    run_processes(slices_are_refused, 1, kind, positions, sentence)
