"""torch's clipping and some of its optimizers see one process: if that is not the whole model, they are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import run_processes
from test_gradients import described
from torch.nn import utils

from evenpipe import Pipeline
from evenpipe.errors import InputError

CALLS: dict[str, Callable[[Pipeline], object]] = {
    "clip_grad_norm_": lambda pipeline: utils.clip_grad_norm_(pipeline.parameters(), 1e-3),
    "of some": lambda pipeline: utils.clip_grad_norm_((one for one in pipeline.parameters() if one.dim() > 1), 1e-3),
    "of named ones": lambda pipeline: utils.clip_grad_norm_((one for _, one in pipeline.named_parameters()), 1e-3),
    "get_total_norm": lambda pipeline: utils.get_total_norm(one.grad for one in pipeline.parameters()),
}


def clip(call: str, **options: object) -> bool:
    """Whether torch's function may clip, and has."""
    pipeline = Pipeline(described(97, True, torch.float64), microbatches=1, self_check=False, **options)
    pipeline.step(torch.arange(12).view(2, 6))
    # a norm that is known, and element by element: right in any layout
    utils.clip_grads_with_norm_(pipeline.parameters(), 1.0, torch.tensor(pipeline.clip_gradients(float("inf"))))
    utils.clip_grad_value_(pipeline.parameters(), 1.0)
    before = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
    try:
        CALLS[call](pipeline)
    except InputError as error:
        assert "expected pipeline.clip_gradients(max_norm), which scales all by the norm of all" in str(error)
        assert all(torch.equal(parameter.grad, before[name]) for name, parameter in pipeline.named_parameters())
        return False
    return True


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.sampled(2)
def test_the_norm_of_one_process_is_refused(call: str) -> None:
    assert run_processes(clip, 2, call) == [False, False]


def sharded(call: str) -> bool:
    return clip(call, replicas=2, data_parallel="shard")


def replicated(call: str) -> bool:
    return clip(call, replicas=2)


def test_it_may_clip_where_a_process_holds_the_whole_model() -> None:
    assert run_processes(sharded, 2, "clip_grad_norm_") == [False, False]
    assert run_processes(replicated, 2, "clip_grad_norm_") == [True, True]
    assert run_processes(clip, 1, "clip_grad_norm_") == [True]


OPTIMIZERS: dict[str, Callable[[Pipeline], object]] = {
    "Adafactor": lambda pipeline: torch.optim.Adafactor(pipeline.parameters()),
    "Muon": lambda pipeline: torch.optim.Muon(one for one in pipeline.parameters() if one.dim() == 2),
}


def optimizer(kind: str, vocabulary: str) -> str:
    """Make an optimizer of torch; return the error, or nothing."""
    model = described(97, True, torch.float64)
    pipeline = Pipeline(model, microbatches=1, self_check=False, vocabulary=vocabulary)
    torch.optim.AdamW(pipeline.parameters())  # element by element
    try:
        OPTIMIZERS[kind](pipeline)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_of_whole_matrices_is_refused_where_rows_are_spread(kind: str) -> None:
    for error in run_processes(optimizer, 2, kind, "vocab-2"):
        assert error.startswith(f"torch.optim.{kind} would take the rows of model.embed_tokens.weight on this process")
        assert f"expected evenpipe.{kind}(pipeline, ...)" in error
    assert run_processes(optimizer, 2, kind, "first-last") == ["", ""]
