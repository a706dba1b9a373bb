"""Tensor ranks that exchange rows beside products: the same results and bytes as without, in one order on all ranks.

Rings on gloo; torch's fused operations with the fallbacks that torch has for tests, since they need GPUs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed._symmetric_memory as symmetric
from harness import check_cases, run_processes
from small_families import USUAL
from small_runs import described
from torch import Tensor

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.layers import weight_gradients
from evenpipe.model.fp64 import InFp64
from evenpipe.parallel import symmetric_memory
from evenpipe.runtime import device, tensor_cut

FALLBACKS = (symmetric._fused_all_gather_matmul_fallback, symmetric._fused_matmul_reduce_scatter_fallback)
LAYERS, MICROBATCHES, TOKENS = 4, 4, 8


@contextlib.contextmanager
def fused_on_gloo() -> Iterator[None]:
    """Let "fused" run here, with torch's fallbacks."""
    with (
        mock.patch.object(symmetric_memory, "fused_operations", lambda: FALLBACKS),
        mock.patch.object(tensor_cut, "obstacle_to_fused", lambda *_: None),
    ):
        yield


def tensor_pipeline(ranks: int, family: str = "llama", tied: bool = False, **options: Any) -> Pipeline:
    options = {"microbatches": 1, "parameter_dtype": torch.float64, "self_check": False, **options}
    return Pipeline(described(family, tied), tensor_parallel=ranks, **options)


# --- pipelines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    family: str
    overlap: str
    schedule: str
    checkpointing: str = "none"
    size: int = 1
    """Sequences of a microbatch."""
    processes: int = 2
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)


def cases() -> list[Case]:
    """Weights in both layouts, biases, packed matrices, norms over all heads, experts, low-rank projections that every
    rank holds whole, several sequences."""
    families = ("llama", "starcoder2", "phi3", "gpt2", "olmo2", "mixtral", "gpt-neox", "qwen2-moe", "deepseek-v3")
    ways = itertools.product(families, ("ring", "fused"), ("1f1b", "zb-h1"), ("none", "full", "selective"), (1, 2))
    listed = [Case(*way) for way in ways]
    for overlap, schedule in itertools.product(("ring", "fused"), ("1f1b", "zbv", "dualpipe-v", "interleaved", "po-h")):
        listed.append(Case("qwen3", overlap, schedule, processes=4, options={"vocabulary": "vocab-1"}))
        listed.append(Case("starcoder2", overlap, schedule, "selective", processes=4, ranks=4))
    for overlap, mode in itertools.product(("ring", "fused"), ("replicate", "shard")):
        listed.append(Case("qwen2", overlap, "zb-h1", processes=4, options={"replicas": 2, "data_parallel": mode}))
    return listed


def faults_of(cases: list[Case]) -> list[str]:
    return [fault for case in cases if (fault := fault_of(case))]


def fault_of(case: Case) -> str:
    """What differs from transformers in one process, on the first process. Sums in another order are compared in fp64
    throughout, since fp32 inside would make more of their last bit."""
    tied = case.family == "llama"
    sequences = case.size * MICROBATCHES * case.options.get("replicas", 1)
    ((ids, labels),) = reference.batches(USUAL["vocab_size"], sequences, TOKENS, 1)
    around = fused_on_gloo() if case.overlap == "fused" else contextlib.nullcontext()
    options = {"checkpointing": case.checkpointing, "tensor_overlap": case.overlap, "microbatches": MICROBATCHES}
    with InFp64(), around:
        with contextlib.closing(
            tensor_pipeline(case.ranks, case.family, tied, schedule=case.schedule, **options | case.options)
        ) as pipeline:
            count = sequences // pipeline.replicas
            own = slice(pipeline.replica * count, (pipeline.replica + 1) * count)
            loss = pipeline.step(ids[own], labels[own]).loss
            gradients = pipeline.full_gradients()
        if torch.distributed.get_rank():
            return ""
        model = described(case.family, tied).model
        model.zero_grad()
        wanted = reference.loss_of(model, ids, labels)
        wanted.backward()
    error, name = reference.worst(
        gradients, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    )
    good = error <= 1e-10 and abs(loss / wanted.item() - 1) <= 1e-10
    return "" if good else f"{case}: loss {loss} for {wanted.item()}, gradient of {name} off by {error:.1e}"


def test_gradients_are_those_of_one_process(sample) -> None:
    check_cases(faults_of, sample(cases(), 2))


# --- order, bytes, counts ---------------------------------------------------------------------------------------------


def issued(overlap: str, schedule: str, checkpointing: str) -> tuple[list[tuple[str, ...]], int]:
    """Return what a rank starts in its second step on the communicator of its device, and the bytes it receives."""
    log: list[tuple[str, ...]] = []
    options = {"microbatches": MICROBATCHES, "communicators": "per-kind", "tensor_overlap": overlap}
    with contextlib.closing(tensor_pipeline(2, schedule=schedule, checkpointing=checkpointing, **options)) as pipeline:
        communicator = pipeline._groups.tensor
        ((ids, labels),) = reference.batches(USUAL["vocab_size"], MICROBATCHES, TOKENS, 1)
        pipeline.step(ids, labels)
        for name in ("all_gather", "reduce_scatter", "all_reduce", "pass_on"):

            def noted(*given: Any, name: str = name, call: Any = getattr(communicator, name)) -> Any:
                tensors, what = given[:-1], given[-1]
                log.append((name, what, *(str(tuple(one.shape)) for one in tensors)))
                return call(*given)

            setattr(communicator, name, noted)
        before = communicator.traffic.received_bytes
        pipeline.step(ids, labels)
        received = communicator.traffic.received_bytes - before
    return log, received


WAYS = [(schedule, checkpointing) for schedule in ("1f1b", "zb-h1") for checkpointing in ("none", "full", "selective")]


@pytest.mark.parametrize(("schedule", "checkpointing"), WAYS)
@pytest.mark.sampled(1)
def test_ranks_issue_the_same_in_one_order_and_receive_as_much_as_without(schedule: str, checkpointing: str) -> None:
    plain = run_processes(issued, 4, "none", schedule, checkpointing)
    ring = run_processes(issued, 4, "ring", schedule, checkpointing)
    for first, second in (ring[:2], ring[2:]):
        assert first[0] == second[0]
        assert any(name == "pass_on" for name, *_ in first[0])
    assert [bytes_received for _, bytes_received in ring] == [bytes_received for _, bytes_received in plain]


@pytest.mark.slow
def test_selective_checkpointing_repeats_no_sum_of_a_ring() -> None:
    """It gathers each block's input once more, but keeps the sums: they are results of products. Without rings,
    test_tensor_traffic.py counts them."""
    log = run_processes(issued, 4, "ring", "1f1b", "selective")[0][0]
    blocks = 2 * 2 * MICROBATCHES  # of two layers

    def count(kind: str, transfer: str) -> int:
        return sum(
            what.split()[0] == transfer and what.split()[-1].lstrip("0123456789").startswith(kind)
            for _, what, *_ in log
        )

    assert (count("F", "rows"), count("F", "sum")) == (blocks, blocks + MICROBATCHES)  # one sum of embedded tokens
    assert (count("B", "rows"), count("B", "sum")) == (2 * blocks, blocks + MICROBATCHES)


def order_in_w(overlap: str) -> list[str]:
    """Return the gathers and products of one W, in order."""
    log: list[str] = []
    options = {"schedule": "zb-h1", "microbatches": 2, "tensor_overlap": overlap, "layers_per_stage": [LAYERS]}
    with contextlib.closing(tensor_pipeline(2, **options)) as pipeline:
        exchange, stage = pipeline._tensor[1], pipeline._held.stages[0]
        names = {id(parameter): name for name, parameter in stage.named_parameters()}
        start, add = exchange.start_gather, weight_gradients.accumulate

        def noted(rows: Tensor) -> Any:
            if "W" in exchange.running.text:
                log.append("gather")
            return start(rows)

        def added(parameter: Any, gradient: Tensor) -> None:
            log.append(names[id(parameter)].split(".")[-2])
            add(parameter, gradient)

        exchange.start_gather = noted
        ((ids, labels),) = reference.batches(USUAL["vocab_size"], 2, TOKENS, 1)
        with mock.patch.object(weight_gradients, "accumulate", added):
            pipeline.step(ids, labels)
    return log


@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.sampled(1)
def test_w_gathers_an_input_behind_the_products_before_it(overlap: str) -> None:
    (log, other) = run_processes(order_in_w, 2, overlap)
    assert log == other
    mlp, attention = ["up_proj", "gate_proj"], ["v_proj", "k_proj", "q_proj"]
    middle = ["gather", *mlp, "o_proj", "gather", *attention, "down_proj"]
    of_stage = ["gather", "down_proj", *middle * 3, "gather", *mlp, "o_proj", *attention]
    assert log == of_stage * 2


# --- what is said -----------------------------------------------------------------------------------------------------


def said(**options: Any) -> list[str]:
    with contextlib.closing(tensor_pipeline(2, **options)) as pipeline:
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
    with contextlib.closing(Pipeline(described("llama"), microbatches=1, self_check=False)) as pipeline:
        assert pipeline.tensor_overlap is None


def test_the_status_says_what_runs_and_why_not() -> None:
    run_processes(what_is_said, 2)
