"""Schedules that add in the order of microbatches give the same bits, those of GPipe; and after a step nothing of it is
left.

Schedule x vocabulary mode x devices x what a forward keeps; microbatches (also fewer than devices, and no multiple of
them), tied weights and how transfers share communicators go round.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from dataclasses import dataclass
from functools import cache

import reference
import torch
from harness import check_cases
from small_llama import llama

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.schedule import SCHEDULES, SHARING, Kind, Order, TransferKind, add_recompute, plan_order
from evenpipe.schedule.held import peak_activations
from evenpipe.schedule.passes import parts_of

MODES = ("first-last", "vocab-1", "vocab-2")
KEPT = ("all", "inputs of layers", "inputs of stages")
"""What a forward keeps until its backward; the second is checkpointing, the third an order with R."""
VOCABULARY, LAYERS, DTYPE = 67, 8, torch.float64


@dataclass(frozen=True)
class Case:
    processes: int
    schedule: str
    mode: str
    kept: str
    microbatches: int
    tied: bool
    communicators: str

    def order(self, devices: int, microbatches: int):
        order = plan_order(self.schedule, devices, microbatches, self.mode)
        return add_recompute(order) if self.kept == "inputs of stages" else order


def cases() -> list[Case]:
    found = []
    for number, row in enumerate(itertools.product((1, 2, 3, 4), SCHEDULES, MODES, KEPT)):
        devices = row[0]
        microbatches = (devices + 1, 2 * devices + 1, 1, 2, devices)[number % 5]
        found.append(Case(*row, microbatches, number % 4 == 1, SHARING[number // 3 % 3]))
    return found


@cache
def described(tied: bool):
    return describe(llama(VOCABULARY, tied, DTYPE, LAYERS))


@cache
def data(microbatches: int):
    return reference.batches(VOCABULARY, 2 * microbatches, 6, 2, seed=2)


def opened(case: Case) -> Pipeline:
    return Pipeline(
        described(case.tied),
        schedule=case.order,
        vocabulary=case.mode,
        microbatches=case.microbatches,
        parameter_dtype=DTYPE,
        activation_checkpointing="full" if case.kept == "inputs of layers" else "none",
        communicators=case.communicators,
        self_check=False,
    )


@cache
def expected(mode: str, microbatches: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of GPipe on as many devices, which tests/fuzz compares with one process."""
    with contextlib.closing(opened(Case(0, "gpipe", mode, "all", microbatches, False, "per-pair"))) as pipeline:
        return pipeline.step(*data(microbatches)[0]).loss, pipeline.full_gradients()


def faults_of(case: Case) -> list[str]:
    first, second = data(case.microbatches)
    with contextlib.closing(opened(case)) as pipeline:
        loss = pipeline.step(*first).loss
        gradients = pipeline.full_gradients()
        faults = left_of_a_step(pipeline, second)
    if not case.tied and adds_in_order(pipeline.layout.program.order):  # tied weights get their parts pass by pass
        wanted, bits = expected(case.mode, case.microbatches)
        others = [name for name, tensor in bits.items() if not torch.equal(tensor, gradients[name])]
        faults += [f"other bits in the gradients of {others}"] * bool(others)
        faults += [f"loss {loss!r}, not {wanted!r}"] * (loss != wanted)
    return [f"{case}: {fault}" for fault in faults]


def adds_in_order(order: Order) -> bool:
    """Whether every stage adds the gradients of its weights in the order of microbatches, as all but DualPipeV do."""
    parts = [part for device in range(order.devices) for item in order.passes(device) for part in parts_of(item)]
    added = [(part.stage, part.microbatch) for part in parts if part.kind in (Kind.B, Kind.W)]
    return all(
        [number for of_stage, number in added if of_stage == stage] == list(range(order.microbatches))
        for stage in range(order.placement.stages)
    )


def left_of_a_step(pipeline: Pipeline, batch: tuple[torch.Tensor, torch.Tensor]) -> list[str]:
    """Tensors that a step has made and not given back, without the collector's help, and too many buffers.

    Gradients are there before, and so is the room that the vocabulary layers use again in every step with microbatches
    of one size: this one has as many tokens as the step before it.
    """
    gc.disable()
    with pipeline.count_bytes() as counted:
        inputs = [tensor.clone() for tensor in batch] if pipeline.device == 0 else [None, None]
        result = pipeline.step(*inputs)
        float(result.loss)
        del result, inputs
        # A thread of gloo's lets go of its last reference shortly after the wait for it is over.
        deadline = time.monotonic() + 60
        while counted.survivors() and time.monotonic() < deadline:
            os.sched_yield()
        left = [str(made) for made in counted.survivors()]
    gc.enable()
    return [f"left of a step: {made}" for made in left] + too_many_buffers(pipeline, counted)


def too_many_buffers(pipeline: Pipeline, counted: ByteCounter) -> list[str]:
    """Buffers of hops that lived at once: those for hidden states become the inputs of forwards in flight."""
    program = pipeline.layout.program
    in_flight = int(peak_activations(program.order.passes(pipeline.device)))
    stages = len(program.placement.stages_of(pipeline.device))
    faults = []
    for kind, limit in ((TransferKind.RECV_F, in_flight + 2 * stages), (TransferKind.RECV_B, in_flight)):
        most = counted.most(lambda made, kind=kind: made.item is not None and made.item.kind is kind).storages
        faults += [f"{most} buffers of {kind} at once, {in_flight} forwards in flight"] * (most > limit)
    return faults


def run_cases(several: list[Case]) -> list[str]:
    return [fault for case in several for fault in faults_of(case)]


def test_every_schedule_gives_the_bits_of_gpipe_and_leaves_nothing(sample) -> None:
    check_cases(run_cases, sample(cases(), 6))
