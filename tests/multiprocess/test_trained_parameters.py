"""What processes say of a parameter has to agree: `requires_grad` and gradient hooks; and gradients in bf16 where the
former changes between steps.

Frozen, thawed and hooked parameters are compared with one process, in every layout, by tests/fuzz.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from small_runs import Case, described, opened
from torch import Tensor, nn

from evenpipe.errors import InputError
from evenpipe.model.fp64 import InFp64

TOKENS = 8
TWO = Case("llama", devices=2)
WHOLE = Case("llama", mode="first-last")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, MATRIX = "model.layers.3.input_layernorm.weight", "model.layers.3.mlp.up_proj.weight"


def batches(case: Case, replica: int, steps: int) -> list[list[Tensor]]:
    data = reference.batches(61, case.replicas * case.microbatches, TOKENS, steps)
    return [[case.part(replica, part) for part in batch] for batch in data]


def gradients(parameters: Iterator[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in parameters if one.grad is not None}


# --- processes that disagree -----------------------------------------------------------------------------

DISAGREEMENTS = [
    # layout, parameter, processes that freeze or hook it, who differs: their kind, or of what kind, which and from whom
    (replace(WHOLE, replicas=2), MATRIX, (1,), "replicas"),
    (replace(WHOLE, replicas=2, data_parallel="shard"), HEAD, (0,), "replicas"),
    (replace(TWO, mode="first-last", tied=True), EMBEDDING, (1,), "devices"),
    (TWO, EMBEDDING, (0,), "devices"),
    (TWO, HEAD, (1,), "devices"),
    (replace(TWO, replicas=2), MATRIX, (3,), "replicas"),
    (replace(TWO, replicas=2, data_parallel="shard"), MATRIX, (3,), "replicas"),
    (replace(TWO, replicas=2), EMBEDDING, (0, 1), "devices"),  # the first device of both replicas
    (replace(TWO, replicas=2), EMBEDDING, (1, 3), "replicas"),
    (replace(TWO, tensor_ranks=2), EMBEDDING, (0, 1), "devices"),
    (replace(WHOLE, tensor_ranks=2), NORM, (1,), ("tensor", 1, 0, 0)),
    (replace(WHOLE, tensor_ranks=2), MATRIX, (0,), ("tensor", 0, 1, 0)),
    (replace(TWO, tensor_ranks=2, tied=True), EMBEDDING, (2,), ("tensor", 0, 1, 1)),
    (replace(TWO, tensor_ranks=2), MATRIX, (2,), ("tensor", 0, 1, 1)),
    (replace(TWO, tensor_ranks=2), HEAD, (3,), ("tensor", 1, 0, 1)),
    # ranks of replicas: 0, 1 of the first one, and 2, 3
    (Case("llama", replicas=2, tensor_ranks=2), NORM, (0, 2), ("tensor", 0, 1, 0)),
    (Case("llama", replicas=2, tensor_ranks=2, data_parallel="shard"), NORM, (1,), "replicas"),
    (replace(WHOLE, context_ranks=2), NORM, (1,), ("context", 1, 0, 0)),
    (replace(TWO, context_ranks=2), MATRIX, (2,), ("context", 0, 1, 1)),
    # ranks of device 1: 4, 5 of the first context rank, and 6, 7
    (replace(TWO, tensor_ranks=2, context_ranks=2), NORM, (4, 5), ("context", 0, 1, 1)),
]


def sentence(name: str, kind: str, differ: str | tuple[str, int, int, int]) -> str:
    """A pattern."""
    if isinstance(differ, str):
        changed, unchanged, where = f"some {differ}", "others", ""
    else:
        axis, one, other, device = differ
        changed, unchanged, where = f"{axis} rank {one}", f"{axis} rank {other}", f" of device {device}"
    if kind == "hook":
        return rf"^{re.escape(name)}: {changed} and {unchanged}{where} have different gradient hooks; expected"
    on, off = (changed, unchanged) if isinstance(differ, str) else (unchanged, changed)
    return rf"^{re.escape(name)}: requires_grad is True on {on} and False on {off}{where}; expected the same"


def differs(case: Case, name: str, ranks: tuple[int, ...], kind: str, said: str) -> None:
    """Some processes freeze or hook a parameter: all refuse the step, and nothing has happened."""
    with InFp64(), contextlib.closing(opened(case)) as pipeline:
        first, second = batches(case, pipeline.replica, 2)
        held, called = dict(pipeline.named_parameters()).get(name), []
        pipeline.step(*first)
        before = gradients(pipeline.named_parameters())
        changes = held is not None and dist.get_rank() in ranks
        if changes and kind == "flag":
            held.requires_grad_(False)
        elif changes:
            held.register_hook(lambda _: called.append(name))
        for _ in range(2):
            with pytest.raises(InputError, match=said):
                pipeline.step(*second)
            now = gradients(pipeline.named_parameters())
            assert all(torch.equal(before[one], now[one]) for one in before | now)
        if changes and kind == "flag":
            held.requires_grad_()
        elif held is not None and not changes and kind == "hook":
            held.register_hook(lambda _: called.append(name))
        assert not called
        pipeline.step(*second)
        assert called == [name] * (held is not None and kind == "hook")
        found = pipeline.full_gradients()
        if dist.get_rank() == 0:
            model = copy.deepcopy(described(case.family, case.tied).model)
            for batch in reference.batches(61, case.replicas * case.microbatches, TOKENS, 2):
                reference.loss_of(model, *batch).backward()
            assert reference.worst(found, gradients(model.named_parameters()))[0] <= 1e-10


@pytest.mark.parametrize("kind", ["flag", "hook"])
@pytest.mark.parametrize(("case", "name", "ranks", "differ"), DISAGREEMENTS)
@pytest.mark.sampled(4)
def test_processes_that_disagree(
    case: Case, name: str, ranks: tuple[int, ...], differ: str | tuple[str, int, int, int], kind: str
) -> None:
    run_processes(differs, case.processes, case, name, ranks, kind, sentence(name, kind, differ))


# --- where copies compute in bf16 ------------------------------------------------------------------------

FROZEN = (r"embed|head|norm|layers\.2", "^$", r"layers\.([023]|1\.self)")
"""Names that match are frozen in this step."""


def follows_in_bf16(cases: list[Case]) -> None:
    """Gradients do not depend on what else is trained: bit for bit those of a pipeline that trains everything."""
    for case in cases:
        options = {"parameter_dtype": torch.float32, "compute_dtype": torch.bfloat16}
        whole, changing = (opened(case, **options) for _ in range(2))
        for batch, pattern in zip(batches(case, whole.replica, len(FROZEN)), FROZEN, strict=True):
            for name, parameter in changing.named_parameters():
                parameter.requires_grad_(not re.search(pattern, name))
            for pipeline in (whole, changing):
                pipeline.zero_grad()
                pipeline.step(*batch)
            wanted, found = (gradients(one.named_parameters()) for one in (whole, changing))
            assert found.keys() == {name for name in wanted if not re.search(pattern, name)}, f"{case} {pattern}"
            for name, gradient in found.items():
                assert gradient.dtype == torch.float32 and torch.equal(gradient, wanted[name]), f"{case} {name}"
        whole.close()
        changing.close()


@pytest.mark.parametrize(
    "cases",
    [
        [WHOLE, replace(WHOLE, schedule="zb-h1", tied=True)],
        [TWO, replace(TWO, schedule="zbv", tied=True)],
        [
            replace(TWO, replicas=2, data_parallel=kind, schedule=schedule)
            for kind in ("replicate", "shard")
            for schedule in ("1f1b", "zbv")
        ],
    ],
    ids=["one", "two", "four"],
)
@pytest.mark.slow
def test_in_bf16(cases: list[Case]) -> None:
    run_processes(follows_in_bf16, cases[0].processes, cases)
