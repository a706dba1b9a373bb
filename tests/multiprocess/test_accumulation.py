"""Several steps before the optimizer's: with `accumulate` their gradients are those of one step on all the data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import reference
import torch
from harness import run_processes
from test_experts import described as with_experts
from test_gradients import described, llama

from evenpipe import Pipeline
from evenpipe.errors import InputError

PARTS, MICROBATCHES, TOKENS, VOCABULARY = 3, 2, 6, 97


@dataclass(frozen=True)
class Case:
    mode: str
    tied: bool = False
    schedule: str = "1f1b"
    processes: int = 2
    replicas: int = 1
    data_parallel: str = "replicate"


CASES = [
    Case("vocab-2"),
    Case("first-last", tied=True),
    Case("vocab-1", schedule="zbv"),
    Case("vocab-2", replicas=2),
    Case("vocab-2", replicas=2, data_parallel="shard"),
]


@cache
def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of each part, as many labels in each: then a mean of means is the mean."""
    parts = reference.batches(VOCABULARY, 2 * MICROBATCHES, TOKENS, PARTS)
    return [(ids, ids.clone()) for ids, _ in parts]


def gradients(case: Case, experts: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the parts, and what is in the gradients after all of them."""
    description = with_experts("mixtral", 4, True) if experts else described(VOCABULARY, case.tied, torch.float64)
    pipeline = Pipeline(
        description,
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=MICROBATCHES,
        replicas=case.replicas,
        data_parallel=case.data_parallel,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    losses = []
    for ids, labels in data():
        own = slice(pipeline.replica, None, case.replicas)
        batch = (ids[own], labels[own]) if pipeline.device == 0 else (None, None)
        # the first process says how many, as it gives the data
        losses.append(pipeline.step(*batch, accumulate=PARTS if pipeline.device == 0 else 1).loss)
    return losses, pipeline.full_gradients()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(2)
def test_gradients_are_those_of_one_step_on_all_the_data(case: Case) -> None:
    model = copy.deepcopy(llama(VOCABULARY, case.tied, torch.float64))
    ids, labels = (torch.cat(parts) for parts in zip(*data(), strict=True))
    reference.loss_of(model, ids, labels).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    results = run_processes(gradients, case.processes, case, False)
    assert reference.worst(results[0][1], expected)[0] <= 1e-10
    with torch.no_grad():
        alone = [reference.loss_of(model, *part).item() for part in data()]
    for losses, _ in results:  # each of its own part, not divided
        assert losses == pytest.approx(alone, rel=1e-12)


def whole_with_experts() -> tuple[float, dict[str, torch.Tensor]]:
    """One step on all the data, in microbatches of the same size."""
    pipeline = Pipeline(
        with_experts("mixtral", 4, True),
        microbatches=PARTS * MICROBATCHES,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    ids, labels = (torch.cat(parts) for parts in zip(*data(), strict=True))
    return pipeline.step(ids, labels).loss, pipeline.full_gradients()


def test_the_loss_of_routers_is_divided_too() -> None:
    loss, expected = run_processes(whole_with_experts, 1)[0]
    losses, found = run_processes(gradients, 2, Case("vocab-2"), True)[0]
    assert reference.worst(found, expected)[0] <= 1e-10
    assert sum(losses) / PARTS == pytest.approx(loss, rel=1e-12)


def step_with(accumulate: object, replicas: int) -> str:
    pipeline = Pipeline(
        described(VOCABULARY, False, torch.float64),
        microbatches=1,
        replicas=replicas,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    ids = data()[0][0]
    with pytest.raises(InputError) as caught:
        pipeline.step(ids, accumulate=accumulate if pipeline.replica == 0 else 2)
    assert all(parameter.grad is None for parameter in pipeline.parameters())
    return str(caught.value)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
@pytest.mark.sampled(2)
def test_what_is_not_a_number_of_steps_is_refused(accumulate: object) -> None:
    texts = run_processes(step_with, 2, accumulate, 1)
    assert texts[0] == f"accumulate: {accumulate!r}, expected a whole number of steps, 1 or more"
    assert texts[1] == "input_ids: refused by the first process of the pipeline; see its error"


def test_replicas_agree_on_it() -> None:
    words = "accumulate: [4, 2] by replica, expected the same number of steps in all of them"
    assert run_processes(step_with, 2, 4, 2) == [words, words]
