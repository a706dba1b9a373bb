"""A process of which no parameter is trained takes part in everything: clipping, steps, checkpoints. The others train
as torch's optimizer trains the whole model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from harness import run_processes
from small_llama import described
from torch import Tensor, nn

import evenpipe
from evenpipe import Pipeline

VOCABULARY, TOKENS, SEQUENCES, STEPS, MAX_NORM, RATE = 97, 6, 8, 4, 0.1, 3e-3
FP64 = torch.float64

Trained = list[nn.Parameter]
OPTIMIZERS: dict[str, tuple[Callable[[Pipeline, Trained], Any], Callable[[Trained], Any]]] = {
    "HostAdamW": (
        lambda _, trained: evenpipe.HostAdamW(trained, lr=RATE),
        lambda trained: torch.optim.AdamW(trained, lr=RATE),
    ),
    "HostAdamW with groups": (
        lambda _, trained: evenpipe.HostAdamW([{"params": trained, "weight_decay": 0.3}], lr=RATE, share=0.5),
        lambda trained: torch.optim.AdamW(trained, lr=RATE, weight_decay=0.3),
    ),
    "AdamW with a group": (
        lambda _, trained: torch.optim.AdamW([{"params": trained}], lr=RATE),
        lambda trained: torch.optim.AdamW(trained, lr=RATE),
    ),
    "AdamW of all": (
        lambda pipeline, _: torch.optim.AdamW(pipeline.parameters(), lr=RATE),
        lambda trained: torch.optim.AdamW(trained, lr=RATE),
    ),
    "Adafactor": (
        lambda pipeline, _: evenpipe.Adafactor(pipeline, lr=RATE),
        lambda trained: torch.optim.Adafactor(trained, lr=RATE, weight_decay=0.0),
    ),
    "Muon": (  # what is no matrix of a layer is trained by AdamW
        lambda pipeline, _: evenpipe.Muon(pipeline, lr=RATE, weight_decay=0.1),
        lambda trained: torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8),
    ),
}


@dataclass(frozen=True)
class Case:
    trained: str
    """Prefix of the names of the trained parameters."""
    idle: tuple[int, ...]
    """Processes without any of them."""
    processes: int = 2
    options: tuple[tuple[str, Any], ...] = (("vocabulary", "first-last"),)


CASES = [
    Case("lm_head.", (0,)),
    Case("model.embed_tokens.", (1, 2), processes=3),
    Case("lm_head.", (0, 2), processes=4, options=(("vocabulary", "first-last"), ("replicas", 2))),
]


def data() -> list[tuple[Tensor, Tensor]]:
    return reference.batches(VOCABULARY, SEQUENCES, TOKENS, STEPS)


def start(case: Case, name: str) -> tuple[Pipeline, Any]:
    pipeline = Pipeline(
        described(VOCABULARY, False, FP64), parameter_dtype=FP64, microbatches=2, self_check=False, **dict(case.options)
    )
    for key, parameter in pipeline.named_parameters():
        parameter.requires_grad_(key.startswith(case.trained))
    trained = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
    rank = pipeline.replica * pipeline.devices + pipeline.device
    assert (not trained) == (rank in case.idle)
    return pipeline, OPTIMIZERS[name][0](pipeline, trained)


def train(pipeline: Pipeline, optimizer: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    figures = []
    for ids, labels in batches:
        rows = slice(pipeline.replica, None, pipeline.replicas)
        loss = pipeline.step(ids[rows], labels[rows]).loss
        figures.append((loss, pipeline.clip_gradients(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return figures


def run(case: Case, name: str, folder: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train, stop halfway with a checkpoint, and continue with a new pipeline."""
    pipeline, optimizer = start(case, name)
    optimizer.load_state_dict(optimizer.state_dict())
    schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)]
    figures = train(pipeline, optimizer, data()[: STEPS // 2])
    checkpoint = pipeline.save_checkpoint(folder, STEPS // 2, optimizer, schedulers[0])
    pipeline.close()
    pipeline, optimizer = start(case, name)
    schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))
    pipeline.load_checkpoint(checkpoint, optimizer, schedulers[1])
    figures += train(pipeline, optimizer, data()[STEPS // 2 :])
    return figures, pipeline.full_state_dict()


def run_all(case: Case, names: list[str], folder: Path) -> list[tuple[list[tuple[float, float]], dict[str, Tensor]]]:
    return [run(case, name, folder / name) for name in names]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.trained}{case.processes}")
def test_the_others_train_as_in_one_process(case: Case, tmp_path: Path, sample) -> None:
    names = sample(OPTIMIZERS, 3)
    results = run_processes(run_all, case.processes, case, names, tmp_path)
    for number, name in enumerate(names):
        figures, weights = expected(case, name)
        for process in results:
            assert torch.allclose(torch.tensor(process[number][0]), torch.tensor(figures), rtol=1e-6), name
        assert reference.worst(results[0][number][1], weights)[0] <= 1e-8, name


def expected(case: Case, name: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms, and the weights at the end, of transformers and torch's optimizer in one process."""
    model = copy.deepcopy(described(VOCABULARY, False, FP64).model)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.startswith(case.trained))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, wanted = OPTIMIZERS[name][1](trained), []
    for batch in data():
        optimizer.zero_grad()
        loss = reference.loss_of(model, *batch)
        loss.backward()
        wanted.append((loss.item(), float(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM))))
        optimizer.step()
    return wanted, {key: parameter.detach() for key, parameter in model.named_parameters()}
