"""Hooks on parameters of a pipeline do what they do in one process under one backward of the whole batch.

hooks of every parameter   square of the gradient, mask of its rows, then half of `.grad`: in this order, once per step
optimizers in hooks        one per parameter, which steps as soon as the gradient is there and drops it
graph hooks                `register_multi_grad_hook`, `queue_callback`
hooks on some processes    refused by all of them before anything is computed
hooks that fail            the user's own error, or one that names the parameter; no process waits, the next step works
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import reference
import torch
import torch.distributed as dist
from drawn_runs import MODES, Case, described, opened
from harness import check_cases, run_processes
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from evenpipe import Pipeline
from evenpipe.errors import InputError

TOKENS, STEPS = 16, 2
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.layers.3.input_layernorm.weight"
MATRIX = "model.layers.3.mlp.up_proj.weight"

TWO = Case("llama", devices=2)
LAYOUTS = (
    *(
        replace(TWO, mode=mode, schedule=schedule, tied=tied, checkpointing=checkpointing)
        for mode, (schedule, tied, checkpointing) in zip(
            (*MODES, *MODES),
            itertools.cycle(
                (("1f1b", True, "none"), ("zbv", False, "full"), ("zbv", True, "selective"), ("1f1b", False, "none"))
            ),
            strict=False,
        )
    ),
    Case("llama", mode="first-last", checkpointing="full"),
    Case("gpt2", schedule="zb-h1", mode="first-last", tied=True),
    Case("llama", ranks=2),
    Case("llama", ranks=2, schedule="zb-h1", tied=True),
    *(Case("llama", replicas=2, data_parallel=kind, mode="first-last") for kind in ("replicate", "shard")),
    Case("llama", pieces=2, mode="first-last", tied=True),
    Case("mixtral", replicas=2, members=2),
    replace(TWO, offload="all"),
    replace(TWO, slices=2, schedule="zbv"),
    *(
        replace(TWO, replicas=2, data_parallel=kind, schedule=schedule, tied=tied)
        for kind, (schedule, tied) in itertools.product(("replicate", "shard"), (("zbv", False), ("1f1b", True)))
    ),
    replace(TWO, replicas=2, data_parallel="shard", mode="first-last", tied=True),
    replace(TWO, pieces=2, data_parallel="shard", mode="vocab-1"),
    replace(TWO, ranks=2, mode="first-last", tied=True),
    Case("llama", replicas=2, ranks=2, data_parallel="shard", mode="redistribute"),
    replace(TWO, family="mixtral", replicas=2, members=2, data_parallel="shard", schedule="zbv"),
)

Placed = Callable[[str, Tensor], Tensor]
"""The part of a whole tensor that a process holds, by name of the parameter."""


def data_of(case: Case, replica: int | None = None) -> list[tuple[Tensor, Tensor]]:
    data = reference.batches(61, case.sequences, TOKENS, STEPS)
    if replica is None:
        return data
    count = case.sequences // case.replicas
    own = slice(replica * count, (replica + 1) * count)
    return [(ids[own], labels[own]) for ids, labels in data]


def placed_of(pipeline: Pipeline) -> Placed:
    shards = pipeline.parameter_shards()
    return lambda name, whole: shards[name].placement.of(whole)


def one_process(case: Case) -> nn.Module:
    return copy.deepcopy(described(*case.model).model).train()


def open_pipeline(case: Case, **options) -> Pipeline:
    return opened(case, case.microbatches, checkpointing=case.checkpointing, **options)


# --- every hook of every parameter -----------------------------------------------------------------------


def register(parameters: Iterable[tuple[str, nn.Parameter]], placed: Placed, shapes) -> dict[str, list[str]]:
    """Return what is called, by parameter."""
    calls: dict[str, list[str]] = {}
    for name, parameter in parameters:
        mask = torch.ones(shapes[name], dtype=parameter.dtype)
        mask[: len(mask) // 2] = 0.0
        said = calls[name] = []

        def square(gradient: Tensor, said=said) -> Tensor:
            said.append("square")
            return gradient * gradient.abs()

        def masked(gradient: Tensor, said=said, mask=placed(name, mask)) -> None:
            said.append("mask")
            gradient.mul_(mask).add_(1e-4 * mask)

        def halve(parameter: Tensor, said=said) -> None:
            said.append("halve")
            assert not torch.is_grad_enabled()
            parameter.grad.mul_(0.5)

        parameter.register_hook(square)
        parameter.register_post_accumulate_grad_hook(halve)
        parameter.register_hook(masked)
    return calls


def hooks_of(case: Case) -> Iterator[str]:
    model, shapes = one_process(case), described(*case.model).shapes
    register(model.named_parameters(), lambda _, whole: whole, shapes)
    for ids, labels in data_of(case):
        reference.loss_of(model, ids, labels).backward()
    with contextlib.closing(open_pipeline(case)) as pipeline:
        calls = register(pipeline.named_parameters(), placed_of(pipeline), shapes)
        for ids, labels in data_of(case, pipeline.replica):
            pipeline.step(ids, labels)
        found = pipeline.full_gradients()
        pipeline.evaluate(ids, labels)
        for name, said in calls.items():
            if said != STEPS * ["square", "mask", "halve"]:
                yield f"calls of {name}: {said}"
    if dist.get_rank() == 0:
        wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        error, name = reference.worst(found, wanted)
        if not error <= 1e-10:
            yield f"gradient of {name}: {error:.1e}"
        embedding = next(iter(wanted))
        if found[embedding][:30].norm() or not found[embedding][30:].norm():
            yield f"rows of {embedding} that a hook masks"


def optimizers_in(case: Case) -> Iterator[str]:
    """Weights after steps of an optimizer per parameter, in a hook, as in one process with one optimizer."""
    model = one_process(case)
    wanted = reference.train(model, data_of(case)).weights
    with contextlib.closing(open_pipeline(case)) as pipeline:
        for parameter in pipeline.parameters():
            optimizer = reference.adamw([parameter])

            def update(parameter: Tensor, optimizer=optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        for ids, labels in data_of(case, pipeline.replica):
            pipeline.step(ids, labels)
            if any(parameter.grad is not None for parameter in pipeline.parameters()):
                yield "a gradient that its hook has dropped"
        found = pipeline.full_state_dict()
    if dist.get_rank() == 0:
        error, name = reference.worst({name: found[name] for name in wanted}, wanted)
        if not error <= 1e-8:
            yield f"weight of {name}: {error:.1e}"


def run_cases(cases: list[Case], *checks: Callable[[Case], Iterator[str]]) -> list[str]:
    faults = []
    for case in cases:
        for check in checks or (hooks_of,):
            with case.arithmetic():
                faults += [f"{case}: {fault}" for fault in check(case)]
    return faults


def run_optimizers(cases: list[Case]) -> list[str]:
    return run_cases(cases, optimizers_in)


def test_hooks_of_every_parameter(sample) -> None:
    check_cases(run_cases, sample(list(LAYOUTS), 12))


def test_optimizers_in_hooks(sample) -> None:
    check_cases(run_optimizers, sample(list(LAYOUTS), 5))


# --- other ways to hook, in one loop ---------------------------------------------------------------------


def hooks_of_a_backward(case: Case) -> None:
    """Hooks that need a running backward: of several gradients, and callbacks at its end; removed and added hooks."""
    data = data_of(case)[0]
    model = one_process(case)
    reference.loss_of(model, *data).backward()
    with contextlib.closing(open_pipeline(case)) as pipeline:
        held, placed = dict(pipeline.named_parameters()), placed_of(pipeline)
        wanted = {name: placed(name, model.get_parameter(name).grad) for name in held}
        names, said, seen, first = list(held), [], [], []

        def at_the_end() -> None:
            said.append("end")

        def every(gradients) -> None:
            seen.extend(None if one is None else one.clone() for one in gradients)
            torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

        handles = [register_multi_grad_hook([held[name] for name in names], every)]
        handles.append(register_multi_grad_hook([held[name] for name in names], first.append, mode="any"))

        def once(gradient: Tensor) -> None:
            said.append("once")
            handle.remove()
            held[names[0]].register_hook(lambda _: said.append("added"))

        handle = held[names[0]].register_hook(once)
        pipeline.step(*data)
        assert len(seen) == len(names) and len(first) == 1 and said == ["once", "end"]
        errors = [reference.worst({name: one}, {name: wanted[name]})[0] for name, one in zip(names, seen, strict=True)]
        assert max(errors) <= 1e-10
        pipeline.zero_grad()
        pipeline.step(*data)
        assert len(seen) == 2 * len(names) and said == ["once", "end", "added", "end"]
        for one in handles:
            one.remove()
        held[names[-1]].requires_grad_(False)
        pipeline.zero_grad()
        if dist.get_rank() == 0:  # only its rows of the embedding, or a norm, may differ in flags
            said.clear()
        held[names[-1]].requires_grad_(True)
        pipeline.step(*data)
        assert len(seen) == 2 * len(names)
        error, name = reference.worst({name: one.grad for name, one in held.items()}, wanted)
        assert error <= 1e-10, name


@pytest.mark.parametrize("case", [Case("llama", schedule="zb-h1", mode="first-last"), TWO], ids=["one", "two"])
def test_hooks_of_a_backward(case: Case) -> None:
    run_processes(hooks_of_a_backward, case.processes, case)
