"""Mixtures of experts trained in stages give the loss, gradients and weights of transformers in one process.

Four families x devices x schedules (fused and split backward, one and two stages per device) x vocabulary modes, with
the routers' loss and without it. The judge runs transformers on every microbatch, whose aux_loss is its own.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from families import PROMISED_EXPERTS, tiny_config, whole_model
from harness import run_processes
from transformers import AutoModelForCausalLM

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.schedule import add_recompute, plan_order

STEPS, TOKENS, MICROBATCHES = 3, 7, 4
SCHEDULES, MODES = ("1f1b", "zb-h1", "zbv"), ("first-last", "vocab-2")
LARGE = 0.5  # coefficient of the routers' loss: far above what transformers takes, so that a wrong one is seen


@dataclass(frozen=True)
class Case:
    schedule: str
    mode: str
    router: bool
    masked: bool = False
    checkpointing: str = "none"
    recomputed: bool = False
    data_parallel: str | None = None
    """Of two replicas, each with half of the data."""
    members: int = 1
    """Replicas that share experts."""

    def order(self) -> Any:
        if not self.recomputed:
            return self.schedule
        return lambda devices, microbatches: add_recompute(plan_order(self.schedule, devices, microbatches, self.mode))


CASES = {
    2: [
        *(Case(schedule, mode, True) for schedule, mode in itertools.product(SCHEDULES, MODES)),
        Case("1f1b", "vocab-2", False),
        Case("zbv", "first-last", False),
    ],
    3: [
        Case("1f1b", "first-last", True),
        Case("zb-h1", "vocab-2", True),
        Case("zbv", "first-last", False),
        Case("zbv", "vocab-2", True),
    ],
}
OTHERS = [
    Case("zb-h1", "vocab-2", True, masked=True),
    Case("1f1b", "first-last", True, masked=True),
    Case("1f1b", "vocab-1", True, checkpointing="full"),
    Case("zbv", "vocab-2", True, checkpointing="selective"),
    Case("zb-h1", "vocab-2", True, recomputed=True),
]
MEMBERS = [
    Case("1f1b", "first-last", True, data_parallel="replicate", members=2),
    Case("zb-h1", "vocab-2", True, data_parallel="replicate", members=2, masked=True),
    Case("zbv", "vocab-1", True, data_parallel="shard", members=2),
    Case("1f1b", "vocab-2", True, data_parallel="replicate", members=2, checkpointing="full"),
    Case("zbv", "vocab-2", True, data_parallel="replicate", members=2, checkpointing="selective"),
    Case("zb-h1", "vocab-2", True, data_parallel="shard", members=2, recomputed=True),
]
REPLICAS = [
    Case("zb-h1", "vocab-2", True, data_parallel="replicate"),
    Case("1f1b", "first-last", True, data_parallel="replicate"),
    Case("zbv", "vocab-2", True, data_parallel="shard"),
]


@cache
def described(family: str, layers: int, router: bool, dtype: torch.dtype = torch.float64):
    config = tiny_config(family, num_hidden_layers=layers, hidden_size=32, intermediate_size=40, vocab_size=131)
    if router:
        config.output_router_logits, config.router_aux_loss_coef = True, LARGE
    return describe(whole_model(config, dtype))


def data_of(masked: bool) -> list:
    """(ids, labels, mask) of each step; masked ones are padded on the right, one sequence more than the other."""
    result = []
    for ids, labels in reference.batches(131, MICROBATCHES, TOKENS, STEPS):
        mask = None
        if masked:
            mask = torch.ones_like(ids)
            mask[1, -2:] = mask[2, -4:] = 0
            labels = labels.masked_fill(mask == 0, reference.IGNORE)
        result.append((ids, labels, mask))
    return result


def loss_of(model, coefficient: float, ids, labels, mask) -> torch.Tensor:
    """Mean over the valid tokens of the batch, and over the microbatches of what their routers add."""
    valid = (labels[:, 1:] != reference.IGNORE).sum()
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(MICROBATCHES):
        part = slice(index, index + 1)
        output = model(
            input_ids=ids[part], attention_mask=None if mask is None else mask[part], use_cache=False, return_dict=True
        )
        logits = output.logits[:, :-1].flatten(0, 1)
        loss = (
            loss
            + torch.nn.functional.cross_entropy(
                logits, labels[part, 1:].flatten(), ignore_index=reference.IGNORE, reduction="sum"
            )
            / valid
        )
        if coefficient:
            loss = loss + coefficient * output.aux_loss / MICROBATCHES
    return loss


@cache
def expected(family: str, layers: int, router: bool, masked: bool) -> reference.Reference:
    model = copy.deepcopy(described(family, layers, router).model)
    optimizer = reference.adamw(model.parameters())
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for batch in data_of(masked):
        optimizer.zero_grad()
        loss = loss_of(model, LARGE if router else 0.0, *batch)
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return reference.Reference(losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()})


def run_case(family: str, layers: int, case: Case) -> str | None:
    """What is wrong, on the first process."""
    replicas = 1 if case.data_parallel is None else 2
    pipeline = Pipeline(
        described(family, layers, case.router),
        schedule=case.order(),
        vocabulary=case.mode,
        microbatches=MICROBATCHES // replicas,
        parameter_dtype=torch.float64,
        checkpointing=case.checkpointing,
        replicas=replicas,
        data_parallel=case.data_parallel or "replicate",
        expert_parallel=case.members,
        self_check=False,
    )
    own = slice(pipeline.replica * MICROBATCHES // replicas, (pipeline.replica + 1) * MICROBATCHES // replicas)
    optimizer = reference.adamw(list(pipeline.parameters()))
    losses, gradients = [], {}
    for number, (ids, labels, mask) in enumerate(data_of(case.masked)):
        pipeline.zero_grad()
        given = (ids[own], labels[own]), {"attention_mask": None if mask is None else mask[own]}
        evaluated = pipeline.evaluate(*given[0], **given[1]).loss if number == 0 else None
        result = pipeline.step(*given[0], **given[1])
        assert evaluated is None or abs(evaluated / result.loss - 1) < 1e-12, "nothing is random in these families"
        losses.append(result.loss)
        assert (result.router_loss > 0) == case.router
        if number == 0:
            gradients = pipeline.full_gradients()
        optimizer.step()
    weights = pipeline.full_state_dict()
    pipeline.close()
    if pipeline.device or pipeline.replica:
        return None
    wanted = expected(family, layers, case.router, case.masked)
    gradient, name = reference.worst(gradients, wanted.gradients)
    weight, other = reference.worst(weights, wanted.weights)
    loss = max(abs(found / given - 1) for found, given in zip(losses, wanted.losses, strict=True))
    figures = f"{family} {case}: loss {loss:.1e}, gradient {gradient:.1e} ({name}), weights {weight:.1e} ({other})"
    print(figures)
    sound = gradient <= 1e-10 and weight <= 1e-8 and loss <= 1e-8
    return None if sound else figures


def run_family(family: str, layers: int, cases: list[Case]) -> list[str]:
    torch.manual_seed(0)
    return [fault for case in cases if (fault := run_case(family, layers, case)) is not None]


@pytest.mark.parametrize("family", PROMISED_EXPERTS)
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.sampled(4)
def test_experts_train_as_in_one_process(family: str, processes: int, sample) -> None:
    cases = sample(CASES[processes], 2)
    faults = run_processes(run_family, processes, family, 2 * processes, cases)[0]
    assert not faults, "\n".join(faults)


def test_replicas_share_the_mean_over_all_microbatches() -> None:
    faults = run_processes(run_family, 4, "mixtral", 4, REPLICAS)[0]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("family", PROMISED_EXPERTS)
def test_members_of_a_group(family) -> None:
    faults = run_processes(run_family, 4, family, 4, MEMBERS)[0]
    assert not faults, "\n".join(faults)


def from_a_folder(folder: str) -> list[str]:
    """Loaded from transformers' folder, trained a step, and written again."""
    faults = []
    for family in [*PROMISED_EXPERTS[:3], "deepseek_v3"]:
        model = whole_model(tiny_config(family), torch.float32)
        given, written = f"{folder}/{family}", f"{folder}/{family}-trained"
        if dist.get_rank() == 0:
            model.save_pretrained(given)
        dist.barrier()
        pipeline = Pipeline(given, schedule="zbv", microbatches=2, self_check=False)
        ids, labels = reference.batches(503, 2, TOKENS, 1)[0]
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        loss = pipeline.step(ids, labels).loss
        optimizer.step()
        pipeline.save_pretrained(written)
        pipeline.close()
        if dist.get_rank():
            continue
        model.config._experts_implementation = "grouped_mm"  # the default, which the pipeline has taken
        expected = reference.loss_of(model.train(), ids, labels)
        expected.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        read, report = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
        if any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            faults.append(f"{family}: {report}")
        state = model.state_dict()
        worst, name = reference.worst({key: value.detach() for key, value in read.state_dict().items()}, state)
        if not (worst < 1e-6 and abs(loss / expected.item() - 1) < 1e-6):
            faults.append(f"{family}: {name} {worst:.1e}, loss {loss} and {expected.item()}")
    return faults


def test_from_a_folder_to_a_folder_through_a_step(tmp_path) -> None:
    assert run_processes(from_a_folder, 2, str(tmp_path))[0] == []


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.sampled(1)
def test_masks_and_recomputation(family: str, sample) -> None:
    faults = run_processes(run_family, 2, family, 4, sample(OTHERS, 3))[0]
    assert not faults, "\n".join(faults)
