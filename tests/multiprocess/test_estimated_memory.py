"""`evenpipe estimate` beside real runs of four processes: each one's peak, in closed form and traced.

What is estimated is told what a user tells it: the model, the schedule, the sizes, and that it runs on a CPU.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
import torch
from harness import run_processes
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from evenpipe import OffloadOptions, Pipeline, Recipe
from evenpipe.costs.hardware import KNOWN
from evenpipe.memory.estimate import estimate
from evenpipe.model import describe
from evenpipe.schedule import Order

DEVICES, MICROBATCHES, SEQUENCES, TOKENS, ROWS, LAYERS = 4, 8, 2, 64, 1536, 8
CPU = replace(KNOWN["H200"], name="this host", torch_device="cpu")
CLOSE = 0.002
"""What is left: which tokens are in which shard, taken to be as many everywhere. With a whole vocabulary it is the four
bytes of the loss."""

EARLY = 0.02
"""By which estimates may be above what is counted where activations are on the host: a backward gives back the input of
its stage before its end then, and is estimated as one that does not."""


@dataclass(frozen=True)
class Case:
    schedule: str
    mode: str
    checkpointing: str = "none"
    tied: bool = False
    replicas: int = 1
    sharded: bool = False
    tokens: int = TOKENS
    offload: str = "scheduled"
    kept: tuple[int, ...] = ()
    """Layers whose activations stay on the device."""


CASES = [
    *(Case(schedule, mode) for schedule in ("1f1b", "zbv", "v-half") for mode in ("first-last", "vocab-2")),
    Case("1f1b", "first-last", "full"),
    Case("interleaved", "vocab-1", "selective"),
    Case("1f1b", "vocab-2", tied=True),
    Case("zb-h1", "redistribute", tied=True),
    Case("1f1b", "first-last", replicas=2),
    Case("zbv", "vocab-2", replicas=2, sharded=True),
    Case("1f1b", "first-last", "full", replicas=2, sharded=True, tokens=8),  # fullest while gradients are summed
    Case("gpipe", "first-last", offload="all"),
    Case("zbv", "vocab-2", offload="all", tied=True),
    Case("interleaved", "vocab-2", "selective", offload="all"),
    Case("zb-h1", "vocab-1", "full", offload="all"),
    Case("1f1b", "vocab-2", offload="all", kept=(0, 1, 4, 7)),
    Case("po-h", "first-last"),
    Case("po-f", "vocab-2"),
]


def config(case: Case) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=case.tied,
    )


def count(cases: list[Case]) -> list[tuple[int, Order, int]]:
    """The most bytes of this process, the order that it ran, and the most bytes on the host."""
    return [count_one(case) for case in cases]


def offload_of(case: Case) -> OffloadOptions:
    layers = tuple("keep" if layer in case.kept else "offload" for layer in range(LAYERS))
    return OffloadOptions(activations=case.offload, layers=layers)


def count_one(case: Case) -> tuple[int, Order, int]:
    axes = (case.replicas, DEVICES // case.replicas)
    pipeline = Pipeline(
        config(case),
        mesh=init_device_mesh("cpu", axes, mesh_dim_names=("dp", "pp")),
        data_parallel="shard" if case.sharded else "replicate",
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=MICROBATCHES,
        checkpointing=case.checkpointing,
        sequence_length=case.tokens,
        offload=offload_of(case),
        self_check=False,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS, (MICROBATCHES * SEQUENCES, case.tokens), generator=generator)
    gc.collect()
    with pipeline.count_bytes() as counted:
        for _ in range(2):
            pipeline.step(ids)
            optimizer.step()
            pipeline.zero_grad()
    pipeline.close()
    return counted.peak, pipeline.order, 0 if pipeline._activations is None else pipeline._activations.pool.most_used


@pytest.fixture(scope="module")
def counted() -> dict[Case, list[tuple[int, Order, int]]]:
    by_process = run_processes(count, DEVICES, CASES)
    return {case: [found[number] for found in by_process] for number, case in enumerate(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True], ids=["closed", "traced"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimated_peaks_are_those_counted(case: Case, traced: bool, counted) -> None:
    found = estimate(
        describe(config(case)),
        Recipe.of(
            dp=case.replicas,
            pp=DEVICES // case.replicas,
            data_parallel="shard" if case.sharded else "replicate",
            sequence_length=case.tokens,
            microbatch_size=SEQUENCES,
            microbatches=MICROBATCHES,
            schedule=counted[case][0][1],
            vocabulary=case.mode,
            checkpointing=case.checkpointing,
            offload=offload_of(case),
        ),
        hardware=CPU,
        traced=traced,
    )
    for process, (peak, _, host) in enumerate(counted[case]):
        device = found.devices[process % len(found.devices)]
        error = device.peak_allocated / peak - 1
        print(
            f"{case} device {device.device}: {device.peak_allocated} of {peak} ({error:+.3%}), {device.binding_event}"
        )
        more = EARLY if device.host else CLOSE
        assert -CLOSE < error < more, f"{device} and {peak}"
        assert device.host <= host <= 1.02 * device.host, (
            f"{device.host} on the host, and {host} in slots of whole pages"
        )
