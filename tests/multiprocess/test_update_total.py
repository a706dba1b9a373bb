"""Steps of one update whose numbers of labels differ: with `total_tokens` their gradients, added up, and their losses
are those of the mean over all labels of the update, as transformers has them in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import check_cases, run_processes
from test_experts import LARGE
from test_experts import described as with_experts
from test_gradients import described as llama
from torch import Tensor

from evenpipe import LossOptions, Pipeline
from evenpipe.errors import InputError

VOCABULARY, SEQUENCES, TOKENS, MICROBATCHES = 97, 4, 16, 2
IGNORE = reference.IGNORE
FP64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A layout, and what the update consists of."""

    data: str = "labels"
    mode: str = "vocab-2"
    schedule: str = "1f1b"
    tied: bool = False
    experts: bool = False
    processes: int = 2
    replicas: int = 1
    loss: LossOptions = field(default_factory=LossOptions)
    other: tuple[tuple[str, Any], ...] = ()
    """Options of the pipeline."""

    def options(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "vocabulary": self.mode,
            "replicas": self.replicas,
            "loss": self.loss,
            "microbatches": MICROBATCHES if self.replicas == 1 else 1,
            **dict(self.other),
        }

    def model(self) -> Any:
        return with_experts("mixtral", 4, True) if self.experts else llama(VOCABULARY, self.tied, FP64)


CASES = [
    Case(),
    Case(mode="first-last", schedule="zbv", tied=True),
    Case(mode="vocab-1", schedule="zb-h1"),
    Case(mode="interlaced", tied=True),
    Case(mode="redistribute", processes=3),
    Case(processes=1, other=(("checkpointing", "full"),)),
    Case(replicas=2),
    Case(replicas=2, processes=4, mode="first-last", schedule="zb-h1"),
    Case(replicas=2, other=(("data_parallel", "shard"),)),
    Case(other=(("tensor_parallel", 2),)),
    Case(other=(("context_parallel", 2),)),
    Case(other=(("slices", 2),)),
    Case(loss=LossOptions(z_loss=0.05, label_smoothing=0.1)),
    Case("weights"),
    Case("weights", replicas=2, mode="first-last", loss=LossOptions(z_loss=0.05)),
    Case("padding", schedule="zbv"),
    Case("padding", replicas=2),
    Case("documents", other=(("documents", "separate"),)),
    Case(experts=True),
    Case("padding", experts=True, replicas=2, mode="first-last"),
    Case(experts=True, schedule="zbv", loss=LossOptions(label_smoothing=0.1)),
]


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


def losses_of(case: Case, model: Any) -> Iterator[Tensor]:
    """By transformers, each step's share of the loss of the update: the mean over all labels that count, and over the
    steps of what routers add in each microbatch."""
    targets = []
    for batch in update(case.data):
        labels = batch.get("labels", batch["input_ids"]).clone()
        if "attention_mask" in batch:
            labels[batch["attention_mask"] == 0] = IGNORE
        if "position_ids" in batch:
            labels[batch["position_ids"] == 0] = IGNORE
        targets.append(labels[:, 1:])
    shares = [(labels != IGNORE).to(FP64) for labels in targets]
    if case.data == "weights":
        shares = [batch["token_weights"][:, 1:] for batch in update(case.data)]
    total = sum(share.sum() for share in shares)
    microbatch = SEQUENCES // MICROBATCHES
    for batch, labels, share in zip(update(case.data), targets, shares, strict=True):
        loss = torch.zeros((), dtype=FP64)
        for start in range(0, SEQUENCES, microbatch):
            rows = slice(start, start + microbatch)
            inputs = {name: batch[name][rows] for name in ("attention_mask", "position_ids") if name in batch}
            output = model(input_ids=batch["input_ids"][rows], use_cache=False, return_dict=True, **inputs)
            logits = output.logits[:, :-1]
            by_token = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1),
                labels[rows].flatten(),
                reduction="none",
                label_smoothing=case.loss.label_smoothing,
            )
            counts = labels[rows].flatten() != IGNORE
            by_token = by_token + case.loss.z_loss * logits.flatten(0, 1).logsumexp(-1).square() * counts
            loss = loss + (by_token * share[rows].flatten()).sum() / total
            if case.experts:
                loss = loss + LARGE * output.aux_loss.double() / (MICROBATCHES * len(targets))
        yield loss


@cache
def expected(case: Case) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses of the steps, gradients of the update, and their norm."""
    model = copy.deepcopy(case.model().model)
    losses = []
    for loss in losses_of(case, model):
        loss.backward()
        losses.append(loss.item())
    norm = float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))
    return losses, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, norm


def run_case(case: Case) -> str | None:
    """What is wrong, on the first process."""
    pipeline = Pipeline(case.model(), parameter_dtype=FP64, self_check=False, **case.options())
    rows = SEQUENCES // case.replicas
    mine = slice(pipeline.replica * rows, (pipeline.replica + 1) * rows)
    nothing = [{"input_ids": None}] * 3
    batches = [{name: tensor[mine] for name, tensor in batch.items()} for batch in update(case.data)]
    batches = batches if pipeline.feeds else nothing
    total = sum(pipeline.count_labels(**batch) for batch in batches)
    steps = {"accumulate": len(batches)} if case.experts else {}
    results = [pipeline.step(**batch, total_tokens=total, **steps) for batch in batches]
    losses = [result.loss for result in results]
    gradients, norm = pipeline.full_gradients(), pipeline.clip_gradients(float("inf"))
    pipeline.close()
    if dist.is_initialized() and dist.get_rank():
        return None
    wanted, wanted_gradients, wanted_norm = expected(case)
    error, name = reference.worst(gradients, wanted_gradients)
    loss_error = max(abs(mine - theirs) for mine, theirs in zip(losses, wanted, strict=True))
    sound = error <= 1e-10 and loss_error <= 1e-10 and abs(norm - wanted_norm) <= 1e-10 * wanted_norm
    return None if sound else f"{case}: gradient {error:.1e} ({name}), losses {losses} for {wanted}, {norm:.4f}"


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases if (fault := run_case(case)) is not None]


def test_every_label_of_an_update_counts_equally(sample) -> None:
    check_cases(run_cases, sample(CASES, 8))


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
    found = []
    for data in ("labels", "weights", "padding") if documents == "joined" else ("documents",):
        for batch in update(data):
            mine = {name: tensor[rows] for name, tensor in batch.items()} if pipeline.feeds else {"input_ids": None}
            found.append(pipeline.count_labels(**mine))
    return found


def test_labels_are_counted_as_steps_count_them() -> None:
    """On every process, over all replicas, whose batches may be smaller than a step's."""
    weights = [float(batch["token_weights"][:, 1:].sum()) for batch in update("weights")]
    padded = [float(batch["attention_mask"][:, 1:].sum()) for batch in update("padding")]
    for found in run_processes(counts, 4, "joined"):
        assert found == pytest.approx([1, 60, 0, *weights, *padded], rel=1e-12)
    for found in run_processes(counts, 4, "separate"):
        assert found == [1, 4 * 14, 0]


def refusals(cases: list[tuple[Any, ...]]) -> list[str]:
    """What each process says to a total by replica, and to a number of steps."""
    pipelines = [
        Pipeline(model, microbatches=1, replicas=2, parameter_dtype=FP64, self_check=False)
        for model in (llama(VOCABULARY, False, FP64), with_experts("mixtral", 4, True))
    ]
    said = []
    for experts, totals, accumulate in cases:
        pipeline = pipelines[experts]
        batch = update("labels")[1]["input_ids"][pipeline.replica :: 2]
        with pytest.raises(InputError) as caught:
            pipeline.step(batch, total_tokens=totals[pipeline.replica], accumulate=accumulate)
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        said.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        pipelines[0].count_labels(batch if pipelines[0].replica else batch.float())
    return [*said, str(caught.value)]


EXPECTED = "expected the number of labels that all steps of the update count"
OF_ALL = "expected the number of all steps of the update, over all replicas"
REFUSED = [
    (False, ("60", 60), None, f"total_tokens: '60', {EXPECTED}"),
    (False, (-1, -1), None, f"total_tokens: -1, {EXPECTED}"),
    (False, (True, True), None, f"total_tokens: True, {EXPECTED}"),
    (False, (float("nan"), 1), None, f"total_tokens: nan, {EXPECTED}"),
    (False, (torch.ones(2), 1), None, f"total_tokens: tensor([1., 1.]), {EXPECTED}"),
    (False, (59, 59), None, f"total_tokens: 59, but this step alone counts 60, {OF_ALL}"),
    (False, (0, torch.tensor(0)), None, f"total_tokens: 0, but this step alone counts 60, {OF_ALL}"),
    (
        False,
        (60, 61),
        None,
        "total_tokens: [60.0, 61.0] by replica, expected in all of them that of all replicas together",
    ),
    (False, (60, None), None, "total_tokens: [60.0, None] by replica"),
    (True, (60, 60), None, "total_tokens: 60 without accumulate, but the routers of MixtralForCausalLM add a loss"),
]


def test_totals_that_cannot_be_are_refused_on_every_process() -> None:
    first, second = run_processes(refusals, 2, [case[:-1] for case in REFUSED])
    for sentence, (*_, words) in zip(first, REFUSED, strict=False):
        assert sentence.startswith(words)
    elsewhere = "input_ids: refused by the first process of another pipeline; see its error"
    for sentence, said_first in zip(second[:-1], first, strict=False):
        assert sentence in (said_first, elsewhere)
    assert first[-1] == "input_ids: [2, 16] torch.float32, expected [batch, sequence] torch.int64, not empty"
    assert second[-1] == "input_ids: refused by the first process of a pipeline; see its error"
