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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from families import tiny_config, whole_model
from harness import run_processes
from small_llama import described
from torch import Tensor, nn
from torch.nn import functional

import evenpipe
from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model import describe
from evenpipe.train.optimization import make_optimizer
from evenpipe.train.run_sections import OptimizerConfig

FP64 = torch.float64


class Odd(nn.Module):
    """A layer with parameters to stumble over: used twice, of one row, frozen, without a gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.rand(1))
        self.frozen = nn.Parameter(torch.rand(size), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(3, size))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(torch.tanh(self.linear(hidden))) * self.scale * self.frozen


VOCABULARY, TOKENS, STEPS, SEQUENCES, MAX_NORM = 97, 6, 3, 24, 0.5
RATE, DECAY = 3e-3, 0.1

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
"""Three replicas have rows of unequal number, of the key matrix 3, 3 and 2; of five rows of
the vocabulary the last of four devices has none."""


def config_of(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, learning_rate=RATE, **OPTIONS[name])


def make(layout: Layout, dtype: torch.dtype = FP64, description: Any = None) -> Pipeline:
    return Pipeline(
        description or described(layout.vocabulary, layout.tied, dtype),
        schedule=layout.schedule,
        vocabulary=layout.mode,
        microbatches=2,
        replicas=layout.replicas,
        data_parallel=layout.data_parallel,
        parameter_dtype=dtype,
        self_check=False,
    )


# --- torch's own, in one process -------------------------------------------------------------------------


def is_matrix_of_a_layer(name: str, parameter: Tensor) -> bool:
    return "layers." in name and parameter.dim() >= 2 and not name.endswith(("bias", "unused"))


def whole(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's classes over a whole model; weight decay for matrices only."""
    named = list(model.named_parameters())

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


def train_whole(name: str, model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    optimizers = whole(name, model)
    for ids, labels in data:
        model.zero_grad()
        reference.loss_of(model, ids, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@cache
def wanted(name: str, tied: bool, vocabulary: int) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    data = reference.batches(vocabulary, SEQUENCES, TOKENS, STEPS)
    return data, train_whole(name, copy.deepcopy(described(vocabulary, tied, FP64).model), data)


# --- in layouts ------------------------------------------------------------------------------------------


def is_first(pipeline: Pipeline) -> bool:
    return pipeline.device == pipeline.replica == 0


def take_step(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, batch: tuple[Tensor, Tensor]) -> float:
    """One step; each replica has its part of the batch."""
    ids, labels = (part.chunk(pipeline.replicas)[pipeline.replica] for part in batch)
    pipeline.zero_grad()
    loss = pipeline.step(ids, labels).loss
    pipeline.clip_gradients(MAX_NORM)
    if optimizer is not None:
        optimizer.step()
    return loss


def weights_in(layout: Layout, name: str) -> list[str]:
    """What is wrong, on the first process."""
    data, expected = wanted(name, layout.tied, layout.vocabulary)
    pipeline = make(layout)
    optimizer = make_optimizer(pipeline, config_of(name))
    for batch in data:
        take_step(pipeline, optimizer, batch)
    found = pipeline.full_state_dict()
    assert_copies_agree(pipeline)
    pipeline.close()
    if not is_first(pipeline):
        return []
    error, which = reference.worst(found, expected)
    return [] if error <= 1e-8 else [f"{name} {layout}: {which} {error:.1e}"]


def assert_copies_agree(pipeline: Pipeline) -> None:
    """What several processes hold whole has the same bits on all of them."""
    own = {
        held.name: held.parameter.detach().clone() for held in pipeline.held_parameters() if held.communicator is None
    }
    seen: list[Any] = [None] * dist.get_world_size() if dist.is_initialized() else [own]
    if dist.is_initialized():
        dist.all_gather_object(seen, own)
    for other in seen:
        for name in own.keys() & other.keys():
            assert own[name].shape != other[name].shape or torch.equal(own[name], other[name]), name


def weights_in_all(cases: list[tuple[Layout, str]]) -> list[str]:
    return [fault for layout, name in cases for fault in weights_in(layout, name)]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_optimizer_steps_as_torchs_own_in_one_process(processes: int, sample) -> None:
    cases = [case for case in sample(itertools.product(LAYOUTS, OPTIONS), 9) if case[0].processes == processes]
    faults = run_processes(weights_in_all, processes, cases)
    assert not faults[0], "\n".join(faults[0])


# --- experts ---------------------------------------------------------------------------------------------


EXPERTS = {
    "qwen3_moe": "model.layers.1.mlp.experts.gate_up_proj",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj_bias",
}
"""Family -> a parameter to look at. The biases of gpt-oss's experts are stacked to [experts, outputs]: no matrix."""


@cache
def mixture(family: str) -> Any:
    return describe(whole_model(tiny_config(family, num_hidden_layers=2, hidden_size=32, vocab_size=VOCABULARY)))


def experts_in(layout: Layout) -> list[str]:
    faults = []
    data = reference.batches(VOCABULARY, SEQUENCES, TOKENS, STEPS)
    for family, parameter in EXPERTS.items():
        for name in ("muon", "adafactor"):
            pipeline = make(layout, description=mixture(family))
            optimizer = make_optimizer(pipeline, config_of(name))
            assert optimizer is not None
            for batch in data:
                take_step(pipeline, optimizer, batch)
            for held, own in pipeline.named_parameters():
                if held == parameter and name == "muon":
                    assert ("momentum_buffer" in optimizer.state[own]) == ("bias" not in held)
            found = pipeline.full_state_dict()
            pipeline.close()
            if is_first(pipeline):
                model = copy.deepcopy(mixture(family).model)
                error, which = reference.worst(found, train_whole(name, model, data))
                faults += [] if error <= 1e-8 else [f"{family} {name} {layout}: {which} {error:.1e}"]
    return faults


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, replicas=2, data_parallel="shard")], ids=["pipeline", "shard"])
@pytest.mark.sampled(1)
def test_each_expert_has_a_matrix_of_its_own(layout: Layout) -> None:
    faults = run_processes(experts_in, layout.processes, layout)
    assert not faults[0], "\n".join(faults[0])


# --- parameters to stumble over --------------------------------------------------------------------------


def odd_parameters() -> None:
    """Used twice, of one row, frozen, without a gradient: in shards over replicas, after one step."""
    ids = torch.arange(24).reshape(4, 6)
    for name in OPTIONS:
        torch.manual_seed(0)
        embedding, head, norm = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), nn.LayerNorm(8)
        layers = [Odd(8) for _ in range(2)]
        whole_model = nn.ModuleDict(
            {"embedding": embedding, "layers": nn.ModuleList(layers), "norm": norm, "head": head}
        )
        whole_model.double()
        pipeline = Pipeline.from_modules(
            embedding, layers, norm, head, microbatches=2, replicas=2, data_parallel="shard", parameter_dtype=FP64
        )
        optimizer = make_optimizer(pipeline, config_of(name))
        assert optimizer is not None
        pipeline.step(ids.chunk(2)[pipeline.replica])
        optimizer.step()
        found = pipeline.full_state_dict()
        pipeline.close()
        hidden = embedding(ids)
        for layer in layers:
            hidden = layer(hidden)
        logits = head(norm(hidden))[:, :-1].flatten(0, 1)
        functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        for one in whole(name, whole_model):
            one.step()
        if is_first(pipeline):
            expected = {key: parameter.detach() for key, parameter in whole_model.named_parameters()}
            error, which = reference.worst({key: found[key] for key in expected}, expected)
            assert error <= 1e-8, f"{name}: {which} {error:.1e}"


def test_parameters_of_all_kinds_are_stepped() -> None:
    run_processes(odd_parameters, 2)


# --- checkpoints -----------------------------------------------------------------------------------------


def resumed(layout: Layout, names: list[str], folder: Path) -> None:
    """Two steps, saved and taken up by a new pipeline, and two more: the bits of four steps."""
    data = reference.batches(VOCABULARY, SEQUENCES, TOKENS, 4)
    for name in names:
        ends = []
        for stops in ((4,), (2, 4)):
            done = 0
            for stop in stops:
                pipeline = make(layout, torch.float32)
                optimizer = make_optimizer(pipeline, config_of(name))
                if done:
                    pipeline.load_checkpoint(folder / name / f"step-{done:08d}", optimizer)
                for batch in data[done:stop]:
                    take_step(pipeline, optimizer, batch)
                if stop < 4:
                    pipeline.save_checkpoint(folder / name, stop, optimizer)
                done = stop
                ends.append({one: parameter.detach().clone() for one, parameter in pipeline.named_parameters()})
                pipeline.close()
        assert ends[0].keys() == ends[-1].keys()
        for one, parameter in ends[0].items():
            assert torch.equal(parameter, ends[-1][one]), f"{name}: {one}"


def test_an_optimizer_is_resumed_to_the_last_bit(tmp_path: Path, sample) -> None:
    layout = Layout(4, replicas=2, data_parallel="shard", schedule="zbv")
    run_processes(resumed, 4, layout, sample(OPTIONS, 2), tmp_path)


CHANGES = [
    Layout(4, replicas=2, data_parallel="shard", schedule="zbv", tied=True),
    Layout(4, "vocab-1", tied=True),
    Layout(4, replicas=4, data_parallel="shard", tied=True),
]
"""Layouts of four processes; each goes on from the checkpoint of the one before."""


def through_layouts_with(names: list[str], folder: Path) -> list[str]:
    faults = []
    for name in names:
        data, expected = wanted(name, True, VOCABULARY)
        for number, (layout, batch) in enumerate(zip(CHANGES, data, strict=True)):
            pipeline = make(layout)
            optimizer = make_optimizer(pipeline, config_of(name))
            if number:
                pipeline.load_checkpoint(folder / name / f"step-{number:08d}", optimizer)
            take_step(pipeline, optimizer, batch)
            pipeline.save_checkpoint(folder / name, number + 1, optimizer)
            found = pipeline.full_state_dict()
            pipeline.close()
        if found:
            error, which = reference.worst(found, expected)
            faults += [] if error <= 1e-8 else [f"{name}: {which} {error:.1e}"]
    return faults


def test_an_optimizer_goes_on_in_other_layouts(tmp_path: Path, sample) -> None:
    names = sample(["muon", "adafactor", "sgd"], 1)
    faults = run_processes(through_layouts_with, 4, names, tmp_path)
    assert not faults[0], "\n".join(faults[0])


def own_loop(folder: Path, kind: str, mode: str, until: int) -> list[tuple[float, list[float]]]:
    """A loop of one's own, with a scheduler of torch: loss and rates of its steps."""
    pipeline = make(Layout(dist.get_world_size(), mode))
    optimizer = getattr(evenpipe, kind)(pipeline, lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    step, rows = 0, []
    checkpoint = evenpipe.newest_checkpoint(folder)
    if checkpoint is not None:
        pipeline.load_checkpoint(checkpoint, optimizer, scheduler)
        step = checkpoint.step
    for batch in reference.batches(VOCABULARY, SEQUENCES, TOKENS, 4)[step:until]:
        rates = [group["lr"] for group in optimizer.param_groups]
        rows.append((take_step(pipeline, optimizer, batch), rates))
        scheduler.step()
    pipeline.save_checkpoint(folder, until, optimizer, scheduler)
    pipeline.close()
    return rows


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
@pytest.mark.sampled(1)
def test_a_loop_of_ones_own_has_them_with_schedulers_of_torch(tmp_path: Path, kind: str) -> None:
    whole = run_processes(own_loop, 1, tmp_path / "whole", kind, "vocab-2", 4)[0]
    rows = run_processes(own_loop, 3, tmp_path / "parts", kind, "vocab-2", 2)[0]
    rows += run_processes(own_loop, 2, tmp_path / "parts", kind, "first-last", 4)[1]
    assert [rates for _, rates in rows] == [rates for _, rates in whole]
    assert [rates[0] for _, rates in rows] == pytest.approx([RATE / (1 + step) for step in range(4)])
    assert [loss for loss, _ in rows] == pytest.approx([loss for loss, _ in whole], rel=1e-8)


def sentences_with_tensor_ranks() -> list[str]:
    torch.manual_seed(0)
    config = tiny_config("llama", num_hidden_layers=2)
    pipeline = Pipeline(config, tensor_parallel=2, self_check=False)
    said = []
    for kind in (evenpipe.Muon, evenpipe.Adafactor):
        with pytest.raises(InputError) as raised:
            kind(pipeline)
        said.append(str(raised.value))
    pipeline.close()
    return said


def test_parts_of_matrices_that_are_no_rows_are_refused() -> None:
    for said in run_processes(sentences_with_tensor_ranks, 2):
        for name, sentence in zip(("Muon", "Adafactor"), said, strict=True):
            assert sentence.startswith(f"{name}: it needs whole matrices, or rows of them")
            assert "o_proj.weight" in sentence and "expected tensor_parallel = 1 with it" in sentence
