"""A batch of any size is evaluated as by transformers in one process: loss, and log-probabilities in row order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import reference
import torch
from families import tiny_config, whole_model
from harness import run_processes
from small_llama import described
from torch import Tensor

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.schedule.planning import MODES

FP64 = torch.float64
MICROBATCHES = 4
SIZES = {1: ((1,), (3,), (5,), (4,), (6,), (8,)), 2: ((1, 5), (6, 2), (4, 3))}
"""By the number of replicas, sequences of each: fewer than the microbatches, not a multiple of them, and multiples."""

LAYOUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, MODES),
    ({"schedule": "zbv"}, ("first-last", "vocab-2")),
    ({"schedule": "interleaved"}, ("first-last", "vocab-2")),
    ({"replicas": 2}, ("first-last", "vocab-2")),
    ({"replicas": 2, "data_parallel": "shard"}, ("first-last", "vocab-2")),
]
"""Options of a pipeline of two devices, and vocabulary modes."""


def padded(sequences: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, labels, mask): rows of several lengths, padded on the right; some labels count for nothing."""
    ((ids, labels),) = reference.batches(97, sequences, 7, 1, seed=seed)
    mask = torch.ones_like(ids)
    for row in range(1, sequences, 2):
        mask[row, 7 - row % 4 :] = 0
    return ids, labels.masked_fill(mask == 0, reference.IGNORE), mask


def log_probabilities_of(model, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """[sequences, tokens], at t that of the label at t + 1, 0 where none counts."""
    with torch.no_grad():
        every = torch.log_softmax(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, -1)
    targets = torch.full_like(labels, reference.IGNORE)
    targets[:, :-1] = labels[:, 1:]
    return torch.where(targets == reference.IGNORE, 0.0, every.gather(2, targets.clamp(min=0)[..., None]).squeeze(-1))


def any_size(options: dict[str, Any], modes: tuple[str, ...]) -> None:
    """Each replica evaluates a batch of its own; the loss is the mean over the labels of all of them."""
    options = {"microbatches": MICROBATCHES, "parameter_dtype": FP64, "self_check": False, **options}
    model = copy.deepcopy(described(97, True, FP64).model)
    for mode in modes:
        pipeline = Pipeline(described(97, True, FP64), vocabulary=mode, **options)
        for sizes in SIZES[pipeline.replicas]:
            batches = [padded(sequences, seed=10 * sequences + replica) for replica, sequences in enumerate(sizes)]
            ids, labels, mask = batches[pipeline.replica]
            result = pipeline.evaluate(*((ids, labels) if pipeline.device == 0 else (None, None)), attention_mask=mask)
            wanted = [log_probabilities_of(model, *batch) for batch in batches]
            valid = sum(int((labels[:, 1:] != reference.IGNORE).sum()) for _, labels, _ in batches)
            assert result.tokens == valid
            loss = -sum(float(one.sum()) for one in wanted) / max(valid, 1)
            assert result.loss == pytest.approx(loss, rel=1e-12), (mode, sizes)
            own = wanted[pipeline.replica]
            assert torch.allclose(result.log_probabilities, own, rtol=1e-12, atol=1e-12), (mode, sizes)
            if sizes == (5,):  # training in between
                pipeline.step(torch.zeros(MICROBATCHES, 3, dtype=torch.int64))
        pipeline.close()


@pytest.mark.parametrize(("options", "modes"), LAYOUTS)
@pytest.mark.sampled(1)
def test_a_batch_of_any_size_is_evaluated(options: dict[str, Any], modes: tuple[str, ...]) -> None:
    run_processes(any_size, 2 * options.get("replicas", 1), options, modes)


def routers() -> None:
    """One sequence is one microbatch, whose routers' loss is that of transformers on it."""
    config = tiny_config("mixtral", num_hidden_layers=2, vocab_size=131)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    described_experts = describe(whole_model(config, FP64))
    model = copy.deepcopy(described_experts.model)
    pipeline = Pipeline(described_experts, microbatches=MICROBATCHES, parameter_dtype=FP64, self_check=False)
    ids = torch.randint(0, 131, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    result = pipeline.evaluate(ids)
    assert result.router_loss > 0
    assert result.loss == pytest.approx(wanted, rel=1e-8)  # routers count in fp32, as in test_experts
    pipeline.close()


def test_the_routers_of_a_single_sequence() -> None:
    run_processes(routers, 2)
