"""Every optimizer trains every layout as torch's own trains the same model in one process.

The model computes in fp64. AdamW, SGD and Adafactor do too, and are held to 1e-8. Muon orthogonalises in bf16, in torch
as here. Given the same bits its results have the same bits; but a difference that moves one entry across a border of
bf16 moves the whole result, by some 0.5 % where entries differ by 1e-6 (`tests/optimizers/test_orthogonalisation.py`).
In fp64 layouts differ by 1e-16, and an entry lies so close to a border once in 1e13, so Muon is held to 1e-8 as well. A
shard that is orthogonalised alone, or a rate for the shape of a shard, is off by more than 1e-3.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from families import tiny_config, whole_model
from harness import run_processes
from small_llama import described
from torch import Tensor, nn
from torch.nn import utils

import evenpipe
from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model import Description, describe
from evenpipe.train.optimization import make_optimizer
from evenpipe.train.run_sections import OptimizerConfig

FP64 = torch.float64
VOCABULARY, TOKENS, STEPS, SEQUENCES, MAX_NORM = 97, 6, 3, 24, 0.1
RATE, DECAY = 3e-3, 0.1
Batch = tuple[Tensor, Tensor]
Figures = tuple[float, float]
"""Loss and gradient norm."""

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": DECAY},
    "muon": {"weight_decay": DECAY, "options": {"momentum": 0.9}},
    "adafactor": {"weight_decay": DECAY},
    "sgd": {"weight_decay": DECAY, "options": {"momentum": 0.9, "nesterov": True}},
}


@dataclass(frozen=True)
class Layout:
    processes: int
    mode: str = "vocab-2"
    tied: bool = False
    schedule: str = "1f1b"
    replicas: int = 1
    data_parallel: str = "replicate"
    vocabulary: int = VOCABULARY
    family: str = "llama"
    trained: str = ""
    """What names of trained parameters begin with."""


LAYOUTS = [
    Layout(1),
    Layout(1, "first-last", tied=True),
    Layout(2),
    Layout(2, "first-last", tied=True),
    Layout(2, tied=True, schedule="zbv"),
    Layout(2, replicas=2),
    Layout(2, replicas=2, data_parallel="shard", tied=True),
    Layout(3, replicas=3, data_parallel="shard"),
    Layout(3, tied=True),
    Layout(4, replicas=2, data_parallel="shard"),
    Layout(4, "first-last", replicas=2, data_parallel="shard", tied=True, schedule="zbv"),
    Layout(4, vocabulary=5),
]
"""Three replicas have rows of unequal number, of the key matrix 3, 3 and 2; of five rows of the vocabulary the last of
four devices has none."""
EXPERTS = [
    (Layout(2, family=family, replicas=replicas, data_parallel="shard"), name)
    for family in ("qwen3_moe", "gpt_oss")
    for replicas in (1, 2)
    for name in ("muon", "adafactor")
]
"""Each expert has a matrix of its own. The biases of gpt-oss's experts are stacked to [experts, outputs]: no matrix."""
LONE_MATRIX = Layout(2, replicas=2, data_parallel="shard", trained="model.layers.1.mlp.up_proj."), "muon"


def config_of(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, learning_rate=RATE, **OPTIONS[name])


@cache
def description_of(layout: Layout) -> Description:
    if layout.family == "llama":
        return described(layout.vocabulary, layout.tied, FP64)
    return describe(whole_model(tiny_config(layout.family, num_hidden_layers=2, hidden_size=32, vocab_size=VOCABULARY)))


def make(layout: Layout) -> Pipeline:
    return Pipeline(
        description_of(layout),
        schedule=layout.schedule,
        vocabulary=layout.mode,
        microbatches=2,
        dp=layout.replicas,
        data_parallel=layout.data_parallel,
        parameter_dtype=FP64,
        self_check=False,
    )


def train_only(prefix: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        parameter.requires_grad_(name.startswith(prefix))


# --- torch's own, in one process -------------------------------------------------------------------------


def is_matrix_of_a_layer(name: str, parameter: Tensor) -> bool:
    return "layers." in name and parameter.dim() >= 2 and not name.endswith("bias")


def whole(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's classes over a whole model; weight decay for matrices only."""
    named = [(one, parameter) for one, parameter in model.named_parameters() if parameter.requires_grad]

    def groups(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        parameters = [parameter for _, parameter in parameters]
        return [
            {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": DECAY},
            {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
        ]

    adamw = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8}
    match name:
        case "adamw":
            return [torch.optim.AdamW(groups(named), **adamw)]
        case "adafactor":
            return [torch.optim.Adafactor(groups(named), lr=RATE)]
        case "sgd":
            return [torch.optim.SGD(groups(named), lr=RATE, momentum=0.9, nesterov=True)]
    matrices = [parameter for one, parameter in named if is_matrix_of_a_layer(one, parameter)]
    others = [(one, parameter) for one, parameter in named if not is_matrix_of_a_layer(one, parameter)]
    muon = MatrixByMatrix(matrices, lr=RATE, weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups(others), **adamw)]  # type: ignore[list-item]


class MatrixByMatrix:
    """`torch.optim.Muon`, with each of several stacked matrices as a parameter of its own."""

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        self._views = [
            (parameter, index, nn.Parameter(parameter.detach() if index is None else parameter.detach()[index]))
            for parameter in parameters
            for index in ([None] if parameter.dim() == 2 else range(len(parameter)))
        ]
        self._muon = torch.optim.Muon([view for _, _, view in self._views], **options)

    def step(self) -> None:
        for parameter, index, view in self._views:
            assert parameter.grad is not None
            view.grad = parameter.grad if index is None else parameter.grad[index]
        self._muon.step()


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train_whole(
    optimizers: list[torch.optim.Optimizer], model: nn.Module, data: list[Batch], *, falls: bool = False
) -> tuple[list[Figures], dict[str, Tensor]]:
    """Return the figures of all steps and the weights behind them; falls: with a falling rate."""
    figures = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step, (ids, labels) in enumerate(data, start=1):
        model.zero_grad()
        loss = reference.loss_of(model, ids, labels)
        loss.backward()
        figures.append((loss.item(), float(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM))))
        for optimizer in optimizers:
            optimizer.step()
            for group in getattr(optimizer, "_muon", optimizer).param_groups if falls else ():
                group["lr"] = RATE / (1 + step)
    return figures, {name: parameter.detach() for name, parameter in model.named_parameters()}


def wanted(name: str, layout: Layout, falls: bool = False) -> tuple[list[Batch], dict[str, Tensor]]:
    data = reference.batches(layout.vocabulary, SEQUENCES, TOKENS, STEPS)
    model = copy.deepcopy(description_of(layout).model)
    train_only(layout.trained, model.named_parameters())
    return data, train_whole(whole(name, model), model, data, falls=falls)[1]


def fault_of(weights: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> list[str]:
    error, parameter = reference.worst(weights, expected)
    return [] if error <= 1e-8 else [f"{case}: {parameter} {error:.1e}"]


# --- in layouts ------------------------------------------------------------------------------------------


def is_first(pipeline: Pipeline) -> bool:
    return pipeline.device == pipeline.replica == 0


def take_step(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, batch: Batch) -> Figures:
    """Take one step; each replica has its part of the batch."""
    ids, labels = (part.chunk(pipeline.replicas)[pipeline.replica] for part in batch)
    pipeline.zero_grad()
    loss = pipeline.step(ids, labels).loss
    norm = pipeline.clip_grad_norm_(MAX_NORM)
    if optimizer is not None:
        optimizer.step()
    return loss, norm


def weights_in(layout: Layout, name: str) -> list[str]:
    """What is wrong, on the first process."""
    data, expected = wanted(name, layout)
    pipeline = make(layout)
    train_only(layout.trained, pipeline.named_parameters())
    optimizer = make_optimizer(pipeline, config_of(name))
    for batch in data:
        take_step(pipeline, optimizer, batch)
    weights = pipeline.full_state_dict()
    pipeline.close()
    if not is_first(pipeline):
        return []
    return fault_of(weights, expected, f"{name} {layout}")


def weights_in_all(cases: list[tuple[Layout, str]]) -> list[str]:
    return [fault for case in cases for fault in weights_in(*case)]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_optimizer_steps_as_torchs_own_in_one_process(processes: int, sample) -> None:
    every = [*itertools.product(LAYOUTS, OPTIONS), *EXPERTS]
    cases = [case for case in [LONE_MATRIX, *sample(every, 9)] if case[0].processes == processes]
    faults = run_processes(weights_in_all, processes, cases)
    assert not faults[0], "\n".join(faults[0])


# --- checkpoints -----------------------------------------------------------------------------------------

CHANGES = [
    Layout(4, replicas=2, data_parallel="shard", schedule="zbv", tied=True),
    Layout(4, "vocab-1", tied=True),
    Layout(4, replicas=4, data_parallel="shard", tied=True),
]
"""Layouts of four processes; each goes on from the checkpoint of the one before."""


def through_layouts_with(names: list[str], folder: Path) -> list[str]:
    """Take a step in each layout, with a scheduler of torch."""
    faults = []
    for name in names:
        data, expected = wanted(name, CHANGES[0], falls=True)
        for number, (layout, batch) in enumerate(zip(CHANGES, data, strict=True)):
            pipeline = make(layout)
            optimizer = make_optimizer(pipeline, config_of(name))
            scheduler = falling(optimizer)
            if number:
                pipeline.load_checkpoint(folder / name / f"step-{number:08d}", optimizer, scheduler)
            take_step(pipeline, optimizer, batch)
            scheduler.step()
            pipeline.save_checkpoint(folder / name, number + 1, optimizer, scheduler)
            weights = pipeline.full_state_dict()
            pipeline.close()
        if weights:
            faults += fault_of(weights, expected, name)
    return faults


def test_an_optimizer_and_a_scheduler_go_on_in_other_layouts(tmp_path: Path, sample) -> None:
    names = sample(["muon", "adafactor", "sgd"], 1)
    faults = run_processes(through_layouts_with, 4, names, tmp_path)
    assert not faults[0], "\n".join(faults[0])


# --- processes of which no parameter is trained ----------------------------------------------------------

Trained = list[nn.Parameter]
OWN: dict[str, tuple[Callable[[Pipeline, Trained], Any], Callable[[Trained], Any]]] = {
    # ours or torch's for a pipeline and its trained parameters; torch's for a whole model
    "HostAdamW with groups": (
        lambda _, trained: evenpipe.HostAdamW([{"params": trained, "weight_decay": 0.3}], lr=RATE, share=0.5),
        lambda trained: torch.optim.AdamW(trained, lr=RATE, weight_decay=0.3),
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
IDLE = [
    # prefix of the names of the trained parameters, processes without any of them, layout
    ("lm_head.", (0,), Layout(2, "first-last")),
    ("model.embed_tokens.", (1, 2), Layout(3, "first-last")),
    ("lm_head.", (0, 2), Layout(4, "first-last", replicas=2)),
]


def train_a_part(
    prefix: str, idle: tuple[int, ...], layout: Layout, names: list[str], folder: Path
) -> list[tuple[list[Figures], dict[str, Tensor]]]:
    """Train, save halfway, and go on with a new pipeline: these processes take part in everything."""
    results = []
    data = reference.batches(VOCABULARY, SEQUENCES, TOKENS, 4)
    for name in names:
        figures: list[Figures] = []
        while len(figures) < 4:
            pipeline = make(layout)
            train_only(prefix, pipeline.named_parameters())
            trained = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
            assert (not trained) == (pipeline.replica * pipeline.devices + pipeline.device in idle)
            optimizer = OWN[name][0](pipeline, trained)
            optimizer.load_state_dict(optimizer.state_dict())
            if figures:
                pipeline.load_checkpoint(folder / name / "step-00000002", optimizer)
            figures += [take_step(pipeline, optimizer, batch) for batch in data[len(figures) : len(figures) + 2]]
            pipeline.save_checkpoint(folder / name, len(figures), optimizer)
            weights = pipeline.full_state_dict()
            pipeline.close()
        results.append((figures, weights))
    return results


@pytest.mark.parametrize(("prefix", "idle", "layout"), IDLE)
@pytest.mark.sampled(2)
def test_processes_without_parameters_take_part(
    prefix: str, idle: tuple[int, ...], layout: Layout, tmp_path: Path, sample: Callable
) -> None:
    names = sample(OWN, 2)
    results = run_processes(train_a_part, layout.processes, prefix, idle, layout, names, tmp_path)
    for number, name in enumerate(names):
        model = copy.deepcopy(described(VOCABULARY, False, FP64).model)
        train_only(prefix, model.named_parameters())
        optimizer = OWN[name][1]([parameter for parameter in model.parameters() if parameter.requires_grad])
        figures, weights = train_whole([optimizer], model, reference.batches(VOCABULARY, SEQUENCES, TOKENS, 4))
        for process in results:
            torch.testing.assert_close(process[number][0], figures, rtol=1e-6, atol=1e-8)
        assert not fault_of(results[0][number][1], weights, name)


# --- what is refused --------------------------------------------------------------------------------------


def parts_of_matrices() -> None:
    """Parts that are no rows of whole matrices."""
    pipeline = Pipeline(tiny_config("llama", num_hidden_layers=2), tp=2, self_check=False)
    for kind in (evenpipe.Muon, evenpipe.Adafactor):
        says = (
            rf"^{kind.__name__}: it needs whole matrices, or rows of them.*o_proj\.weight.*"
            "expected tp = 1 with it"
        )
        with pytest.raises(InputError, match=says):
            kind(pipeline)
    pipeline.close()


def test_parts_of_matrices_that_are_no_rows_are_refused() -> None:
    run_processes(parts_of_matrices, 2)


# --- torch's clipping and some of its optimizers see one process: refused if that is not the whole model --------------

CLIPPING: dict[str, Callable[[Pipeline], object]] = {
    "clip_grad_norm_": lambda pipeline: utils.clip_grad_norm_(pipeline.parameters(), 1e-3),
    "of some": lambda pipeline: utils.clip_grad_norm_((one for one in pipeline.parameters() if one.dim() > 1), 1e-3),
    "of named ones": lambda pipeline: utils.clip_grad_norm_((one for _, one in pipeline.named_parameters()), 1e-3),
    "get_total_norm": lambda pipeline: utils.get_total_norm(one.grad for one in pipeline.parameters()),
}
OF_TORCH: dict[str, Callable[[Pipeline], object]] = {
    "Adafactor": lambda pipeline: torch.optim.Adafactor(pipeline.parameters()),
    "Muon": lambda pipeline: torch.optim.Muon(one for one in pipeline.parameters() if one.dim() == 2),
}
BY_ALL = "expected pipeline.clip_grad_norm_(max_norm), which scales all by the norm of all"


def clipping(options: dict[str, object]) -> list[bool]:
    """Of every call, whether torch may clip; where it may not, gradients stay as they are."""
    pipeline = Pipeline(described(VOCABULARY, True, FP64), microbatches=1, self_check=False, **options)
    allowed = []
    for call in CLIPPING.values():
        pipeline.step(torch.arange(12).view(2, 6))
        # a norm that is known, and element by element: right in any layout
        utils.clip_grads_with_norm_(pipeline.parameters(), 1.0, torch.tensor(pipeline.clip_grad_norm_(float("inf"))))
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
    [(2, {}, False), (2, {"dp": 2, "data_parallel": "shard"}, False), (2, {"dp": 2}, True), (1, {}, True)],
)
@pytest.mark.sampled(2)
def test_torch_may_clip_only_where_a_process_holds_the_whole_model(processes, options, allowed) -> None:
    assert run_processes(clipping, processes, options) == [[allowed] * len(CLIPPING)] * processes


def optimizer(kind: str, vocabulary: str) -> str:
    """Make an optimizer of torch; return the error, or nothing."""
    model = described(VOCABULARY, True, FP64)
    pipeline = Pipeline(model, microbatches=1, self_check=False, vocabulary=vocabulary)
    torch.optim.AdamW(pipeline.parameters())  # element by element
    try:
        OF_TORCH[kind](pipeline)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", OF_TORCH)
@pytest.mark.sampled(1)
def test_an_optimizer_of_whole_matrices_is_refused_where_rows_are_spread(kind: str) -> None:
    for error in run_processes(optimizer, 2, kind, "vocab-2"):
        assert error.startswith(f"torch.optim.{kind} would take the rows of model.embed_tokens.weight on this process")
        assert f"expected evenpipe.{kind}(pipeline, ...)" in error
    assert run_processes(optimizer, 2, kind, "first-last") == ["", ""]
