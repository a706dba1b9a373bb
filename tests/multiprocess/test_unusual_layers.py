"""Layers that are skipped, stop gradients, or change their input in place: loss and gradients are those of one process.

Plain modules that do so run in every schedule among the pipelines of tests/fuzz. Here decoder layers of Llama do, where
plain modules cannot be: on tensor and context ranks, in slices, compiled, self-checked, and beside experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import reference
import torch
from families import tiny_config, whole_model
from harness import check_cases, run_processes
from small_llama import llama as small_llama
from torch import Tensor
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from evenpipe import OffloadOptions, Pipeline
from evenpipe.errors import InputError
from evenpipe.layers import compilation
from evenpipe.layers.compilation import compile_layer
from evenpipe.model import describe
from evenpipe.schedule import add_recompute, add_slices, generate

VOCABULARY, TOKENS, MICROBATCHES = 61, 8, 4
LATER = 16
"""First position of every second microbatch."""
SEED = 3
"""Of what layers draw."""
Behaviour = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]
"""From a layer's own forward, its input, and one of its weights [hidden_size]."""


def without_grad(run, hidden, weight):
    with torch.no_grad():
        return run(hidden)


def add(run, hidden, weight):
    hidden.add_(weight)
    return run(hidden)


def assign(run, hidden, weight):
    hidden[..., 1:3] = weight[1:3] * 2
    return run(hidden)


def through_a_view(run, hidden, weight):
    hidden.view(-1, hidden.shape[-1])[:, ::2].mul_(0.5).sub_(0.1)
    return run(hidden)


def changed_without_grad(run, hidden, weight):
    with torch.no_grad():
        hidden.mul_(0.5)
    return run(hidden)


BEHAVIOURS: dict[str, Behaviour] = {
    "run": lambda run, hidden, weight: run(hidden),
    "skip": lambda run, hidden, weight: hidden,
    "above": lambda run, hidden, weight: run(hidden.detach()),  # is trained, and nothing below it
    "below": lambda run, hidden, weight: run(hidden).detach(),
    "no_grad": without_grad,
    "fresh": lambda run, hidden, weight: weight.expand_as(hidden) * 2,  # depends on a parameter only
    "constant": lambda run, hidden, weight: torch.ones_like(hidden),
    "turned": lambda run, hidden, weight: run(hidden.transpose(0, 1).contiguous().transpose(0, 1)),
    "random": lambda run, hidden, weight: hidden if torch.rand(()) < 0.5 else run(hidden),
    # in place
    "add": add,
    "assign": assign,
    "view": through_a_view,
    "change": changed_without_grad,
    "scale": lambda run, hidden, weight: hidden.mul_(2),  # returns its input, and saves nothing
}


@dataclass(frozen=True)
class Case:
    """A pipeline. `layers`: a behaviour for each; "?" behind it: only on every second microbatch."""

    layers: tuple[str, ...]
    processes: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the pipeline; and "tied" weights, and "recompute" for an order with R before every backward."""

    @property
    def tied(self) -> bool:
        return self.options.get("tied", False)

    def __str__(self) -> str:
        return f"{' '.join(self.layers)} on {self.processes} with {dict(self.options)}"


def at(place: int, kind: str) -> tuple[str, ...]:
    return tuple(kind if index == place else "run" for index in range(4))


@contextmanager
def patched(layers: tuple[str, ...]) -> Iterator[None]:
    """Let the decoder layers of Llama behave so."""
    own = modeling_llama.LlamaDecoderLayer.forward

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def run(hidden: Tensor) -> Tensor:
            return own(layer, hidden, *args, **kwargs)

        kind = layers[layer.self_attn.layer_idx % len(layers)]
        if kind.endswith("?") and int(kwargs["position_ids"].max()) < LATER:
            return run(hidden_states)
        return BEHAVIOURS[kind.removesuffix("?")](run, hidden_states, layer.input_layernorm.weight)

    with mock.patch.object(modeling_llama.LlamaDecoderLayer, "forward", forward):
        yield


# --- one process ------------------------------------------------------------------------------------------------------


@cache
def llama(tied: bool) -> Any:
    return small_llama(VOCABULARY, tied, torch.float64)


def batch(microbatches: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and position ids of two sequences per microbatch."""
    ids, labels = reference.batches(VOCABULARY, 2 * microbatches, TOKENS, 1, seed=seed)[0]
    positions = torch.arange(TOKENS).repeat(len(ids), 1)
    positions[[row for row in range(len(ids)) if row // 2 % 2]] += LATER
    return ids, labels, positions


def one_process(case: Case, microbatches: int, replicas: int = 1) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients, microbatch after microbatch, inside of `patched`."""
    model = copy.deepcopy(llama(case.tied))
    data = [batch(microbatches, 1 + replica) for replica in range(replicas)]
    count = sum(int((labels[:, 1:] != reference.IGNORE).sum()) for _, labels, _ in data)
    total = 0.0
    torch.manual_seed(SEED)
    for of_replica in data:
        for ids, labels, positions in zip(*(part.split(2) for part in of_replica), strict=True):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / count
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


# --- pipelines --------------------------------------------------------------------------------------------------------


def pipeline_of(case: Case, microbatches: int) -> Pipeline:
    """Inside of `patched`."""
    options = {"parameter_dtype": torch.float64, "microbatches": microbatches, "self_check": False, **case.options}
    options.pop("tied", None)
    if options.pop("recompute", False):
        slices = options.pop("slices", 1)
        devices = case.processes // options.get("tp", 1) // options.get("cp", 1)
        order = generate(options.get("schedule", "1f1b"), devices, microbatches * slices)
        options["schedule"] = add_recompute(add_slices(order, slices))
    return Pipeline(describe(llama(case.tied)), **options)


def faults_of_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases for fault in faults_of(case)]


def faults_of(case: Case) -> list[str]:
    """Return what is wrong with loss and gradients of a step, as the first process sees it."""
    compiled = partial(compile_layer, backend="aot_eager")
    with patched(case.layers), mock.patch.object(compilation, "compile_layer", compiled):
        pipeline = pipeline_of(case, MICROBATCHES)
        ids, labels, positions = batch(MICROBATCHES, 1 + pipeline.replica)
        torch.manual_seed(SEED)
        loss = float(pipeline.step(ids, labels, position_ids=positions).loss)
        found = pipeline.full_gradients()
        evaluated = float(pipeline.evaluate(ids, labels, position_ids=positions).loss)
        pipeline.close()
        if torch.distributed.get_rank():
            return []
        expected_loss, expected = one_process(case, MICROBATCHES, pipeline.replicas)
    errors = {name: _error(found.get(name), gradient) for name, gradient in expected.items()}
    errors["the loss"] = abs(loss / expected_loss - 1)
    if not any(kind.endswith("?") or kind == "random" for kind in case.layers):  # evaluation cuts batches otherwise
        errors["the loss of evaluation"] = abs(evaluated / expected_loss - 1)
    wrong = [name for name, error in errors.items() if not error <= 1e-10]
    return [f"{case}: {name} is off by {errors[name]:.1e}, with {len(wrong)} wrong" for name in wrong[:1]]


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    """Relative to the norm of what is expected; a parameter without a gradient there may have zeros here."""
    if expected is None or not expected.any():
        return 0.0 if found is None else float(found.norm())
    return float("inf") if found is None else float((found - expected).norm() / expected.norm())


ALL, SECOND = ("add",) * 4, ("run", "run", "assign", "run")
HOST = OffloadOptions(activations="all")
RECOMPUTE = {"recompute": True}
CASES = [
    # before others have made torch compile so often on one of two processes that it stops there, but not on the other
    Case(at(1, "run"), 2, {"compile_layers": True, "tp": 2, "schedule": "zb-h1"}),
    # of one process, which draws as the reference does
    Case(("random",) * 4, 1, {"activation_checkpointing": "selective"}),
    Case(("random",) * 4, 1, RECOMPUTE | {"self_check": True}),
    *(Case(at(2, kind), options={"schedule": "zbv"}) for kind in BEHAVIOURS if kind not in ("run", "random")),
    *(Case((kind,) * 4) for kind in ("skip", "no_grad", "constant", "view", "scale")),
    # A stage that returns its input, which R needs, to a stage of the same device that changes it.
    Case(("run", "skip", "add", "run"), options=RECOMPUTE | {"schedule": "zbv"}),
    Case(("below",) * 4, options=RECOMPUTE | {"offload": HOST}),
    Case(SECOND, options=RECOMPUTE | {"vocabulary": "redistribute"}),
    Case(at(2, "scale"), options={"activation_checkpointing": "full"}),  # nothing is computed from its input again
    Case(ALL, options={"vocabulary": "vocab-1", "tied": True, "self_check": True}),
    Case(at(1, "below"), options={"self_check": True}),
    Case(at(3, "above"), options={"compile_layers": True, "activation_checkpointing": "full"}),
    *(Case(layers, options={"compile_layers": True, "schedule": "zbv"}) for layers in (at(2, "skip?"), ALL)),
    Case(at(2, "above"), options={"slices": 2, "schedule": "zbv"}),
    Case(("run", "below?", "skip?", "below"), options={"slices": 3}),
    Case(ALL, options=RECOMPUTE | {"slices": 2, "schedule": "zbv"}),
    *(Case(at(place, kind), 4, {"tp": 2}) for place, kind in ((2, "above?"), (1, "below"), (0, "add"))),
    Case(at(3, "skip?"), 4, {"tp": 2, "tensor_overlap": "ring"}),
    Case(ALL, 4, {"tp": 2, "tensor_overlap": "ring", "schedule": "zb-h1"}),
    Case(at(1, "no_grad"), 4, {"tp": 2, "self_check": True, "schedule": "zb-h1"}),
    Case(SECOND, 4, RECOMPUTE | {"tp": 2, "self_check": True}),
    Case(at(1, "below?"), 4, {"cp": 2}),
    Case(at(3, "above"), 4, {"cp": 2, "slices": 2, "schedule": "zb-h1"}),
    Case(SECOND, 4, RECOMPUTE | {"cp": 2}),
    Case(at(0, "fresh?"), 4, {"dp": 2, "data_parallel": "shard", "schedule": "zbv"}),
]


def test_gradients_are_those_of_one_process(sample) -> None:
    check_cases(faults_of_cases, sample(CASES, 5))


def apart(mlp, hidden):
    """Trains its own matrices, and hands no gradient on."""
    hidden = hidden.detach()
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))


def faults_of_detached_blocks(cases: list[Case]) -> list[str]:
    with mock.patch.object(modeling_llama.LlamaMLP, "forward", apart):
        return faults_of_cases(cases)


def test_blocks_that_detach_what_tensor_ranks_have_gathered() -> None:
    layouts = [{}, {"tensor_overlap": "ring", "recompute": True}, {"activation_checkpointing": "selective"}]
    cases = [Case(at(1, "run"), options={"tp": 2, **layout}) for layout in layouts]
    check_cases(faults_of_detached_blocks, cases)


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def experts_are_trained(kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    model = whole_model(tiny_config("mixtral", output_router_logits=True))
    own = modeling_mixtral.MixtralDecoderLayer.forward

    def forward(layer, hidden_states, *args, **kwargs):
        kind = kinds[layer.self_attn.layer_idx]
        return BEHAVIOURS[kind](lambda hidden: own(layer, hidden, *args, **kwargs), hidden_states, None)

    ids = torch.randint(5, model.config.vocab_size, (2, 4, 10), generator=torch.Generator().manual_seed(1))
    with mock.patch.object(modeling_mixtral.MixtralDecoderLayer, "forward", forward):
        pipeline = Pipeline(model, microbatches=2, parameter_dtype=torch.float64, self_check=False, **options)
        batches, total = ids[: pipeline.replicas], 0.0
        for microbatch in batches.flatten(0, 1).split(2):  # the loss of routers is one of every microbatch
            output = model(input_ids=microbatch, use_cache=False)
            loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), microbatch[:, 1:].flatten())
            loss = (loss + model.config.router_aux_loss_coef * output.aux_loss) / (2 * len(batches))
            loss.backward()
            total += loss.item()
        assert float(pipeline.step(batches[pipeline.replica]).loss) == pytest.approx(total, rel=1e-10)
        gradients = pipeline.full_gradients()
    if torch.distributed.get_rank() == 0:
        errors = {name: _error(gradients.get(name), one.grad) for name, one in model.named_parameters()}
        assert max(errors.values()) <= 1e-10, errors


ROUTED = [
    (("run", "above", "run", "skip"), {"schedule": "zbv"}),  # routers train what hidden states do not reach
    (("run", "skip", "run", "below"), {}),
    (("run", "above", "below", "skip"), {"dp": 2, "ep": 2}),
]


@pytest.mark.parametrize(("kinds", "options"), ROUTED)
@pytest.mark.sampled(2)
def test_experts_and_their_routers(kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    run_processes(experts_are_trained, 2, kinds, options)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused_by_checkpointing() -> None:
    """What that of torch refuses, too; and a changed input without a gradient, after which autograd does not look."""
    for kind, choice in (("add", "full"), ("assign", "selective"), ("change", "full")):
        case = Case(at(0, kind), 1, options={"activation_checkpointing": choice})
        with patched(case.layers), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipeline_of(case, 2).step(batch(2)[0])
    case = Case(("below", "add", "run", "run"), 1, options={"activation_checkpointing": "full"})
    with patched(case.layers), pytest.raises(RuntimeError, match=r"of a checkpointed layer .* in place"):
        pipeline_of(case, 2).step(batch(2)[0])


FIRST, LAST = [*range(LATER, LATER + 4), *range(4)], [*range(LATER - 6, LATER + 2)]
"""Positions with which a layer marked "?" behaves so on the first or the second of two slices only."""
UNEVEN = [
    ("skip?", FIRST, "layer 0 does not treat .* alike: it runs on slice 1, and not on slice 0"),
    ("skip?", LAST, "layer 0 does not treat .* alike: it runs on slice 0, and not on slice 1"),
    ("below?", FIRST, "layer 0 does not treat .* alike: gradients do not reach it in slice 0, and do in a later one"),
]


def refused_of_microbatches_and_slices() -> None:
    case = Case(at(0, "add?"), 1, options=RECOMPUTE)
    ids, labels, positions = batch(2)
    with (
        patched(case.layers),
        pytest.raises(InputError, match=r"^schedule: 0F1 changes its input in place, which R needs again"),
    ):
        pipeline_of(case, 2).step(ids, labels, position_ids=positions)
    ids = torch.arange(2 * TOKENS).view(2, TOKENS)
    for kind, places, sentence in UNEVEN:
        case = Case(at(0, kind), processes=1, options={"slices": 2})
        with patched(case.layers):
            pipeline = pipeline_of(case, 1)
            with pytest.raises(InputError, match=f"^slices: 2, but {sentence}; expected 1"):
                pipeline.step(ids, position_ids=torch.tensor([places] * 2))
            pipeline.step(ids)  # the same pipeline goes on


@pytest.mark.parametrize("refused", [refused_by_checkpointing, refused_of_microbatches_and_slices])
def test_what_cannot_be_computed_again_or_in_slices_is_refused(refused: Callable[[], None]) -> None:
    run_processes(refused, 1)
