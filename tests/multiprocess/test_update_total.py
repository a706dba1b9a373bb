"""Several steps of one update: how many labels they count together, and which totals and numbers of steps are refused.

Gradients and losses of such steps are compared by tests/fuzz.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import reference
import torch
from harness import run_processes
from small_llama import described as llama
from small_runs import described as of_family
from torch import Tensor

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model import Description, describe

VOCABULARY, SEQUENCES, TOKENS = 97, 4, 16
IGNORE, FP64 = reference.IGNORE, torch.float64


@cache
def update(data: str) -> list[dict[str, Tensor]]:
    """The batches of an update: with 1 label that counts, with 60, and with none; or of weights, padding, documents."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, VOCABULARY, (SEQUENCES, TOKENS), generator=generator) for _ in range(3)]
    labels = [torch.full_like(ids[0], IGNORE), ids[1].clone(), torch.full_like(ids[2], IGNORE)]
    labels[0][-1, 5] = ids[0][-1, 5]
    batches = [{"input_ids": rows, "labels": targets} for rows, targets in zip(ids, labels, strict=True)]
    if data == "weights":
        for number, batch in enumerate(batches):
            batch["labels"] = batch["input_ids"]
            batch["token_weights"] = torch.rand(SEQUENCES, TOKENS, generator=generator, dtype=FP64) * 10.0**-number
    elif data == "padding":  # labels by default: those of what is not padding
        for number, batch in enumerate(batches):
            del batch["labels"]
            lengths = torch.tensor([TOKENS, 3 + 2 * number, 2, TOKENS - 5 * number])
            batch["attention_mask"] = (torch.arange(TOKENS) < lengths[:, None]).long()
    elif data == "documents":  # a row of several, whose first tokens are not predicted
        for number, batch in enumerate(batches):
            batch["position_ids"] = (torch.arange(TOKENS) % (TOKENS // (number + 1))).expand(SEQUENCES, -1).contiguous()
    return batches


def counts(documents: str) -> list[float]:
    pipeline = Pipeline(
        llama(VOCABULARY, False, FP64),
        microbatches=2,
        replicas=2,
        documents=documents,
        parameter_dtype=FP64,
        self_check=False,
    )
    rows = slice(pipeline.replica, None, 2)
    counted = []
    for data in ("labels", "weights", "padding") if documents == "joined" else ("documents",):
        for batch in update(data):
            own = {name: tensor[rows] for name, tensor in batch.items()} if pipeline.feeds else {"input_ids": None}
            counted.append(pipeline.count_labels(**own))
    return counted


def test_labels_are_counted_as_steps_count_them() -> None:
    """On every process, over all replicas, whose batches may be smaller than a step's."""
    weights = [float(batch["token_weights"][:, 1:].sum()) for batch in update("weights")]
    padded = [float(batch["attention_mask"][:, 1:].sum()) for batch in update("padding")]
    for counted in run_processes(counts, 4, "joined"):
        assert counted == pytest.approx([1, 60, 0, *weights, *padded], rel=1e-12)
    for counted in run_processes(counts, 4, "separate"):
        assert counted == [1, 4 * 14, 0]


def with_router_loss() -> Description:
    model = of_family("mixtral").model
    model.config.output_router_logits = True
    return describe(model)


def refusals(cases: list[tuple[Any, ...]]) -> list[str]:
    """What each process says to a total and a number of steps by replica, with and without routers."""
    pipelines = [
        Pipeline(model, microbatches=1, replicas=2, parameter_dtype=FP64, self_check=False)
        for model in (llama(VOCABULARY, False, FP64), with_router_loss())
    ]
    said = []
    for experts, totals, steps in cases:
        pipeline = pipelines[experts]
        batch = update("labels")[1]["input_ids"][pipeline.replica :: 2] % 61
        with pytest.raises(InputError) as caught:
            pipeline.step(batch, total_tokens=totals[pipeline.replica], accumulate=steps[pipeline.replica])
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        said.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        pipelines[0].count_labels(batch if pipelines[0].replica else batch.float())
    return [*said, str(caught.value)]


EXPECTED = "expected the number of labels that all steps of the update count"
OF_ALL = "expected the number of all steps of the update, over all replicas"
NOTHING = (None, None)
REFUSED = [
    (False, ("60", 60), NOTHING, f"total_tokens: '60', {EXPECTED}"),
    (False, (-1, -1), NOTHING, f"total_tokens: -1, {EXPECTED}"),
    (False, (True, True), NOTHING, f"total_tokens: True, {EXPECTED}"),
    (False, (float("nan"), 1), NOTHING, f"total_tokens: nan, {EXPECTED}"),
    (False, (torch.ones(2), 1), NOTHING, f"total_tokens: tensor([1., 1.]), {EXPECTED}"),
    (False, (59, 59), NOTHING, f"total_tokens: 59, but this step alone counts 60, {OF_ALL}"),
    (False, (0, torch.tensor(0)), NOTHING, f"total_tokens: 0, but this step alone counts 60, {OF_ALL}"),
    (False, (60, 61), NOTHING, "total_tokens: [60.0, 61.0] by replica, expected in all of them that of all replicas"),
    (False, (60, None), NOTHING, "total_tokens: [60.0, None] by replica"),
    (True, (60, 60), NOTHING, "total_tokens: 60 without accumulate, but the routers of MixtralForCausalLM add a loss"),
    *(
        (False, NOTHING, (steps, 2), f"accumulate: {steps!r}, expected a whole number of steps, 1 or more")
        for steps in (0, -1, 1.5, True, "2")
    ),
    (False, NOTHING, (4, 2), "accumulate: [4, 2] by replica, expected the same number of steps in all of them"),
]


def test_totals_and_numbers_of_steps_that_cannot_be_are_refused_on_every_process() -> None:
    first, second = run_processes(refusals, 2, [case[:-1] for case in REFUSED])
    for sentence, (*_, words) in zip(first, REFUSED, strict=False):
        assert sentence.startswith(words)
    elsewhere = "input_ids: refused by the first process of another pipeline; see its error"
    for sentence, said_first in zip(second[:-1], first, strict=False):
        assert sentence in (said_first, elsewhere)
    assert first[-1] == "input_ids: [2, 16] torch.float32, expected [batch, sequence] torch.int64, not empty"
    assert second[-1] == "input_ids: refused by the first process of a pipeline; see its error"
