"""Tensor ranks: what several of them hold keeps the same bits, torch's fused operations, bytes and collectives of a
step, what is said of transfers beside products, and what is refused.

Gradients, losses and trained weights of every family and layout, also with rings, are compared by tests/fuzz. The fused
operations need GPUs: here torch's own fallbacks take their places.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
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
from evenpipe.communication.communicator import Communicator
from evenpipe.errors import InputError
from evenpipe.layers import compilation
from evenpipe.model.fp64 import InFp64
from evenpipe.parallel import symmetric_memory
from evenpipe.runtime import tensor_cut

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
    for number, shared in enumerate(pipeline._state.held.shared):
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


def losses_in_bf16() -> None:
    for family in ("gpt2", "gpt-oss"):  # biases that only the first rank holds
        with contextlib.closing(tensor_pipeline(family, compute_dtype=torch.bfloat16)) as pipeline:
            assert pipeline.evaluate(*batch()).loss == pipeline.step(*batch()).loss


def test_an_evaluation_in_bf16_has_the_loss_of_a_step() -> None:
    run_processes(losses_in_bf16, 2)


# --- torch's fused operations -----------------------------------------------------------------------------------------

FALLBACKS = (symmetric._fused_all_gather_matmul_fallback, symmetric._fused_matmul_reduce_scatter_fallback)
FUSED = [
    *(
        Case(family, tensor_ranks=2, schedule=schedule, checkpointing=checkpointing, tied=family == "llama")
        for family in (*FAMILIES, "starcoder2", "olmo2", "gpt-neox", "qwen2-moe", "deepseek-v3")
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


# --- what moves in a step ---------------------------------------------------------------------------------------------

LAYERS, MICROBATCHES = 4, 4
WAYS = tuple(itertools.product(("1f1b", "zb-h1"), ("none", "full", "selective")))


def pipeline_of(**options: Any) -> Pipeline:
    options = {"microbatches": MICROBATCHES, "parameter_dtype": torch.float64, "self_check": False, **options}
    return Pipeline(described("llama"), **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return reference.batches(61, MICROBATCHES, 8, 1)[0]


RECEIVED: dict[str, Callable[..., int]] = {
    # bytes that come from other members, by operation and its arguments
    "receive": lambda own, buffer, peer, label: buffer.nbytes,
    "shift": lambda own, tensor, buffer, label: buffer.nbytes,
    "broadcast": lambda own, tensor, root, label: tensor.nbytes if own.rank != root else 0,
    "reduce": lambda own, tensor, root, label: tensor.nbytes if own.rank == root else 0,
    "all_gather": lambda own, tensor, label, output=None: tensor.nbytes * len(own.others),
    "all_reduce": lambda own, tensor, label: tensor.nbytes,
    "reduce_scatter": lambda own, output, tensor, label: output.nbytes,
    "gather_rows": lambda own, rows, counts, root, label: (
        rows.nbytes - rows[own.own_rows(counts)].nbytes if own.rank == root else 0
    ),
    "scatter_rows": lambda own, rows, counts, root, label: rows.nbytes if own.rank != root else 0,
}


def bytes_of_step(**options: Any) -> dict[str, int]:
    """Received over each communicator, but for what is sent before and after passes."""
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(contextlib.closing(pipeline_of(communicators="per-pair", **options)))
        received = dict.fromkeys((one.name for one in pipeline._groups.communicators), 0)
        for name, size in RECEIVED.items():

            def counted(own: Any, *arguments: Any, call: Any = getattr(Communicator, name), size: Any = size) -> Any:
                if arguments[-1] not in ("token ids and labels", "the loss"):
                    received[own.name] += size(own, *arguments)
                return call(own, *arguments)

            stack.enter_context(mock.patch.object(Communicator, name, counted))
        pipeline.step(*batch())
        return received


def bytes_of_program(ranks: int) -> dict[str, int]:
    names = pipeline_of(tp=ranks, communicators="per-pair").program.communicators
    return {name: count for name, count in bytes_of_step(tp=ranks).items() if name in names}


def test_columns_carry_their_share_of_hops_and_vocabulary() -> None:
    """Hops, X, dX and rows of the embedding are shared by the tensor ranks; statistics are not, but merged before."""
    alone, shared = run_processes(bytes_of_program, 2, 1), run_processes(bytes_of_program, 4, 2)
    for number, expected in enumerate(alone):
        for name, count in expected.items():
            parts = [received[name] for received in shared[2 * number : 2 * number + 2]]
            if name == "STATISTICS":
                assert parts == [count, count]
            elif name.startswith("ROW"):
                assert sum(parts) == count  # as many as tokens that a column owns
            else:
                assert parts == [count / 2, count / 2], name


def bytes_with(overlap: str, schedule: str, checkpointing: str) -> dict[str, int]:
    options = {"tensor_overlap": overlap, "schedule": schedule, "activation_checkpointing": checkpointing}
    return bytes_of_step(tp=2, **options)


@pytest.mark.parametrize(("schedule", "checkpointing"), WAYS)
@pytest.mark.sampled(1)
def test_a_ring_moves_as_much_as_collectives(schedule: str, checkpointing: str) -> None:
    plain, ring = (run_processes(bytes_with, 4, kind, schedule, checkpointing) for kind in ("none", "ring"))
    assert plain == ring


def collectives_of_steps(ways: list[tuple[str, str]]) -> list[dict[str, int]]:
    """Of tensor ranks, by pass (its kind) and operation."""
    logs = []
    for schedule, checkpointing in ways:
        collectives: Counter[str] = Counter()
        pipeline = pipeline_of(schedule=schedule, activation_checkpointing=checkpointing, tp=2)
        exchange = pipeline._tensor[1]
        for name in ("start_gather", "start_scatter", "sum", "table"):

            def counted(tensor, name=name, call=getattr(exchange, name), collectives=collectives, exchange=exchange):
                kind = "".join(filter(str.isalpha, exchange.running.text))
                collectives[f"{kind} {name.removeprefix('start_')}"] += 1
                return call(tensor)

            setattr(exchange, name, counted)
        pipeline.step(*batch())
        pipeline.close()
        logs.append(dict(collectives))
    return logs


def test_collectives_of_every_pass(sample) -> None:
    """A layer has two blocks. Each gathers before and sums behind in F, and the other way round in B or I; its input is
    gathered again for the weight gradients, in B or W.

    With checkpointing a layer repeats its forward in B or I, and keeps the gathered input from there to W: "full"
    without the last sum, "selective" without any, since it has kept them. E, S and C add theirs.
    """
    ways = sample(WAYS, 2)
    for rank, logs in enumerate(run_processes(collectives_of_steps, 4, ways)):
        assert logs == [collectives_of(rank // 2, *way) for way in ways]


def collectives_of(number: int, schedule: str, checkpointing: str) -> dict[str, int]:
    blocks = 2 * LAYERS // 2 * MICROBATCHES  # of a device
    repeats, splits = checkpointing != "none", schedule == "zb-h1"
    backward = "I" if splits else "B"
    vocabulary = {"S gather": MICROBATCHES, "S table": MICROBATCHES, "C scatter": MICROBATCHES}
    embedding = {"F sum": MICROBATCHES, f"{backward} sum": MICROBATCHES}
    layers = {
        "F gather": blocks,
        "F scatter": blocks,
        f"{backward} gather": blocks * (2 if repeats or not splits else 1),
        f"{backward} scatter": blocks + (blocks // 2 if checkpointing == "full" else 0),
    }
    weights = {"W gather": blocks} if splits and not repeats else {}
    return layers | weights | vocabulary | (embedding if number == 0 else {})


# --- what is said -----------------------------------------------------------------------------------------------------


def tensor_pipeline(family: str = "llama", **options: Any) -> Pipeline:
    return Pipeline(noisy(family, torch.float32), microbatches=1, tp=2, self_check=False, **options)


def said(**options: Any) -> list[str]:
    with contextlib.closing(tensor_pipeline(**options)) as pipeline:
        assert pipeline.step(torch.ones(1, 8, dtype=torch.int64)).loss > 0
        return pipeline.tensor_overlap


def what_is_said() -> None:
    assert said() == "none, because neither 'ring' nor 'fused' has been measured on GPUs"
    assert said(tensor_overlap="none") == "none, as asked for"
    assert said(tensor_overlap="ring") == "ring; its gain on GPUs has not been measured"
    with mock.patch.object(compilation, "compile_layer", lambda *_: None):  # which would take a minute
        assert said(tensor_overlap="ring", compile_layers=True) == "none, because layers are compiled"
    with pytest.raises(InputError, match="tensor_overlap: 'fused', but torch's fused operations need GPUs; expected"):
        said(tensor_overlap="fused")
    with pytest.raises(InputError, match='tensor_overlap is "rings"; it must be one of auto, none, ring, fused'):
        said(tensor_overlap="rings")
    with fused_on_gloo():
        assert "fused operations" in said(tensor_overlap="fused")
        assert said(tensor_overlap="auto").startswith("none")
    with contextlib.closing(Pipeline(noisy("llama", torch.float32), microbatches=1, self_check=False)) as pipeline:
        assert pipeline.tensor_overlap is None


def test_the_status_says_what_runs_and_why_not() -> None:
    run_processes(what_is_said, 2)


# --- what is refused --------------------------------------------------------------------------------------------------


def bad_input() -> None:
    pipeline = tensor_pipeline()
    says = r"7 tokens per sequence; it must have a multiple of 2 \(2 tensor ranks\)|refused by"
    with pytest.raises(InputError, match=says):
        pipeline.step(torch.ones(1, 7, dtype=torch.int64))
    assert pipeline.step(torch.ones(1, 8, dtype=torch.int64)).loss > 0
    pipeline.close()


def test_bad_input_is_refused() -> None:
    run_processes(bad_input, 2)
