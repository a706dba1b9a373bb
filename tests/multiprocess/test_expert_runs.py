"""Experts in runs: messages between the replicas that share them, repeated forwards, the load, moves of router biases,
optimizers that need whole matrices; and what is refused in a sentence.

Gradients are compared with one process by tests/fuzz.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from small_runs import TOKENS, Case, described, opened
from transformers import PreTrainedModel

import evenpipe
from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.experts import adopt
from evenpipe.model.fp64 import InFp64
from evenpipe.parallel.expert_ranks import ExpertRanks

SHARED = Case("mixtral", replicas=2, members=2)


def compiled(layout: dict[str, Any]) -> tuple[float, str, list[list[int]]]:
    """The gradients of one step in fp32 whose layers are compiled around their experts, and what tokens chose."""
    model = copy.deepcopy(described("mixtral").model).float()
    ids, labels = reference.batches(61, 2 * layout.get("replicas", 1), TOKENS, 1)[0]
    pipeline = Pipeline(copy.deepcopy(model), microbatches=2, compile_layers=True, self_check=False, **layout)
    own = slice(2 * pipeline.replica, 2 * pipeline.replica + 2)
    load = pipeline.step(ids[own], labels[own]).expert_load
    found = pipeline.full_gradients()
    pipeline.close()
    if not found:
        return 0.0, "", load.tolist()
    reference.loss_of(model, ids, labels).backward()
    return *reference.worst(found, {name: one.grad for name, one in model.named_parameters()}), load.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"schedule": "zb-h1"}, {"replicas": 2, "expert_parallel": 2}], ids=["own", "shared"]
)
def test_compiled_layers_leave_their_experts_as_they_are(layout: dict[str, Any]) -> None:
    error, name, load = run_processes(compiled, 2, layout)[0]
    assert error < 1e-5, name
    sequences = 2 * layout.get("replicas", 1)
    assert [sum(of_layer) for of_layer in load] == [2 * sequences * TOKENS] * len(load), "two choices of every token"


# --- repeated forwards -----------------------------------------------------------------------------------------------


def gradients_of_other_choices(case: Case, others: bool) -> dict[str, torch.Tensor]:
    """others: in a repeated forward, a router of one process chooses another expert for one token."""
    seen: set[Any] = set()
    run = adopt.run_experts

    def run_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        key = (experts._adopted.spread.routing._running.place, experts._adopted.name)
        if key in seen and others and dist.get_rank() == 1:
            index = index.clone()
            index[1] = (index[1] + 1) % 4
        seen.add(key)
        return run(experts, hidden, index, weights)

    with (
        InFp64(),
        mock.patch.object(adopt, "run_experts", run_experts),
        contextlib.closing(opened(case, microbatches=2)) as pipeline,
    ):
        ((ids, labels),) = reference.batches(61, 2 * case.replicas, TOKENS, 1)
        pipeline.step(case.part(pipeline.replica, ids), case.part(pipeline.replica, labels))
        assert not len(pipeline._experts.routing), "layouts outlive their step"
        return pipeline.full_gradients()


@pytest.mark.parametrize("changes", [{"checkpointing": "full"}, {"repeats": True}], ids=["full", "R"])
@pytest.mark.sampled(1)
def test_a_repeated_forward_takes_the_choices_of_the_first(changes: dict[str, Any]) -> None:
    case = replace(SHARED, microbatches=2, **changes)
    alike, others = (run_processes(gradients_of_other_choices, 2, case, one)[0] for one in (False, True))
    error, name = reference.worst(others, alike)
    assert error < 1e-10, name


# --- messages --------------------------------------------------------------------------------------------------------


def messages(case: Case) -> list[tuple[str, str, int]]:
    """(what, pass, layer) of each exchange of a step on this process, in order."""
    seen: list[tuple[str, str, int]] = []
    start, counts = ExpertRanks.start, ExpertRanks.counts

    def note(ranks: ExpertRanks, what: str) -> None:
        seen.append((what, ranks.running.text, int(ranks.layer.split(".")[2])))

    def noted_start(ranks: ExpertRanks, *arguments: Any) -> Any:
        note(ranks, arguments[-1])
        return start(ranks, *arguments)

    def noted_counts(ranks: ExpertRanks, own: torch.Tensor) -> Any:
        note(ranks, "numbers")
        return counts(ranks, own)

    with (
        InFp64(),
        mock.patch.object(ExpertRanks, "start", noted_start),
        mock.patch.object(ExpertRanks, "counts", noted_counts),
        contextlib.closing(opened(case, microbatches=2)) as pipeline,
    ):
        ((ids, labels),) = reference.batches(61, 2 * case.replicas, TOKENS, 1)
        pipeline.step(case.part(pipeline.replica, ids), case.part(pipeline.replica, labels))
    return seen


@pytest.mark.parametrize(
    ("changes", "again"),
    [({}, ()), ({"repeats": True}, ("rows", "weights", "sums")), ({"checkpointing": "full"}, ("rows", "weights"))],
    ids=["plain", "R", "full"],
)
@pytest.mark.sampled(2)
def test_exchanges_name_their_layer_and_rows_are_counted_once(changes: dict[str, Any], again: tuple[str, ...]) -> None:
    seen = run_processes(messages, 2, replace(SHARED, microbatches=2, **changes))[0]
    first = ("numbers", "choices", "rows", "weights", "sums")
    last = ("gradients", "gradients of weights", "sums")
    for unit in ("0", "1"):
        for kind, wanted, layers in (("F", first, (0, 1, 2, 3)), ("B", last, (3, 2, 1, 0))):
            found = [(what, layer) for what, text, layer in seen if text == f"0{kind}{unit}"]
            if kind == "B" and changes.get("checkpointing"):
                wanted = (*again, *last)
            assert [layer for _, layer in found] == sorted([one for _, one in found], reverse=kind == "B")
            for layer in layers:
                assert [what for what, one in found if one == layer] == list(wanted)
        if changes.get("repeats"):
            repeated = [(what, layer) for what, text, layer in seen if text == f"0R{unit}"]
            assert repeated == [(what, layer) for layer in range(4) for what in again]


# --- the load --------------------------------------------------------------------------------------------------------


def load_of(case: Case) -> tuple[list[str], list[torch.Tensor]]:
    """The names of layers with experts, and the load of two steps with an evaluation between them."""
    found = []
    with InFp64(), contextlib.closing(opened(case, microbatches=2)) as pipeline:
        for ids, labels in reference.batches(61, 2 * case.replicas, TOKENS, 2):
            ids, labels = case.part(pipeline.replica, ids), case.part(pipeline.replica, labels)
            found.append(pipeline.step(ids, labels).expert_load)
            with pytest.raises(InputError, match="expert_load: only step"):
                _ = pipeline.evaluate(ids).expert_load
        return list(pipeline.expert_layers), found


def load_of_model(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[layers with experts, experts] of transformers."""
    chosen: list[torch.Tensor] = []
    modules = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [one.register_forward_pre_hook(lambda module, args: chosen.append(args[1])) for one in modules]
    with InFp64(), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.bincount(one.flatten(), minlength=4) for one in chosen])


def load_of_one_process(case: Case) -> list[torch.Tensor]:
    model = described(case.family).model
    return [load_of_model(model, ids) for ids, _ in reference.batches(61, 2 * case.replicas, TOKENS, 2)]


@pytest.mark.parametrize(
    "case",
    [
        Case("mixtral"),
        Case("mixtral", 2, members=2, checkpointing="selective"),
        Case("deepseek-v3", 2, 2, members=2, checkpointing="full", schedule="zbv"),
        Case("mixtral", context_ranks=2, slices=2, microbatches=2, repeats=True),
        Case("mixtral", tensor_ranks=2),
    ],
    ids=["alone", "members", "a layer without experts", "pieces and R", "tensor ranks"],
)
@pytest.mark.sampled(2)
def test_the_load_counts_every_choice_once(case: Case) -> None:
    wanted = load_of_one_process(case)
    for layers, found in run_processes(load_of, case.processes, case):
        assert len(layers) == len(wanted[0]) and all(map(torch.equal, found, wanted))


RATES = (0.1, 0.03)
"""Of two moves."""


def biases_after_two_moves(case: Case) -> dict[str, torch.Tensor]:
    with InFp64(), contextlib.closing(opened(case, microbatches=2)) as pipeline:
        for rate, (ids, labels) in zip(RATES, reference.batches(61, 2 * case.replicas, TOKENS, 2), strict=True):
            ids, labels = case.part(pipeline.replica, ids), case.part(pipeline.replica, labels)
            pipeline.move_router_biases(pipeline.step(ids, labels).expert_load, rate)
        return {name: one for name, one in pipeline.full_state_dict().items() if "correction_bias" in name}


def test_router_biases_move_towards_experts_with_few_tokens() -> None:
    case = Case("deepseek-v3", 2, 2, members=2)
    model = copy.deepcopy(described(case.family).model)
    routers = {f"model.layers.{number}.mlp.gate": model.model.layers[number].mlp.gate for number in (1, 2, 3)}
    before = {name: one.e_score_correction_bias.clone() for name, one in routers.items()}
    alone = replace(case, replicas=1, devices=1, members=1)
    for rate, (ids, _) in zip(RATES, reference.batches(61, 2 * case.replicas, TOKENS, 2), strict=True):
        counts = load_of_model(model, ids)
        for router, count in zip(routers.values(), counts, strict=True):
            update = (count.double().mean() - count).sign()
            router.e_score_correction_bias += rate * (update - update.mean())
    found = run_processes(biases_after_two_moves, case.processes, case)[0]
    assert len(found) == 3
    for name, router in routers.items():
        assert torch.allclose(found[f"{name}.e_score_correction_bias"], router.e_score_correction_bias, atol=1e-6)
        assert not torch.equal(before[name], router.e_score_correction_bias)
    with pytest.raises(InputError, match="expert_load: only step\\(\\) gives it"):
        run_processes(biases_after_two_moves, 1, replace(alone, family="llama"))


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(family: str, options: dict[str, Any]) -> str:
    with pytest.raises(InputError) as raised:
        Pipeline(described(family), parameter_dtype=torch.float64, self_check=False, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("mixtral", {"replicas": 1, "expert_parallel": 2}, "expert_parallel: 2, expected a divisor of 1"),
        (
            "llama",
            {"replicas": 2, "expert_parallel": 2},
            "expert_parallel: 2, expected 1, since LlamaForCausalLM has no",
        ),
    ],
)
def test_what_cannot_run_is_refused(family: str, options: dict[str, Any], sentence: str) -> None:
    assert all(sentence in said for said in run_processes(refused, 2, family, options))


# --- optimizers that need whole matrices -----------------------------------------------------------------------------


def trained_by(case: Case, kind: str) -> dict[str, torch.Tensor]:
    with InFp64(), contextlib.closing(opened(case, microbatches=4 // case.replicas)) as pipeline:
        optimizer = getattr(evenpipe, kind)(pipeline, lr=1e-2)
        for ids, labels in reference.batches(61, 4, TOKENS, 2):
            pipeline.zero_grad()
            pipeline.step(case.part(pipeline.replica, ids), case.part(pipeline.replica, labels))
            optimizer.step()
        return pipeline.full_state_dict()


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
@pytest.mark.sampled(1)
def test_optimizers_see_whole_matrices_of_shared_experts(kind: str) -> None:
    alone = run_processes(trained_by, 1, Case("mixtral of 5 experts"), kind)[0]
    for case in (Case("mixtral of 5 experts", 2, members=2), Case("mixtral of 5 experts", 4, members=2)):
        error, name = reference.worst(run_processes(trained_by, case.processes, case, kind)[0], alone)
        assert error < 1e-8, name
    sharded = Case("mixtral of 5 experts", 4, members=2, data_parallel="shard")
    with pytest.raises(InputError, match=rf"{kind}: it needs whole matrices.*expected data_parallel = 'replicate'"):
        run_processes(trained_by, 4, sharded, kind)
