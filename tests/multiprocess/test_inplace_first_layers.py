"""Layers that change their input in place: in every layout as in one process, where autograd allows it there."""

from __future__ import annotations

import pytest
import torch
from harness import check_cases, run_processes
from patched_layers import Case, batch, faults_of_cases, one_process, patched, pipeline_of
from torch.utils.checkpoint import checkpoint

from evenpipe import OffloadOptions
from evenpipe.errors import InputError


def add(run, hidden, weight):
    hidden.add_(weight)
    return run(hidden)


def assign(run, hidden, weight):
    hidden[..., 1:3] = weight[1:3] * 2
    return run(hidden)


def through_a_view(run, hidden, weight):
    hidden.view(-1, hidden.shape[-1])[:, ::2].mul_(0.5).sub_(0.1)
    return run(hidden)


def without_grad(run, hidden, weight):
    with torch.no_grad():
        hidden.mul_(0.5)
    return run(hidden)


BEHAVIOURS = {
    "run": lambda run, hidden, weight: run(hidden),
    "skip": lambda run, hidden, weight: hidden,
    "add": add,
    "assign": assign,
    "view": through_a_view,
    "no_grad": without_grad,
    "scale": lambda run, hidden, weight: hidden.mul_(2),  # returns its input, and saves nothing
}


def at(place: int, kind: str) -> tuple[str, ...]:
    return tuple(kind if index == place else "run" for index in range(4))


KINDS = ("add", "assign", "view", "no_grad", "scale")
ALL, SECOND = ("add",) * 4, ("run", "run", "assign", "run")
HOST = OffloadOptions(activations="all")

ONE = [Case(at(place, kind), 1) for kind in KINDS for place in (0, 2)]
TWO = [
    *(Case((kind,) * 4) for kind in KINDS),
    *(
        Case(layers, options=options)
        for layers, options in [
            (at(2, "scale"), {"schedule": "dualpipe-v"}),
            (at(2, "scale"), {"schedule": "interleaved", "recompute": True}),
            (at(2, "add"), {"schedule": "zb-h1", "recompute": True}),
            # A stage that returns its input, which R needs, to a stage of the same device that changes it.
            (("run", "skip", "add", "run"), {"schedule": "zbv", "recompute": True}),
            (ALL, {"slices": 2}),
            (ALL, {"slices": 2, "schedule": "zbv", "recompute": True}),
            (SECOND, {"offload": HOST}),
            (ALL, {"offload": HOST, "schedule": "zbv", "recompute": True}),
            (ALL, {"compile_layers": True, "schedule": "zbv"}),
            (ALL, {"vocabulary": "first-last"}),
            (SECOND, {"vocabulary": "redistribute", "recompute": True}),
            (ALL, {"vocabulary": "vocab-1", "tied": True, "self_check": True}),
            (ALL, {"layers_per_stage": [0, 4], "recompute": True}),
            (SECOND, {"layers_per_stage": [4, 0]}),
            (at(2, "add"), {"checkpointing": ["full", "full", "none", "selective"], "schedule": "zbv"}),
            (at(2, "scale"), {"checkpointing": "full"}),  # nothing is computed from its input again
        ]
    ),
]
FOUR = [
    Case(layers, 4, options=options)
    for layers, options in [
        (ALL, {"tensor_parallel": 2}),
        (SECOND, {"tensor_parallel": 2, "recompute": True, "self_check": True}),
        (ALL, {"tensor_parallel": 2, "tensor_overlap": "ring", "schedule": "zb-h1"}),
        (SECOND, {"context_parallel": 2, "recompute": True}),
        (ALL, {"replicas": 2, "data_parallel": "shard"}),
    ]
]


def faults(cases: list[Case]) -> list[str]:
    return faults_of_cases(cases, BEHAVIOURS)


@pytest.mark.parametrize("cases", [ONE, TWO, FOUR], ids=["one", "two", "four"])
def test_gradients_are_those_of_one_process(cases: list[Case], sample) -> None:
    check_cases(faults, sample(cases, 2))


# --- where a forward is repeated --------------------------------------------------------------------------------------


def repeated(kind: str):
    """The same inside of torch's own checkpointing."""
    return lambda run, hidden, weight: checkpoint(BEHAVIOURS[kind], run, hidden, weight, use_reentrant=False)


def checkpointed(kind: str, choice: str) -> None:
    case = Case(at(0, kind), 1, options={"checkpointing": choice})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        one_process(case, BEHAVIOURS | {kind: repeated(kind)}, 2)
    with patched(case.layers, BEHAVIOURS), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipeline_of(case, BEHAVIOURS, 2).step(batch(2)[0])


@pytest.mark.parametrize(("kind", "choice"), [("add", "full"), ("assign", "selective"), ("no_grad", "full")])
def test_checkpointing_refuses_what_that_of_torch_refuses(kind: str, choice: str) -> None:
    run_processes(checkpointed, 1, kind, choice)


def without_gradient() -> None:
    """Autograd does not look after an input that has no gradient."""
    case = Case(("below", "add", "run", "run"), 1, options={"checkpointing": "full"})
    behaviours = BEHAVIOURS | {"below": lambda run, hidden, weight: run(hidden).detach()}
    with patched(case.layers, behaviours), pytest.raises(RuntimeError, match=r"of a checkpointed layer .* in place"):
        pipeline_of(case, behaviours, 2).step(batch(2)[0])


def test_checkpointing_refuses_a_changed_input_without_a_gradient() -> None:
    run_processes(without_gradient, 1)


def sometimes() -> None:
    case = Case(at(0, "add?"), 1, options={"recompute": True})
    ids, labels, positions = batch(2)
    with patched(case.layers, BEHAVIOURS):
        pipeline = pipeline_of(case, BEHAVIOURS, 2)
        with pytest.raises(InputError, match=r"^schedule: 0F1 changes its input in place, which R needs again"):
            pipeline.step(ids, labels, position_ids=positions)


def test_recomputation_refuses_layers_that_begin_to_change_their_input() -> None:
    run_processes(sometimes, 1)
