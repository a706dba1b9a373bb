"""Several pipelines side by side train as transformers does in one process on all their batches together.

Two replicas of two devices: five schedules x two vocabulary modes x tied and untied x replicated and sharded (FSDP2);
loss, every gradient, their norm, and the weights after three steps of AdamW with clipping.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from test_gradients import described
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from evenpipe import Pipeline

FP64 = torch.float64
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half")
MODES = ("first-last", "vocab-2")
KINDS = ("replicate", "shard")
VOCABULARY, TOKENS, STEPS, MAX_NORM = 97, 6, 3, 0.5

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    kind: str
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    tied: bool = False
    microbatches: int = 3


def make(case: Case, *, dtype: torch.dtype = FP64, vocabulary: int = VOCABULARY, **options: Any) -> Pipeline:
    return Pipeline(
        described(vocabulary, case.tied, dtype),
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=case.microbatches,
        data_parallel=case.kind,
        **{"parameter_dtype": dtype, "self_check": False, "replicas": 2} | options,
    )


def step(pipeline: Pipeline, batches: list[Batch]) -> Any:
    """Each pipeline takes the batch of its number."""
    ids, labels = batches[pipeline.replica] if pipeline.device == 0 else (None, None)
    return pipeline.step(ids, labels)


def split(data: list[Batch], replicas: int = 2) -> list[list[Batch]]:
    """[step][replica]: an equal part of each batch."""
    parts = [(ids.chunk(replicas), labels.chunk(replicas)) for ids, labels in data]
    return [list(zip(ids, labels, strict=True)) for ids, labels in parts]


def is_first(pipeline: Pipeline) -> bool:
    return pipeline.device == pipeline.replica == 0


# --- the matrix ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@cache
def expected(tied: bool, sequences: int) -> tuple[list[Batch], Expected]:
    """transformers on the whole batch, clipped, three steps."""
    data = reference.batches(VOCABULARY, sequences, TOKENS, STEPS)
    model = copy.deepcopy(described(VOCABULARY, tied, FP64).model)
    optimizer = reference.adamw(model.parameters())
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for ids, labels in data:
        optimizer.zero_grad()
        loss = reference.loss_of(model, ids, labels)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return data, Expected(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def run_case(case: Case, number: int) -> list[str]:
    """What is wrong with a case, on the first process; every process checks that loss and norm are the same for all."""
    data, wanted = expected(case.tied, 4 * case.microbatches)
    ways: list[dict[str, Any]] = [
        {"replicas": 2},
        {"replicas": None, "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))},
        {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))},
    ]
    pipeline = make(case, **ways[number % 3])
    optimizer = reference.adamw(list(pipeline.parameters()))
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for batches in split(data):
        first = not losses
        pipeline.zero_grad()
        result = step(pipeline, batches)
        assert result.tokens == sum(int((labels[:, 1:] != reference.IGNORE).sum()) for _, labels in batches)
        losses.append(result.loss)
        if first:
            gradients = pipeline.full_gradients()
        norms.append(pipeline.clip_gradients(MAX_NORM))
        optimizer.step()
    weights = pipeline.full_state_dict()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (losses, norms))
    assert all(one == seen[0] for one in seen), seen
    pipeline.close()
    if not is_first(pipeline):
        assert not gradients and not weights
        return []
    errors = {
        "losses": (max(abs(a / b - 1) for a, b in zip(losses, wanted.losses, strict=True)), 1e-8),
        "loss": (abs(losses[0] / wanted.losses[0] - 1), 1e-10),
        "norm": (abs(norms[0] / wanted.norms[0] - 1), 1e-10),
        "gradient": (reference.worst(gradients, wanted.gradients)[0], 1e-10),
        "weights": (reference.worst(weights, wanted.weights)[0], 1e-8),
    }
    return [f"{case}: {name} {error:.1e}" for name, (error, limit) in errors.items() if not error <= limit]


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for number, case in enumerate(cases) for fault in run_case(case, number)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_train_as_one_process_on_both_batches(kind: str) -> None:
    cases = [Case(kind, *rest) for rest in itertools.product(SCHEDULES, MODES, (False, True))]
    faults = run_processes(run_cases, 4, cases, timeout_seconds=300)
    assert not faults[0], "\n".join(faults[0])
