"""What moves in a step, counted: bytes of every communicator and collectives of every pass of tensor ranks, and how
often context ranks gather keys."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import reference
import torch
from harness import run_processes
from small_families import CONFIGS, USUAL
from transformers import AutoModelForCausalLM

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.parallel.context_ranks import ContextRanks

LAYERS, MICROBATCHES, TOKENS = 4, 4, 8
CHECKPOINTING = ("none", "full", "selective")
SCHEDULES = ("1f1b", "zb-h1")
WAYS = tuple(itertools.product(SCHEDULES, CHECKPOINTING))


def pipeline_of(**options: Any) -> Pipeline:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float64)
    options = {"microbatches": MICROBATCHES, "parameter_dtype": torch.float64, "self_check": False, **options}
    return Pipeline(describe(model), **options)


@cache
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return reference.batches(USUAL["vocab_size"], MICROBATCHES, TOKENS, 1)[0]


# --- tensor ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """What a process has sent in one step."""

    bytes: dict[str, int]
    """Received over each communicator of the program."""
    collectives: dict[str, int]
    """Of tensor ranks, by pass (its kind) and operation."""


def logs_of_steps(ranks: int, ways: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Log]:
    return {way: log_of_step(ranks, *way) for way in ways}


def log_of_step(ranks: int, schedule: str, checkpointing: str) -> Log:
    pipeline = pipeline_of(
        schedule=schedule, checkpointing=checkpointing, tensor_parallel=ranks, communicators="per-kind"
    )
    collectives: Counter[str] = Counter()
    exchange = None if pipeline._tensor is None else pipeline._tensor[1]
    for name in ("start_gather", "start_scatter", "sum", "table") if exchange is not None else ():

        def counted(tensor, name=name, call=getattr(exchange, name)):
            collectives[f"{''.join(filter(str.isalpha, exchange.running.text))} {name.removeprefix('start_')}"] += 1
            return call(tensor)

        setattr(exchange, name, counted)
    communicators = list(pipeline._groups.communicators)
    before = {one.name: one.traffic.received_bytes for one in communicators}
    pipeline.step(*batch())
    received = {one.name: one.traffic.received_bytes - before[one.name] for one in communicators}
    names = pipeline.program.communicators
    pipeline.close()
    return Log({name: count for name, count in received.items() if name in names}, dict(collectives))


def test_columns_carry_their_share_of_hops_and_vocabulary() -> None:
    """Hops, X, dX and rows of the embedding are shared by the tensor ranks; statistics are not, but merged before."""
    alone, shared = run_processes(logs_of_steps, 2, 1, WAYS[:1]), run_processes(logs_of_steps, 4, 2, WAYS[:1])
    for device in range(2):
        expected = alone[device][WAYS[0]].bytes
        for name, count in expected.items():
            parts = [logs[WAYS[0]].bytes[name] for logs in shared[2 * device : 2 * device + 2]]
            if name == "STATISTICS":
                assert parts == [count, count]
            elif name.startswith("ROW"):
                assert sum(parts) == count  # as many as tokens that a column owns
            else:
                assert parts == [count / 2, count / 2], name


def test_collectives_of_every_pass(sample) -> None:
    """A layer has two blocks. Each gathers before and sums behind in F, and the other way round in B or I; its input is
    gathered again for the weight gradients, in B or W.

    With checkpointing a layer repeats its forward in B or I, and keeps the gathered input from there to W: "full"
    without the last sum, "selective" without any, since it has kept them. E, S and C add theirs.
    """
    ways = sample(WAYS, 2)
    by_process = run_processes(logs_of_steps, 4, 2, ways)
    for way in ways:
        every = [logs[way].collectives for logs in by_process]
        assert every[0] == every[1] and every[2] == every[3]
        for device in range(2):
            assert every[2 * device] == collectives_of(device, *way), way


def collectives_of(device: int, schedule: str, checkpointing: str) -> dict[str, int]:
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
    return layers | weights | vocabulary | (embedding if device == 0 else {})


def bytes_between_ranks(overlap: str, schedule: str, checkpointing: str) -> int:
    """Of the tensor ranks of this process's device, in a step."""
    options = {"tensor_parallel": 2, "communicators": "per-kind", "tensor_overlap": overlap}
    pipeline = pipeline_of(schedule=schedule, checkpointing=checkpointing, **options)
    pipeline.step(*batch())
    pipeline.close()
    return pipeline._groups.tensor.traffic.received_bytes


@pytest.mark.parametrize(("schedule", "checkpointing"), WAYS)
@pytest.mark.sampled(1)
def test_a_ring_moves_as_much_as_collectives(schedule: str, checkpointing: str) -> None:
    plain, ring = (run_processes(bytes_between_ranks, 4, kind, schedule, checkpointing) for kind in ("none", "ring"))
    assert plain == ring and all(plain)


# --- context ranks ----------------------------------------------------------------------------------------------------

GATHERED = [
    # slices, checkpointing, how often keys and values are gathered
    (1, "none", 2),
    (1, "full", 3),
    (2, "none", 1),
    (2, "full", 2),
]


def gathers(ways: list[tuple[int, str, int]]) -> list[tuple[Counter[str], Counter[str]]]:
    """What a step gathers, and sums, by pass and tensor: how often."""
    logs = []
    for slices, checkpointing, _ in ways:
        gathered: Counter[str] = Counter()
        summed: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            for name, log in (("_start", gathered), ("_start_sum", summed)):

                def counted(self, tensor, what, log=log, call=getattr(ContextRanks, name)):
                    log[f"{what} of {self.running.text}"] += 1
                    return call(self, tensor, what)

                patch.setattr(ContextRanks, name, counted)
            pipeline = pipeline_of(
                vocabulary="first-last", context_parallel=2, slices=slices, checkpointing=checkpointing
            )
            pipeline.step(*batch())
            pipeline.close()
        logs.append((gathered, summed))
    return logs


def test_keys_are_gathered_once_in_each_forward_and_each_backward(sample) -> None:
    """Once more where a layer runs again; of slices once, since they are kept. Gradients are summed once."""
    ways = sample(GATHERED, 3)
    for way, (gathered, summed) in zip(ways, run_processes(gathers, 2, ways)[0], strict=True):
        slices, _, times = way
        each = LAYERS * MICROBATCHES * slices
        assert sum(gathered.values()) == 2 * each * times, way
        assert sum(summed.values()) == 2 * each, way
        assert set(gathered.values()) <= {LAYERS, 2 * LAYERS}, way
