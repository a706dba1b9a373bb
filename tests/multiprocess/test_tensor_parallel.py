"""Tensor ranks: what several of them hold keeps the same bits, torch's fused operations, what is said of
transfers beside products, and what is refused.

Gradients, losses and trained weights of every family and layout, also with rings, are compared by tests/fuzz. The fused
operations need GPUs: here torch's own fallbacks take their places.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from harness import check_cases, run_processes
from small_runs import Case, described, noisy, opened

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model.fp64 import InFp64
from evenpipe.parallel import symmetric_memory
from evenpipe.runtime import device, tensor_cut

FAMILIES = ("llama", "qwen3", "phi3", "gemma2", "gpt2", "mixtral")
LAYOUTS = (
    Case("", tensor_ranks=2),
    Case("", tensor_ranks=4, schedule="zb-h1"),
    Case("", devices=2, tensor_ranks=2, schedule="zbv", checkpointing="selective"),
    Case("", replicas=2, tensor_ranks=2, data_parallel="shard", mode="first-last"),
)


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases for fault in differences_between_ranks(case)]


def differences_between_ranks(case: Case) -> list[str]:
    """Parameters that several tensor ranks of a device hold have the same bits on all of them after trained steps."""
    pipeline = opened(case)
    optimizer = reference.adamw(list(pipeline.parameters()))
    for ids, labels in reference.batches(61, 4 * case.replicas, 8, 2):
        pipeline.zero_grad()
        pipeline.step(case.part(pipeline.replica, ids), case.part(pipeline.replica, labels))
        optimizer.step()
    held = {}
    for number, shared in enumerate(pipeline._held.shared):
        part = tuple(str(box.whole) for box in shared.placement.boxes())  # not all of it: heads of keys and values
        held[pipeline.replica, pipeline.device, number, part] = shared.tensor.detach().tolist()
    pipeline.close()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    assert any(everywhere), case
    values = {key: value for of_rank in everywhere for key, value in of_rank.items()}
    return [
        f"{case}: {key} of process {rank}"
        for rank, of_rank in enumerate(everywhere)
        for key in of_rank
        if of_rank[key] != values[key]
    ]


def test_what_several_ranks_hold_keeps_the_same_bits(sample) -> None:
    cases = [Case(**vars(layout) | {"family": family}) for family, layout in itertools.product(FAMILIES, LAYOUTS)]
    check_cases(run_cases, sample(cases, 2))


# --- torch's fused operations -----------------------------------------------------------------------------------------

FALLBACKS = (symmetric._fused_all_gather_matmul_fallback, symmetric._fused_matmul_reduce_scatter_fallback)
FUSED = [
    *(
        Case(family, tensor_ranks=2, schedule=schedule, checkpointing=checkpointing, tied=family == "llama")
        for family in (
            "llama",
            "starcoder2",
            "phi3",
            "gpt2",
            "olmo2",
            "mixtral",
            "gpt-neox",
            "qwen2-moe",
            "deepseek-v3",
        )
        for schedule in ("1f1b", "zb-h1")
        for checkpointing in ("none", "full", "selective")
    ),
    *(
        case
        for schedule in ("1f1b", "zbv", "dualpipe-v", "interleaved", "po-h")
        for case in (
            Case("qwen3", devices=2, tensor_ranks=2, schedule=schedule, mode="vocab-1"),
            Case("starcoder2", tensor_ranks=4, schedule=schedule, checkpointing="selective"),
        )
    ),
    *(Case("qwen2", 2, tensor_ranks=2, schedule="zb-h1", data_parallel=kind) for kind in ("replicate", "shard")),
]
"""Weights in both layouts, biases, packed matrices, norms over all heads, experts, low-rank projections that every rank
holds whole."""


@contextlib.contextmanager
def fused_on_gloo() -> Iterator[None]:
    with (
        mock.patch.object(symmetric_memory, "fused_operations", lambda: FALLBACKS),
        mock.patch.object(tensor_cut, "obstacle_to_fused", lambda *_: None),
    ):
        yield


def faults_of_fused(cases: list[Case]) -> list[str]:
    """What differs from transformers in one process, on the first process. Sums in another order are compared in fp64
    throughout, since fp32 inside would make more of their last bit."""
    faults = []
    for case in cases:
        ((ids, labels),) = reference.batches(61, 2 * case.microbatches * case.replicas, 8, 1)
        with InFp64(), fused_on_gloo(), contextlib.closing(opened(case, tensor_overlap="fused")) as pipeline:
            loss = pipeline.step(case.part(pipeline.replica, ids), case.part(pipeline.replica, labels)).loss
            gradients = pipeline.full_gradients()
            if dist.get_rank():
                continue
            wanted = reference.train(copy.deepcopy(described(case.family, case.tied).model), [(ids, labels)])
        error, name = reference.worst(gradients, wanted.gradients)
        if not (error <= 1e-10 and abs(loss / wanted.losses[0] - 1) <= 1e-10):
            faults.append(f"{case}: loss {loss} for {wanted.losses[0]}, gradient of {name} off by {error:.1e}")
    return faults


def test_fused_operations_have_the_gradients_of_one_process(sample) -> None:
    check_cases(faults_of_fused, sample(FUSED, 2))


# --- what is said -----------------------------------------------------------------------------------------------------


def tensor_pipeline(**options: Any) -> Pipeline:
    return Pipeline(noisy("llama", torch.float32), microbatches=1, tensor_parallel=2, self_check=False, **options)


def said(**options: Any) -> list[str]:
    with contextlib.closing(tensor_pipeline(**options)) as pipeline:
        assert pipeline.step(torch.ones(1, 8, dtype=torch.int64)).loss > 0
        return pipeline.tensor_overlap


def what_is_said() -> None:
    assert said() == "none, because torch's fused operations need GPUs"
    assert said(tensor_overlap="none") == "none, as asked for"
    assert said(tensor_overlap="ring") == "ring; its gain on GPUs has not been measured"
    with mock.patch.object(device, "compile_layer", lambda *_: None):  # which would take a minute
        assert said(tensor_overlap="ring", compile_layers=True) == "none, because layers are compiled"
    with pytest.raises(InputError, match="tensor_overlap: 'fused', but torch's fused operations need GPUs; expected"):
        said(tensor_overlap="fused")
    with pytest.raises(InputError, match="tensor_overlap: 'rings', expected one of auto, none, ring, fused"):
        said(tensor_overlap="rings")
    with fused_on_gloo():
        assert "fused operations" in said(tensor_overlap="auto")
    with contextlib.closing(Pipeline(noisy("llama", torch.float32), microbatches=1, self_check=False)) as pipeline:
        assert pipeline.tensor_overlap is None


def test_the_status_says_what_runs_and_why_not() -> None:
    run_processes(what_is_said, 2)


# --- what is refused --------------------------------------------------------------------------------------------------


def bad_input() -> None:
    pipeline = tensor_pipeline()
    says = r"7 tokens per sequence, expected a multiple of 2 \(2 tensor ranks\)|refused by"
    with pytest.raises(InputError, match=says):
        pipeline.step(torch.ones(1, 7, dtype=torch.int64))
    assert pipeline.step(torch.ones(1, 8, dtype=torch.int64)).loss > 0
    pipeline.close()
    with pytest.raises(InputError, match="tensor_parallel: plain modules do not say how they could be cut"):
        Pipeline.from_modules(
            torch.nn.Embedding(9, 8),
            [torch.nn.Linear(8, 8)],
            None,
            torch.nn.Linear(8, 9),
            microbatches=1,
            tensor_parallel=2,
        )


def test_bad_input_is_refused() -> None:
    run_processes(bad_input, 2)
