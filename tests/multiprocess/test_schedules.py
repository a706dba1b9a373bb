"""Every schedule gives what transformers gives in one process: loss, gradients, weights after three steps of AdamW.

Schedule x vocabulary mode x devices x microbatches (also fewer than devices, and no multiple of them) x tied and untied
x what a forward keeps x how transfers share communicators. Batches change from step to step, in sequences and in
length. Where a pipeline adds in the order of one process, it gives the same bits. After a step nothing of it is left.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import time
from dataclasses import dataclass
from functools import cache

import one_process
import pytest
import reference
import torch
from harness import run_processes
from random_orders import random_order
from test_gradients import llama

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.runtime.batch import Batch, Totals, cut
from evenpipe.runtime.inputs import Inputs
from evenpipe.schedule import SCHEDULES, SHARING, Order, TransferKind, add_recompute, plan_order
from evenpipe.schedule.timeline import peak_activations

MODES = ("first-last", "vocab-1", "vocab-2")
BARRIERS = {"first-last": 0, "vocab-1": 2, "vocab-2": 1}
KEPT = ("all", "inputs of layers", "inputs of stages")
"""What a forward keeps until its backward; the second is checkpointing, the third an order with R."""
VOCABULARY = 67
LAYERS = 8
DTYPE = torch.float64


@dataclass(frozen=True)
class Case:
    schedule: str | Order
    mode: str
    microbatches: int
    tied: bool = False
    kept: str = "all"
    communicators: str = "per-pair"

    def __str__(self) -> str:
        name = self.schedule if isinstance(self.schedule, str) else f"an order\n{self.schedule.to_csv()}"
        kept = f"keeps {self.kept}, communicators {self.communicators}"
        return f"{self.mode}, m = {self.microbatches}, tied: {self.tied}, {kept}, {name}"


@cache
def described(tied: bool):
    return describe(llama(VOCABULARY, tied, DTYPE, LAYERS))


@cache
def data(microbatches: int):
    """Three batches of other sizes: sequences per microbatch, and tokens per sequence."""
    sizes = ((2, 6), (1, 9), (3, 4))
    return [reference.batches(VOCABULARY, n * microbatches, tokens, 1, seed=n)[0] for n, tokens in sizes]


@cache
def expected(microbatches: int, tied: bool) -> reference.Reference:
    """What transformers gives on the whole batch."""
    return reference.train(copy.deepcopy(described(tied).model), data(microbatches))


@cache
def expected_bits(microbatches: int, shards: int, barriers: int):
    """The first step, microbatch after microbatch, with untied weights."""
    model = copy.deepcopy(described(False).model)
    return one_process.accumulate(model, *data(microbatches)[0], microbatches, shards=shards, barriers=barriers)


def adds_as_one_process(case: Case, devices: int) -> bool:
    """Where the sums of one process are taken in its order, so that every bit is the same.

    All schedules of the library come to the B, I and W of a stage in the order of microbatches. The parts of dX are
    added by the library, for three and more shards in an order of its own; and tied weights, used by two passes, get
    their parts in the order of passes.
    """
    return isinstance(case.schedule, str) and not case.tied and (case.mode == "first-last" or devices <= 2)


def schedule_of(case: Case):
    if case.kept != "inputs of stages":
        return case.schedule
    if isinstance(case.schedule, Order):
        return add_recompute(case.schedule)
    return lambda devices, microbatches: add_recompute(plan_order(case.schedule, devices, microbatches, case.mode))


def faults_of(case: Case) -> list[str]:
    """What is wrong with a case; of what only the first process has, there alone. Collective."""
    pipeline = Pipeline(
        described(case.tied),
        schedule=schedule_of(case),
        vocabulary=case.mode,
        microbatches=case.microbatches,
        parameter_dtype=DTYPE,
        checkpointing="full" if case.kept == "inputs of layers" else "none",
        communicators=case.communicators,
        self_check=False,
    )
    first, devices = pipeline.device == 0, pipeline.devices
    optimizer = reference.adamw(list(pipeline.parameters()))
    losses, gradients = [], {}
    for number, (ids, labels) in enumerate(data(case.microbatches)):
        pipeline.zero_grad()
        losses.append(pipeline.step(ids if first else None, labels if first else None).loss)
        if number == 0:
            gradients = pipeline.full_gradients()
        optimizer.step()
    weights = pipeline.full_state_dict()
    faults = left_of_a_step(pipeline, data(case.microbatches)[0])
    pipeline.close()
    if first:
        wanted = expected(case.microbatches, case.tied)
        loss_error = max(abs(a / b - 1) for a, b in zip(losses, wanted.losses, strict=True))
        gradient_error, gradient = reference.worst(gradients, wanted.gradients)
        weight_error, weight = reference.worst(weights, wanted.weights)
        faults += [f"loss off by {loss_error:.1e}"] * (not loss_error <= 1e-10)
        faults += [f"gradient of {gradient} off by {gradient_error:.1e}"] * (not gradient_error <= 1e-10)
        faults += [f"weights {weight} off by {weight_error:.1e}"] * (not weight_error <= 1e-8)
    if first and adds_as_one_process(case, devices):
        barriers = BARRIERS[case.mode]
        loss, bits = expected_bits(case.microbatches, devices if barriers else 1, barriers)
        others = [name for name, tensor in bits.items() if not torch.equal(tensor, gradients[name])]
        faults += [f"other bits in the gradients of {others}"] * bool(others)
        faults += [f"loss {losses[0]!r}, not {loss!r}"] * (losses[0] != loss)
    return faults


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


def faults_of_all(cases: list[Case]) -> list[str]:
    found = []
    for case in cases:
        try:
            found += [f"{case}: {fault}" for fault in faults_of(case)]
        except Exception as error:
            error.add_note(str(case))
            raise
    return found


def check(processes: int, cases: list[Case]) -> None:
    faults = run_processes(faults_of_all, processes, cases)
    assert not any(faults), "\n".join(dict.fromkeys(fault for of_one in faults for fault in of_one))


MATRIX = list(itertools.product((1, 2, 3, 4), SCHEDULES, MODES, KEPT))


def case_of(row: tuple[int, str, str, str]) -> Case:
    """What is not in the matrix goes round: tied weights, communicators, fewer microbatches than devices and more."""
    processes, schedule, mode, kept = row
    number = MATRIX.index(row)
    microbatches = (processes + 1, 2 * processes + 1, 1, 2, processes)[number % 5]
    return Case(schedule, mode, microbatches, number % 4 == 1, kept, SHARING[number // 3 % 3])


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_schedule_gives_what_one_process_gives(processes: int, sample) -> None:
    check(processes, [case_of(row) for row in sample(MATRIX, 32) if row[0] == processes])


def random_cases(processes: int, number: int) -> list[Case]:
    rng = random.Random(processes)
    orders = [random_order(seed, processes, rng.randint(1, 5), LAYERS) for seed in range(number)]
    return [
        Case(order, rng.choice(MODES), order.microbatches, rng.random() < 0.5, rng.choice(KEPT), rng.choice(SHARING))
        for order in orders
    ]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.sampled(2)
def test_any_order_gives_it_too(processes: int, sample) -> None:
    """Random placements and sequences, with B, I and W, R and joint passes in one order."""
    check(processes, sample(random_cases(processes, 60), 5))


def errors_with_unequal_microbatches(schedules: list[str]) -> list[str]:
    """One step of three microbatches of other sizes, walked as it stands; largest error of a gradient of each case."""
    sizes = ((2, 6), (1, 9), (3, 4))
    parts = [reference.batches(VOCABULARY, sequences, tokens, 1, seed=7)[0] for sequences, tokens in sizes]
    valid = sum(int((labels[:, 1:] != reference.IGNORE).sum()) for _, labels in parts)
    totals = Totals(weight=float(valid), valid_tokens=valid)
    cuts = [cut(Inputs(ids, labels), totals, microbatches=1, dtype=DTYPE) for ids, labels in parts]
    batch = Batch(tuple(one.microbatches[0] for one in cuts), 0, 0, valid)
    model = copy.deepcopy(described(False).model)
    for ids, labels in parts:
        share = int((labels[:, 1:] != reference.IGNORE).sum()) / valid
        (reference.loss_of(model, ids, labels) * share).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = []
    for schedule, mode in itertools.product(schedules, MODES):
        options = {"schedule": schedule, "vocabulary": mode, "microbatches": 3, "parameter_dtype": DTYPE}
        pipeline = Pipeline(described(False), **options, self_check=False)
        pipeline._walker.walk(pipeline.layout.program, batch)
        gradients = pipeline.full_gradients()
        pipeline.close()
        if pipeline.device == 0:
            error, name = reference.worst(gradients, wanted)
            found += [f"{schedule}, {mode}: gradient of {name} off by {error:.1e}"] * (not error <= 1e-10)
    return found


def test_microbatches_of_other_sizes_in_one_step() -> None:
    """Nothing in a program says how large microbatches are."""
    faults = run_processes(errors_with_unequal_microbatches, 2, ["1f1b", "zbv"])
    assert not faults[0], "\n".join(faults[0])
