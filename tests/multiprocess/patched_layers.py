"""Decoder layers of Llama that do something of their own with the hidden states, and what one process makes of them.

Layers behave by their number, and if wanted only on some microbatches, which they know by their positions. Modules of a
user that do so are among the pipelines of tests/fuzz.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from small_llama import llama as small_llama
from torch import Tensor
from torch.nn import functional
from transformers.models.llama import modeling_llama

from evenpipe import Pipeline
from evenpipe.layers.compilation import compile_layer
from evenpipe.model import describe
from evenpipe.runtime import device
from evenpipe.schedule import add_recompute, add_slices, generate

VOCABULARY, TOKENS = 61, 8
LATER = 16
"""First position of every second microbatch."""
SEED = 3
"""Of what layers draw."""
Behaviour = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]
"""From a layer's own forward, its input, and one of its weights [hidden_size]."""


@dataclass(frozen=True)
class Case:
    """A pipeline. `layers`: a behaviour for each; "?" behind it: only on every second microbatch."""

    layers: tuple[str, ...]
    processes: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the pipeline; and "tied" weights, and "recompute" for an order with R before every backward."""

    def __str__(self) -> str:
        return f"{' '.join(self.layers)} on {self.processes} with {dict(self.options)}"


@contextmanager
def patched(layers: tuple[str, ...], behaviours: Mapping[str, Behaviour]) -> Iterator[None]:
    """Let the decoder layers of Llama behave so."""
    own = modeling_llama.LlamaDecoderLayer.forward

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def run(hidden: Tensor) -> Tensor:
            return own(layer, hidden, *args, **kwargs)

        kind = layers[layer.self_attn.layer_idx % len(layers)]
        if kind.endswith("?") and int(kwargs["position_ids"].max()) < LATER:
            return run(hidden_states)
        return behaviours[kind.removesuffix("?")](run, hidden_states, layer.input_layernorm.weight)

    with mock.patch.object(modeling_llama.LlamaDecoderLayer, "forward", forward):
        yield


# --- one process ------------------------------------------------------------------------------------------------------


@cache
def llama(layers: int, tied: bool = False) -> Any:
    return small_llama(VOCABULARY, tied, torch.float64, layers)


def batch(microbatches: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and position ids of two sequences per microbatch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (2 * microbatches, TOKENS), generator=generator)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    positions = torch.arange(TOKENS).repeat(len(ids), 1)
    positions[[row for row in range(len(ids)) if row // 2 % 2]] += LATER
    return ids, labels, positions


@dataclass(frozen=True)
class Expected:
    loss: float
    gradients: dict[str, Tensor | None]


def one_process(case: Case, behaviours: Mapping[str, Behaviour], microbatches: int, replicas: int = 1) -> Expected:
    """Microbatch after microbatch, through the same layers."""
    model = copy.deepcopy(llama(len(case.layers), case.options.get("tied", False)))
    data = [batch(microbatches, 1 + replica) for replica in range(replicas)]
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels, _ in data)
    total = 0.0
    torch.manual_seed(SEED)
    with patched(case.layers, behaviours):
        for of_replica in data:
            for ids, labels, positions in zip(*(part.split(2) for part in of_replica), strict=True):
                logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].flatten(0, 1)
                loss = functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / count
                if loss.requires_grad:
                    loss.backward()
                total += loss.item()
    return Expected(total, {name: parameter.grad for name, parameter in model.named_parameters()})


# --- a pipeline -------------------------------------------------------------------------------------------------------


def pipeline_of(case: Case, behaviours: Mapping[str, Behaviour], microbatches: int, **defaults: Any) -> Pipeline:
    """Inside of `patched`."""
    options = {"parameter_dtype": torch.float64, "microbatches": microbatches, "self_check": False} | defaults
    options |= case.options
    options.pop("tied", None)
    if options.pop("recompute", False):
        slices = options.pop("slices", 1)
        others = math.prod(options.get(axis, 1) for axis in ("tensor_parallel", "context_parallel", "replicas"))
        order = generate(options.get("schedule", "1f1b"), case.processes // others, microbatches * slices)
        options["schedule"] = add_recompute(add_slices(order, slices))
    return Pipeline(describe(llama(len(case.layers), case.options.get("tied", False))), **options)


def faults_of_cases(cases: Sequence[Case], behaviours: Mapping[str, Behaviour]) -> list[str]:
    """What is wrong with these cases, for `check_cases`."""
    faults: list[str] = []
    for case in cases:
        try:
            faults += faults_of(case, behaviours)
        except Exception as error:
            error.add_note(str(case))
            raise
    return faults


def faults_of(
    case: Case, behaviours: Mapping[str, Behaviour], microbatches: int = 4, tolerance: float = 1e-10
) -> list[str]:
    """Return what is wrong with loss and gradients of a step, as the first process sees it."""
    compiled = partial(compile_layer, backend="aot_eager")
    with patched(case.layers, behaviours), mock.patch.object(device, "compile_layer", compiled):
        pipeline = pipeline_of(case, behaviours, microbatches)
        try:
            ids, labels, positions = batch(microbatches, 1 + pipeline.replica)
            torch.manual_seed(SEED)
            loss = float(pipeline.step(ids, labels, position_ids=positions).loss)
            found = pipeline.full_gradients()
            absent = {name for name, parameter in pipeline.named_parameters() if parameter.grad is None}
            evaluated = float(pipeline.evaluate(ids, labels, position_ids=positions).loss)
            feeds, replicas = pipeline._is_very_first, pipeline.replicas
        finally:
            pipeline.close()
    if not feeds:
        return []
    expected = one_process(case, behaviours, microbatches, replicas)
    errors = {name: _error(found.get(name), gradient) for name, gradient in expected.gradients.items()}
    errors["the loss"] = abs(loss / expected.loss - 1)
    if not any(kind.endswith("?") or kind == "random" for kind in case.layers):  # evaluation cuts batches otherwise
        errors["the loss of evaluation"] = abs(evaluated / expected.loss - 1)
    if case.processes == 1:  # earlier stages get zeros, earlier layers of the same stage nothing
        missing = {name for name, gradient in expected.gradients.items() if gradient is None and "layers." in name}
        errors |= dict.fromkeys(missing ^ {name for name in absent if "layers." in name}, math.inf)
    wrong = [name for name, error in errors.items() if not error <= tolerance]
    return [f"{case}: {name} is off by {errors[name]:.1e}, with {len(wrong)} wrong" for name in wrong[:1]]


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    """Relative to the norm of what is expected; a parameter without a gradient there may have zeros here."""
    if expected is None or not expected.any():
        return 0.0 if found is None else float(found.norm())
    return float("inf") if found is None else float((found - expected).norm() / expected.norm())
