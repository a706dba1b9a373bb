"""Compiled layers on tensor and context ranks, in slices and with shared experts, with every kind of checkpointing:
compiled between exchanges, never run uncompiled but for the first microbatch, and with the gradients of one process."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import reference
import torch
import torch.distributed as dist
from harness import check_cases
from small_runs import TOKENS, Case, described, opened
from torch._dynamo.utils import counters

from evenpipe.layers import compilation
from evenpipe.layers.checkpointing import CHOICES
from evenpipe.model.fp64 import InFp64

AXES = [
    Case("llama", tensor_ranks=2),
    Case("llama", context_ranks=2),
    Case("llama", context_ranks=2, exchange="heads"),
    Case("llama", devices=2, slices=2),
    Case("mixtral", replicas=2, members=2),
    Case("mixtral", tensor_ranks=2),
    Case("llama", tensor_ranks=2, context_ranks=2),
]
CASES = [
    replace(case, checkpointing=choice, schedule=schedule)
    for case in AXES
    for choice in CHOICES
    for schedule in ("1f1b", "zb-h1")
]

BREAKS = 7
"""Of the graph of a layer, at most."""


def compiled_steps(cases: list[Case]) -> list[str]:
    return [fault for case in cases for fault in compiled_step(case)]


def compiled_step(case: Case) -> list[str]:
    torch._dynamo.reset()
    counters.clear()
    first: list[Any] = []
    find = compilation._CompiledLayer._find_linears

    def found(layer: Any, *arguments: Any) -> Any:
        first.append(layer)
        return find(layer, *arguments)

    batches = reference.batches(61, case.microbatches * case.replicas, TOKENS, 2)
    losses, gradients = [], {}
    with (
        InFp64(),
        mock.patch.object(compilation, "compile_layer", partial(compilation.compile_layer, backend="aot_eager")),
        mock.patch.object(compilation._CompiledLayer, "_find_linears", found),
        contextlib.closing(opened(case, compile_layers=True)) as pipeline,
    ):
        for batch in batches:
            pipeline.zero_grad()
            losses.append(pipeline.step(*(case.part(pipeline.replica, one) for one in batch)).loss)
            gradients = pipeline.full_gradients()
    faults = []
    frames, breaks = counters["frames"], counters["graph_break"].total()
    if not 0 < frames["ok"] == frames["total"] or len(set(map(id, first))) < len(first):
        faults.append(f"{case}: torch compiled {frames}, {len(first)} microbatches of layers ran uncompiled")
    if not 0 < breaks <= BREAKS * case.slices:  # slices have two lengths
        faults.append(f"{case}: {breaks} graph breaks")
    if dist.get_rank():
        return faults
    with InFp64():
        wanted = reference.train(copy.deepcopy(described(case.family).model), batches[1:])
    error, name = reference.worst(gradients, wanted.gradients)
    if not (error <= 1e-10 and abs(losses[1] / wanted.losses[0] - 1) <= 1e-10):
        faults.append(f"{case}: loss {losses[1]} for {wanted.losses[0]}, gradient of {name} off by {error:.1e}")
    return faults


def test_compiled_layers_on_every_axis(sample) -> None:
    check_cases(compiled_steps, sample(CASES, 4))
