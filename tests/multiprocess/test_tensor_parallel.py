"""Tensor ranks: what several of them hold keeps the same bits, compiled layers, and what is refused.

Gradients, losses and trained weights of every family and layout are compared by tests/fuzz.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import check_cases, run_processes
from small_runs import Case, noisy, opened

from evenpipe import Pipeline
from evenpipe.errors import InputError

FAMILIES = ("llama", "qwen3", "phi3", "gemma2", "gpt2", "mixtral")
LAYOUTS = (
    Case("", tensor_ranks=2),
    Case("", tensor_ranks=4, schedule="zb-h1"),
    Case("", devices=2, tensor_ranks=2, schedule="zbv", checkpointing="selective"),
    Case("", replicas=2, tensor_ranks=2, data_parallel="shard", mode="first-last"),
)


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases for fault in differences_between_ranks(case)]


def differences_between_ranks(case: Case) -> list[str]:
    """Parameters that several tensor ranks of a device hold have the same bits on all of them after trained steps."""
    pipeline = opened(case)
    optimizer = reference.adamw(list(pipeline.parameters()))
    for ids, labels in reference.batches(61, 4 * case.replicas, 8, 2):
        pipeline.zero_grad()
        pipeline.step(case.part(pipeline.replica, ids), case.part(pipeline.replica, labels))
        optimizer.step()
    held = {}
    for number, shared in enumerate(pipeline._held.shared):
        part = tuple(str(box.whole) for box in shared.placement.boxes())  # not all of it: heads of keys and values
        held[pipeline.replica, pipeline.device, number, part] = shared.tensor.detach().tolist()
    pipeline.close()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    assert any(everywhere), case
    values = {key: value for of_rank in everywhere for key, value in of_rank.items()}
    return [
        f"{case}: {key} of process {rank}"
        for rank, of_rank in enumerate(everywhere)
        for key in of_rank
        if of_rank[key] != values[key]
    ]


def test_what_several_ranks_hold_keeps_the_same_bits(sample) -> None:
    cases = [Case(**vars(layout) | {"family": family}) for family, layout in itertools.product(FAMILIES, LAYOUTS)]
    check_cases(run_cases, sample(cases, 2))


def compiled() -> list[dict[str, torch.Tensor]]:
    pipeline = Pipeline(
        noisy("llama", torch.float32),
        schedule="zb-h1",
        microbatches=2,
        tensor_parallel=2,
        compile_layers=True,
        self_check=False,
    )
    gradients = []
    for ids, _ in reference.batches(61, 2, 8, 2):
        pipeline.zero_grad()
        pipeline.step(ids)
        gradients.append(pipeline.full_gradients())
    pipeline.close()
    return gradients


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients() -> None:
    model = noisy("llama", torch.float32)
    for gradients, (ids, _) in zip(run_processes(compiled, 2)[0], reference.batches(61, 2, 8, 2), strict=True):
        model.zero_grad()
        reference.loss_of(model, ids, ids).backward()
        error, name = reference.worst(gradients, {key: value.grad for key, value in model.named_parameters()})
        assert error < 1e-5, name


def bad_input() -> None:
    pipeline = Pipeline(noisy("llama", torch.float32), microbatches=1, tensor_parallel=2, self_check=False)
    says = r"7 tokens per sequence, expected a multiple of 2 \(2 tensor ranks\)|refused by"
    with pytest.raises(InputError, match=says):
        pipeline.step(torch.ones(1, 7, dtype=torch.int64))
    assert pipeline.step(torch.ones(1, 8, dtype=torch.int64)).loss > 0
    pipeline.close()
    with pytest.raises(InputError, match="tensor_parallel: plain modules do not say how they could be cut"):
        Pipeline.from_modules(
            torch.nn.Embedding(9, 8),
            [torch.nn.Linear(8, 8)],
            None,
            torch.nn.Linear(8, 9),
            microbatches=1,
            tensor_parallel=2,
        )


def test_bad_input_is_refused() -> None:
    run_processes(bad_input, 2)
