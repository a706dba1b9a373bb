"""Tensor ranks that exchange rows beside products: the same results and bytes as without, in one order on all ranks.

Rings on gloo; torch's fused operations with the fallbacks that torch has for tests, since they need GPUs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed._symmetric_memory as symmetric
from harness import check_cases, run_processes
from test_tensor_parallel import CHECKPOINTING, TOKENS, Case, described, noisy
from test_tensor_parallel import run_cases as run_alike
from test_tensor_traffic import MICROBATCHES
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2MoeConfig

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.parallel import symmetric_memory
from evenpipe.parallel.tensor_ranks import TensorRanks
from evenpipe.runtime import tensor_cut
from evenpipe.tensor.ring import Ring

FALLBACKS = (symmetric._fused_all_gather_matmul_fallback, symmetric._fused_matmul_reduce_scatter_fallback)


@contextlib.contextmanager
def fused_on_gloo() -> Iterator[None]:
    """Let "fused" run here, with torch's fallbacks."""
    with (
        mock.patch.object(symmetric_memory, "fused_operations", lambda: FALLBACKS),
        mock.patch.object(tensor_cut, "obstacle_to_fused", lambda *_: None),
    ):
        yield


# --- the operations ---------------------------------------------------------------------------------------------------


def operations(dtype: torch.dtype) -> list[str]:
    """Return what differs from the plain exchange, with rings and fused, and in received bytes."""
    with contextlib.closing(tensor_pipeline(torch.distributed.get_world_size())) as pipeline:
        ranks: TensorRanks = pipeline._tensor[1]
        generator = torch.Generator().manual_seed(0)
        size, rank, traffic = ranks.size, ranks.rank, ranks.communicator.traffic
        own = [torch.randn(16, 32, generator=generator).to(dtype) for _ in range(size)]
        parts = [torch.randn(size * 16, 32, generator=generator).to(dtype) for _ in range(size)]
        weights = [torch.randn(32, width, generator=generator).to(dtype) for width in (24, 40)]
        faults: list[str] = []

        def moved(work: Any) -> tuple[Any, int]:
            before = traffic.received_bytes
            return work(), traffic.received_bytes - before

        whole, plain_bytes = moved(lambda: ranks.gather(own[rank]))
        expected = ranks.scatter(parts[rank] @ weights[0])
        with fused_on_gloo():
            fused = symmetric_memory.Fused(ranks)
        for name, overlap in (("ring", Ring(ranks)), ("fused", fused)):
            (found, products), bytes_moved = moved(lambda: overlap.gather_products(own[rank], weights, [None, None]))
            if not torch.equal(found, whole):
                faults.append(f"{name}: gathered")
            if not all(torch.equal(one, functional.linear(whole, w.t())) for one, w in zip(products, weights)):
                faults.append(f"{name}: products")
            if name == "ring" and bytes_moved != plain_bytes:
                faults.append(f"ring: {bytes_moved} bytes received in place of {plain_bytes}")
            summed, bytes_moved = moved(lambda: overlap.sum_products([(parts[rank], weights[0])]))
            error = float((summed - expected).double().norm() / expected.double().norm())
            if error > (0.0 if size == 2 else 2 * size * torch.finfo(dtype).eps):
                faults.append(f"{name}: sum of products, by {error}")
            if name == "ring" and bytes_moved != (size - 1) * expected.nbytes:
                faults.append(f"ring: {bytes_moved} bytes received for a sum")
    return faults


def tensor_pipeline(ranks: int, **options: Any) -> Pipeline:
    options = {"microbatches": 1, **options}
    return Pipeline(
        described("llama"), tensor_parallel=ranks, parameter_dtype=torch.float64, self_check=False, **options
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rings_and_fused_operations_give_the_plain_results(ranks: int, dtype: torch.dtype) -> None:
    """Gathered products bit for bit; sums bit for bit for two ranks, more are added in another order."""
    assert run_processes(operations, ranks, dtype) == [[]] * ranks


# --- pipelines --------------------------------------------------------------------------------------------------------


def run_cases(cases: list[Case]) -> list[str]:
    with fused_on_gloo() if cases[0].overlap == "fused" else contextlib.nullcontext():
        return run_alike(cases)


def cases() -> list[Case]:
    """Weights in both layouts, biases, packed matrices, norms over all heads, experts, several sequences."""
    families = ("llama", "starcoder2", "phi3", "gpt2", "olmo2", "mixtral", "gpt-neox")
    found = [
        Case(
            family,
            1,
            1,
            2,
            schedule=schedule,
            checkpointing=checkpointing,
            tied=family == "llama",
            size=size,
            overlap=overlap,
        )
        for family, schedule, checkpointing in itertools.product(families, ("1f1b", "zb-h1"), CHECKPOINTING)
        for overlap in ("ring", "fused")
        for size in (1, 2)
    ]
    for overlap, schedule in itertools.product(("ring", "fused"), ("1f1b", "zbv", "dualpipe-v", "interleaved", "po-h")):
        found.append(Case("qwen3", 1, 2, 2, schedule=schedule, mode="vocab-1", overlap=overlap))
        found.append(Case("starcoder2", 1, 1, 4, schedule=schedule, checkpointing="selective", overlap=overlap))
    for overlap, mode in itertools.product(("ring", "fused"), ("replicate", "shard")):
        found.append(Case("qwen2", 2, 1, 2, mode, "zb-h1", overlap=overlap))
    return found


@pytest.mark.parametrize("overlap", ["ring", "fused"])
def test_gradients_and_weights_are_those_of_one_process(sample, overlap: str) -> None:
    check_cases(run_cases, sample([case for case in cases() if case.overlap == overlap], 4))


SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "experts_implementation": "eager",
}
INSIDE = {
    # experts beside a shared one, which reads the same input as the router
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **SMALL, shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    # low-rank projections that every rank holds whole
    "deepseek-v3": lambda: DeepseekV3Config(
        **SMALL,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
}


def gradients_of(family: str, schedule: str, overlap: str) -> tuple[float, str]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(INSIDE[family](), dtype=torch.float64)
    ((ids, labels),) = reference.batches(61, 4, TOKENS, 1)
    with (
        fused_on_gloo(),
        contextlib.closing(
            Pipeline(
                model,
                schedule=schedule,
                microbatches=4,
                tensor_parallel=2,
                tensor_overlap=overlap,
                parameter_dtype=torch.float64,
                self_check=False,
            )
        ) as pipeline,
    ):
        pipeline.step(ids, labels)
        found = pipeline.full_gradients()
    if not found:
        return 0.0, ""
    reference.loss_of(model, ids, labels).backward()
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return reference.worst(found, wanted)


@pytest.mark.parametrize(
    ("family", "schedule", "overlap"), itertools.product(INSIDE, ("1f1b", "zb-h1"), ("ring", "fused"))
)
@pytest.mark.sampled(2)
def test_other_readers_of_a_blocks_input(family: str, schedule: str, overlap: str) -> None:
    error, name = run_processes(gradients_of, 2, family, schedule, overlap)[0]
    assert error < 1e-6, name  # experts in fp32


# --- order, bytes, counts ---------------------------------------------------------------------------------------------


def issued(overlap: str, schedule: str, checkpointing: str) -> tuple[list[tuple[str, ...]], int]:
    """Return what a rank starts in its second step on the communicator of its device, and the bytes it receives."""
    log: list[tuple[str, ...]] = []
    with contextlib.closing(
        tensor_pipeline(
            2,
            schedule=schedule,
            microbatches=MICROBATCHES,
            checkpointing=checkpointing,
            communicators="per-kind",
            tensor_overlap=overlap,
        )
    ) as pipeline:
        communicator = pipeline._groups.tensor
        ((ids, labels),) = reference.batches(61, MICROBATCHES, TOKENS, 1)
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


@pytest.mark.parametrize(("schedule", "checkpointing"), itertools.product(("1f1b", "zb-h1"), CHECKPOINTING))
@pytest.mark.sampled(2)
def test_ranks_issue_the_same_in_one_order_and_receive_as_much_as_without(schedule: str, checkpointing: str) -> None:
    plain = run_processes(issued, 4, "none", schedule, checkpointing)
    ring = run_processes(issued, 4, "ring", schedule, checkpointing)
    for device in range(2):
        first, second = ring[2 * device : 2 * device + 2]
        assert first[0] == second[0]
        assert any(name == "pass_on" for name, *_ in first[0])
        assert [bytes_received for _, bytes_received in ring] == [bytes_received for _, bytes_received in plain]


@pytest.mark.parametrize("overlap", ["none", "ring"])
def test_selective_checkpointing_repeats_no_sum(overlap: str) -> None:
    """It gathers each block's input once more, but keeps the sums: they are results of products."""
    log = run_processes(issued, 4, overlap, "1f1b", "selective")[0][0]
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
    with contextlib.closing(
        tensor_pipeline(2, schedule="zb-h1", microbatches=2, tensor_overlap=overlap, layers_per_stage=[4])
    ) as pipeline:
        exchange, names = (
            pipeline._tensor[1],
            {id(one): name for name, one in pipeline._held.stages[0].named_parameters()},
        )
        start = exchange.start_gather

        def noted(rows: Tensor) -> Any:
            if "W" in exchange.running.text:
                log.append("gather")
            return start(rows)

        exchange.start_gather = noted
        from evenpipe.layers import weight_gradients

        add = weight_gradients.accumulate

        def added(parameter: Any, gradient: Tensor) -> None:
            log.append(names[id(parameter)].split(".")[-2])
            add(parameter, gradient)

        ((ids, labels),) = reference.batches(61, 2, TOKENS, 1)
        with mock.patch.object(weight_gradients, "accumulate", added):
            pipeline.step(ids, labels)
    return log


@pytest.mark.parametrize("overlap", ["none", "ring"])
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
