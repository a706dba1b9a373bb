"""What moves in a step, counted: bytes of every communicator and collectives of every pass of tensor ranks, and how
often context ranks gather keys."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import pytest
import reference
import torch
from harness import run_processes
from small_families import USUAL
from small_runs import described

from evenpipe import Pipeline
from evenpipe.parallel.context_ranks import ContextRanks

LAYERS, MICROBATCHES, TOKENS = 4, 4, 8
CHECKPOINTING = ("none", "full", "selective")
SCHEDULES = ("1f1b", "zb-h1")
WAYS = tuple(itertools.product(SCHEDULES, CHECKPOINTING))


def pipeline_of(**options: Any) -> Pipeline:
    options = {"microbatches": MICROBATCHES, "parameter_dtype": torch.float64, "self_check": False, **options}
    return Pipeline(described("llama"), **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return reference.batches(USUAL["vocab_size"], MICROBATCHES, TOKENS, 1)[0]


# --- tensor ranks -----------------------------------------------------------------------------------------------------


def bytes_of_step(**options: Any) -> dict[str, int]:
    """Received over each communicator."""
    with contextlib.closing(pipeline_of(communicators="per-kind", **options)) as pipeline:
        communicators = list(pipeline._groups.communicators)
        before = [one.traffic.received_bytes for one in communicators]
        pipeline.step(*batch())
        received = zip(communicators, before, strict=True)
        return {one.name: one.traffic.received_bytes - earlier for one, earlier in received}


def bytes_of_program(ranks: int) -> dict[str, int]:
    names = pipeline_of(tensor_parallel=ranks, communicators="per-kind").program.communicators
    return {name: count for name, count in bytes_of_step(tensor_parallel=ranks).items() if name in names}


def test_columns_carry_their_share_of_hops_and_vocabulary() -> None:
    """Hops, X, dX and rows of the embedding are shared by the tensor ranks; statistics are not, but merged before."""
    alone, shared = run_processes(bytes_of_program, 2, 1), run_processes(bytes_of_program, 4, 2)
    for device, expected in enumerate(alone):
        for name, count in expected.items():
            parts = [received[name] for received in shared[2 * device : 2 * device + 2]]
            if name == "STATISTICS":
                assert parts == [count, count]
            elif name.startswith("ROW"):
                assert sum(parts) == count  # as many as tokens that a column owns
            else:
                assert parts == [count / 2, count / 2], name


def bytes_with(overlap: str, schedule: str, checkpointing: str) -> dict[str, int]:
    options = {"tensor_overlap": overlap, "schedule": schedule, "checkpointing": checkpointing}
    return bytes_of_step(tensor_parallel=2, **options)


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
        pipeline = pipeline_of(schedule=schedule, checkpointing=checkpointing, tensor_parallel=2)
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
