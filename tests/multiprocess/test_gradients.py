"""Every layout gives the loss, the gradients and the trained weights of transformers in one process.

1 to 4 devices x m microbatches x five vocabulary modes x ragged and even vocabularies x tied and untied weights, with a
padding token in the data and labels that are ignored; three steps of AdamW.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from transformers import AutoModelForCausalLM, LlamaConfig

from evenpipe import Pipeline
from evenpipe.model import describe

MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
TOKENS = 6
STEPS = 3


@dataclass(frozen=True)
class Case:
    microbatches: int
    mode: str
    vocabulary: int
    tied: bool
    schedule: str = "1f1b"


def llama(vocabulary: int, tied: bool, dtype: torch.dtype, layers: int = 4):
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of ones hide errors
    return model


@cache
def described(vocabulary: int, tied: bool, dtype: torch.dtype):
    return describe(llama(vocabulary, tied, dtype))


@cache
def expected(vocabulary: int, tied: bool, dtype: torch.dtype, sequences: int):
    data = reference.batches(vocabulary, sequences, TOKENS, STEPS)
    model = copy.deepcopy(described(vocabulary, tied, dtype).model)
    return data, reference.train(model, data) if not dist.is_initialized() or dist.get_rank() == 0 else None


@dataclass(frozen=True)
class Found:
    """Largest relative errors of a case, on the first process."""

    loss_error: float
    gradient_error: float
    worst: str
    """The parameter whose gradient is off most."""
    weight_error: float
    """Of all parameters after three steps of AdamW."""
    weights: dict[str, torch.Tensor]


def run_case(case: Case, dtype: torch.dtype) -> Found | None:
    data, wanted = expected(case.vocabulary, case.tied, dtype, 2 * case.microbatches)
    pipeline = Pipeline(
        described(case.vocabulary, case.tied, dtype),
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=case.microbatches,
        parameter_dtype=dtype,
        self_check=False,
    )
    optimizer = reference.adamw(list(pipeline.parameters()))
    losses, gradients = [], {}
    for number, (ids, labels) in enumerate(data):
        pipeline.zero_grad()
        first = pipeline.device == 0
        losses.append(pipeline.step(ids if first else None, labels if first else None).loss)
        if number == 0:
            gradients = pipeline.full_gradients()
        optimizer.step()
    weights = pipeline.full_state_dict()
    pipeline.close()
    if wanted is None:
        return None
    assert losses == pytest.approx(wanted.losses, rel=1e-5)
    gradient_error, name = reference.worst(gradients, wanted.gradients)
    weight_error, _ = reference.worst(weights, wanted.weights)
    return Found(abs(losses[0] / wanted.losses[0] - 1), gradient_error, name, weight_error, weights)


def run_cases(cases: list[Case], dtype: torch.dtype, tolerance: float, weight_tolerance: float) -> list[str]:
    faults = []
    for case in cases:
        found = run_case(case, dtype)
        if found is None:
            continue
        errors = (found.loss_error, found.gradient_error, found.weight_error)
        if not (max(errors[:2]) <= tolerance and errors[2] <= weight_tolerance):
            faults.append(
                "{}: loss {:.1e}, gradient {:.1e} ({}), weights {:.1e}".format(
                    case, *errors[:2], found.worst, errors[2]
                )
            )
    return faults


def check(processes: int, cases: list[Case], dtype: torch.dtype, tolerance: float, weight_tolerance: float) -> None:
    faults = run_processes(run_cases, processes, cases, dtype, tolerance, weight_tolerance)
    assert not faults[0], "\n".join(faults[0])


MATRIX = [
    (processes, Case(*values))
    for processes, *values in itertools.product((1, 2, 3, 4), (1, 2, 3, 5, 8), MODES, (1003, 1024), (False, True))
]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_mode_gives_the_gradients_of_one_process(processes: int, sample) -> None:
    cases = [case for several, case in sample(MATRIX, 14) if several == processes]
    check(processes, cases, torch.float64, tolerance=1e-10, weight_tolerance=1e-8)
