"""Experts in runs: from folders to folders, repeated forwards, the load, moves of router biases,
optimizers that need whole matrices.

Gradients are compared with one process by tests/fuzz.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
from families import PROMISED_EXPERTS, tiny_config, whole_model
from harness import run_processes
from small_runs import TOKENS, Case, described, opened
from transformers import AutoModelForCausalLM, PreTrainedModel

import evenpipe
from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.experts import adopt
from evenpipe.model.fp64 import InFp64

SHARED = Case("mixtral", replicas=2, members=2)


def from_a_folder(folder: Path) -> list[str]:
    """Through a step, with the grouped products of experts that transformers takes by default."""
    faults = []
    for family in [*PROMISED_EXPERTS[:3], "deepseek_v3"]:
        model = whole_model(tiny_config(family), torch.float32)
        source, written = folder / family, folder / f"{family}-trained"
        if dist.get_rank() == 0:
            model.save_pretrained(source)
        dist.barrier()
        pipeline = Pipeline(source, schedule="zbv", microbatches=2, self_check=False)
        ids, labels = reference.batches(503, 2, 7, 1)[0]
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        loss = pipeline.step(ids, labels).loss
        optimizer.step()
        pipeline.save_pretrained(written)
        pipeline.close()
        if dist.get_rank():
            continue
        model.config._experts_implementation = "grouped_mm"  # the default, which the pipeline has taken
        expected = reference.loss_of(model.train(), ids, labels)
        expected.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        read, report = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
        if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            faults.append(f"{family}: {report}")
        state = model.state_dict()
        worst, name = reference.worst({key: value.detach() for key, value in read.state_dict().items()}, state)
        if not (worst < 1e-6 and abs(loss / expected.item() - 1) < 1e-6):
            faults.append(f"{family}: {name} {worst:.1e}, loss {loss} and {expected.item()}")
    return faults


def test_from_a_folder_to_a_folder_through_a_step(tmp_path: Path) -> None:
    assert run_processes(from_a_folder, 2, tmp_path)[0] == []


def parts_of(case: Case, pipeline: Pipeline) -> list[list[torch.Tensor]]:
    """What this replica is given in two steps."""
    data = reference.batches(61, 2 * case.replicas, TOKENS, 2)
    return [[case.part(pipeline.replica, part) for part in batch] for batch in data]


# --- repeated forwards -----------------------------------------------------------------------------------------------


def gradients_of_other_choices(case: Case, others: bool) -> dict[str, torch.Tensor]:
    """others: in a repeated forward, a router of one process chooses another expert for one token."""
    seen: set[Any] = set()
    run = adopt.run_experts

    def run_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        key = (experts._adopted.by.spread.routing._running.stage_unit, experts._adopted.name)
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
        pipeline.step(*parts_of(case, pipeline)[0])
        assert not len(pipeline._experts.routing), "layouts outlive their step"
        return pipeline.full_gradients()


@pytest.mark.parametrize("changes", [{"checkpointing": "full"}, {"repeats": True}], ids=["full", "R"])
@pytest.mark.sampled(1)
def test_a_repeated_forward_takes_the_choices_of_the_first(changes: dict[str, Any]) -> None:
    case = replace(SHARED, microbatches=2, **changes)
    alike, others = (run_processes(gradients_of_other_choices, 2, case, one)[0] for one in (False, True))
    error, name = reference.worst(others, alike)
    assert error < 1e-10, name


# --- the load --------------------------------------------------------------------------------------------------------


def load_of(case: Case) -> tuple[list[str], list[torch.Tensor]]:
    """The names of layers with experts, and the load of two steps with an evaluation between them."""
    found = []
    with InFp64(), contextlib.closing(opened(case, microbatches=2)) as pipeline:
        for ids, labels in parts_of(case, pipeline):
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
    model, data = described(case.family).model, reference.batches(61, 2 * case.replicas, TOKENS, 2)
    wanted = [load_of_model(model, ids) for ids, _ in data]
    for layers, found in run_processes(load_of, case.processes, case):
        assert len(layers) == len(wanted[0]) and all(map(torch.equal, found, wanted))


RATES = (0.1, 0.03)
"""Of two moves."""


def biases_after_two_moves(case: Case) -> dict[str, torch.Tensor]:
    with InFp64(), contextlib.closing(opened(case, microbatches=2)) as pipeline:
        for rate, batch in zip(RATES, parts_of(case, pipeline), strict=True):
            pipeline.move_router_biases(pipeline.step(*batch).expert_load, rate)
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
    for case in (Case("mixtral of 5 experts", replicas, members=2) for replicas in (2, 4)):
        error, name = reference.worst(run_processes(trained_by, case.processes, case, kind)[0], alone)
        assert error < 1e-8, name
    sharded = Case("mixtral of 5 experts", 4, members=2, data_parallel="shard")
    with pytest.raises(InputError, match=rf"{kind}: it needs whole matrices.*expected data_parallel = 'replicate'"):
        run_processes(trained_by, 4, sharded, kind)
