"""torch's clipping and some of its optimizers see one process: if that is not the whole model, they are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import run_processes
from small_llama import described
from torch.nn import utils

from evenpipe import Pipeline
from evenpipe.errors import InputError

CLIPPING: dict[str, Callable[[Pipeline], object]] = {
    "clip_grad_norm_": lambda pipeline: utils.clip_grad_norm_(pipeline.parameters(), 1e-3),
    "of some": lambda pipeline: utils.clip_grad_norm_((one for one in pipeline.parameters() if one.dim() > 1), 1e-3),
    "of named ones": lambda pipeline: utils.clip_grad_norm_((one for _, one in pipeline.named_parameters()), 1e-3),
    "get_total_norm": lambda pipeline: utils.get_total_norm(one.grad for one in pipeline.parameters()),
}
OPTIMIZERS: dict[str, Callable[[Pipeline], object]] = {
    "Adafactor": lambda pipeline: torch.optim.Adafactor(pipeline.parameters()),
    "Muon": lambda pipeline: torch.optim.Muon(one for one in pipeline.parameters() if one.dim() == 2),
}
BY_ALL = "expected pipeline.clip_gradients(max_norm), which scales all by the norm of all"


def clipping(options: dict[str, object]) -> list[bool]:
    """Of every call, whether torch may clip; where it may not, gradients stay as they are."""
    pipeline = Pipeline(described(97, True, torch.float64), microbatches=1, self_check=False, **options)
    allowed = []
    for call in CLIPPING.values():
        pipeline.step(torch.arange(12).view(2, 6))
        # a norm that is known, and element by element: right in any layout
        utils.clip_grads_with_norm_(pipeline.parameters(), 1.0, torch.tensor(pipeline.clip_gradients(float("inf"))))
        utils.clip_grad_value_(pipeline.parameters(), 1.0)
        before = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
        try:
            call(pipeline)
            allowed.append(True)
        except InputError as error:
            assert BY_ALL in str(error)
            assert all(torch.equal(parameter.grad, before[name]) for name, parameter in pipeline.named_parameters())
            allowed.append(False)
    return allowed


@pytest.mark.parametrize(
    ("processes", "options", "allowed"),
    [
        (2, {}, False),
        (2, {"replicas": 2, "data_parallel": "shard"}, False),
        (2, {"replicas": 2}, True),
        (1, {}, True),
    ],
)
@pytest.mark.sampled(2)
def test_torch_may_clip_only_where_a_process_holds_the_whole_model(processes, options, allowed) -> None:
    assert run_processes(clipping, processes, options) == [[allowed] * len(CLIPPING)] * processes


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
@pytest.mark.sampled(1)
def test_an_optimizer_of_whole_matrices_is_refused_where_rows_are_spread(kind: str) -> None:
    for error in run_processes(optimizer, 2, kind, "vocab-2"):
        assert error.startswith(f"torch.optim.{kind} would take the rows of model.embed_tokens.weight on this process")
        assert f"expected evenpipe.{kind}(pipeline, ...)" in error
    assert run_processes(optimizer, 2, kind, "first-last") == ["", ""]
