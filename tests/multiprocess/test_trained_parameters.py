"""`requires_grad` between steps: gradients where copies compute in bf16, and flags that differ between processes.

Frozen and thawed parameters are compared with one process, in every layout, by tests/fuzz.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from small_llama import llama
from torch import Tensor, nn

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model import Description, describe

FP64, BF16 = torch.float64, torch.bfloat16
VOCABULARY, TOKENS, MICROBATCHES = 97, 8, 3
BUILT = r"^(?!.*layers\.2)"
"""Names that match are frozen."""
FROZEN = (r"embed|head|norm|layers\.2", "^$", r"layers\.([023]|1\.self)")
"""Of each step."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    kind: str = "replicate"
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    tied: bool = False
    replicas: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1


KINDS = ("replicate", "shard")


@cache
def model_of(tied: bool, dtype: torch.dtype, frozen: str) -> Description:
    model = llama(VOCABULARY, tied, dtype)
    freeze(model.named_parameters(), frozen)
    return describe(model)


def make(case: Case, compute_dtype: torch.dtype = FP64, frozen: str = BUILT) -> Pipeline:
    dtype = FP64 if compute_dtype == FP64 else torch.float32
    return Pipeline(
        model_of(case.tied, dtype, frozen),
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=MICROBATCHES,
        data_parallel=case.kind,
        replicas=case.replicas,
        tensor_parallel=case.tensor_parallel,
        context_parallel=case.context_parallel,
        parameter_dtype=dtype,
        compute_dtype=compute_dtype,
        self_check=False,
    )


def freeze(parameters: Iterator[tuple[str, nn.Parameter]], pattern: str) -> None:
    for name, parameter in parameters:
        parameter.requires_grad_(not re.search(pattern, name))


def batches(case: Case) -> list[Batch]:
    return reference.batches(VOCABULARY, 2 * MICROBATCHES * case.replicas, TOKENS, len(FROZEN))


def step(pipeline: Pipeline, batch: Batch) -> None:
    pipeline.step(*(part.chunk(pipeline.replicas)[pipeline.replica] for part in batch))


def gradients(parameters: Iterator[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in parameters if one.grad is not None}


# --- where copies compute --------------------------------------------------------------------------------


def follows_in_bf16(cases: list[Case]) -> None:
    """Gradients do not depend on what else is trained: bit for bit those of a pipeline that trains everything."""
    for case in cases:
        whole, changing = make(case, BF16, "^$"), make(case, BF16)
        for batch, pattern in zip(batches(case), FROZEN, strict=True):
            for pipeline in (whole, changing):
                pipeline.zero_grad()
            freeze(changing.named_parameters(), pattern)
            step(whole, batch)
            step(changing, batch)
            wanted, found = (gradients(one.named_parameters()) for one in (whole, changing))
            assert found.keys() == {name for name in wanted if not re.search(pattern, name)}, f"{case} {pattern}"
            for name, gradient in found.items():
                assert gradient.dtype == torch.float32 and torch.equal(gradient, wanted[name]), f"{case} {name}"
        whole.close()
        changing.close()


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, [Case(mode="first-last"), Case(schedule="zb-h1", mode="first-last", tied=True)]),
        (2, [Case(), Case(schedule="zbv", tied=True)]),
        (4, [Case(kind, schedule, replicas=2) for kind in KINDS for schedule in ("1f1b", "zbv")]),
    ],
)
@pytest.mark.slow
def test_in_bf16(processes: int, cases: list[Case]) -> None:
    run_processes(follows_in_bf16, processes, cases)


# --- flags that differ -----------------------------------------------------------------------------------


def differs(case: Case, name: str, ranks: Mapping[int, bool], said: str) -> None:
    """Some processes freeze a parameter: all refuse the step, and nothing has happened."""
    data = batches(case)
    pipeline = make(case, frozen="^$")
    held = dict(pipeline.named_parameters())
    step(pipeline, data[0])
    before = gradients(pipeline.named_parameters())
    if name in held:
        held[name].requires_grad_(ranks.get(dist.get_rank(), True))
    for _ in range(2):
        with pytest.raises(InputError, match=said):
            step(pipeline, data[1])
        now = gradients(pipeline.named_parameters())
        assert all(torch.equal(before[one], now[one]) for one in before | now)
    if name in held:
        held[name].requires_grad_()
    step(pipeline, data[1])
    model = llama(VOCABULARY, case.tied, FP64)
    for batch in data[:2]:
        reference.loss_of(model, *batch).backward()
    found = pipeline.full_gradients()
    if dist.get_rank() == 0:
        assert reference.worst(found, gradients(model.named_parameters()))[0] <= 1e-10
    pipeline.close()


EMBEDDING, MATRIX = "model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("processes", "case", "name", "frozen", "where"),
    [
        (2, Case(), EMBEDDING, (0,), "devices"),
        (2, Case(), "lm_head.weight", (1,), "devices"),
        (2, Case(mode="first-last", tied=True), EMBEDDING, (1,), "devices"),
        (2, Case("replicate", mode="first-last", replicas=2), MATRIX, (1,), "replicas"),
        (4, Case("shard", replicas=2), MATRIX, (3,), "replicas"),
        (4, Case("replicate", replicas=2), EMBEDDING, (0, 1), "devices"),  # the first device of both replicas
        (4, Case("replicate", replicas=2), EMBEDDING, (1, 3), "replicas"),
    ],
)
@pytest.mark.sampled(2)
def test_processes_that_disagree(processes: int, case: Case, name: str, frozen: tuple[int, ...], where: str) -> None:
    said = rf"^{re.escape(name)}: requires_grad is True on some {where} and False on others, expected the same"
    run_processes(differs, processes, case, name, dict.fromkeys(frozen, False), said)


TIED = Case(tied=True, tensor_parallel=2)
NORM = "model.layers.3.input_layernorm.weight"


@pytest.mark.parametrize(
    ("processes", "case", "name", "frozen", "said"),
    [
        (2, Case(tensor_parallel=2), NORM, (1,), "tensor rank 0 and False on tensor rank 1 of device 0"),
        (2, Case(tensor_parallel=2), MATRIX, (0,), "tensor rank 1 and False on tensor rank 0 of device 0"),
        (
            4,
            Case(tensor_parallel=2, tied=True),
            EMBEDDING,
            (2,),
            "tensor rank 1 and False on tensor rank 0 of device 1",
        ),
        (4, Case(tensor_parallel=2), MATRIX, (2,), "tensor rank 1 and False on tensor rank 0 of device 1"),
        (4, Case(tensor_parallel=2), "lm_head.weight", (3,), "tensor rank 0 and False on tensor rank 1 of device 1"),
        (4, Case(tensor_parallel=2), EMBEDDING, (0, 1), "some devices and False on others"),
        # ranks of replicas: 0, 1 of the first one, and 2, 3
        (4, Case(replicas=2, tensor_parallel=2), NORM, (0, 2), "tensor rank 1 and False on tensor rank 0 of device 0"),
        (4, Case("shard", replicas=2, tensor_parallel=2), NORM, (1,), "some replicas and False on others"),
        (2, Case(context_parallel=2), NORM, (1,), "context rank 0 and False on context rank 1 of device 0"),
        # ranks of device 1: 4, 5 of the first context rank, and 6, 7
        (
            8,
            Case(context_parallel=2, tensor_parallel=2),
            NORM,
            (4, 5),
            "context rank 1 and False on context rank 0 of device 1",
        ),
    ],
)
@pytest.mark.sampled(2)
def test_ranks_of_a_device_that_disagree(
    processes: int, case: Case, name: str, frozen: tuple[int, ...], said: str
) -> None:
    expected = rf"^{re.escape(name)}: requires_grad is True on {said}, expected the same on every process that holds"
    run_processes(differs, processes, case, name, dict.fromkeys(frozen, False), expected)
