"""Plain layers that hand on several tensors of different widths and dtypes, with and without gradients.

Loss and all gradients are those of the same modules in one process, whatever the schedule, and wherever stages are cut.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import transformers
from families import COMMON, GROUPED, whole_model
from harness import check_cases, run_processes
from torch import Tensor, nn
from torch.nn import functional

from evenpipe import EdgeTensor, InputError, OffloadOptions, Pipeline
from evenpipe.layers import compilation
from evenpipe.memory.traced import StageTracer, Tracing
from evenpipe.model import describe, describe_modules, gradient_errors
from evenpipe.schedule import add_recompute, generate

VOCABULARY, WIDTH, NARROW, KINDS = 37, 12, 5, 7
LAYERS, MICROBATCHES, TOKENS = 8, 4, 6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Layer(nn.Module):
    """Reads and changes four tensors. The first layer makes all but the hidden states."""

    def __init__(self, dtype: torch.dtype, in_place: bool) -> None:
        super().__init__()
        self.mix, self.up = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Linear(NARROW, WIDTH, dtype=dtype)
        self.down = nn.Linear(WIDTH, NARROW, dtype=dtype)
        self.table = nn.Embedding(KINDS, WIDTH, dtype=dtype)
        self._in_place = in_place

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor | None = None,
        choices: Tensor | None = None,
        size: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if memory is None or choices is None or size is None:
            memory = hidden.new_zeros(*hidden.shape[:2], NARROW, dtype=torch.float64)
            choices = hidden.detach().argmax(-1) % KINDS
            size = hidden.detach().float().norm(dim=(1, 2))
        elif self._in_place:
            memory.mul_(0.75)
            choices.add_(1).remainder_(KINDS)
        memory = 0.5 * memory + torch.tanh(self.down(hidden)).double()
        read = self.up(memory.to(hidden.dtype)) + self.table(choices)
        hidden = hidden + torch.tanh(self.mix(hidden) + read) / (1 + size[:, None, None].to(hidden.dtype))
        return hidden, memory * 0.9, (choices + hidden.detach().argmax(-1)) % KINDS, size * 1.25


EDGE_TENSORS = (
    EdgeTensor("memory", ("sequences", "tokens", NARROW), torch.float64),
    EdgeTensor("choices", ("sequences", "tokens"), torch.int64),
    EdgeTensor("size", ("sequences",), torch.float32, has_gradient=False),
)


@dataclass(frozen=True)
class Case:
    """A pipeline; "recompute" among the options: an order with R before every backward."""

    processes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    in_place: bool = False


def modules(case: Case) -> tuple[nn.Embedding, list[nn.Module], nn.Module, nn.Linear]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer(case.dtype, case.in_place) for _ in range(LAYERS)]
    head = nn.Linear(WIDTH, VOCABULARY, dtype=case.dtype)
    return nn.Embedding(VOCABULARY, WIDTH, dtype=case.dtype), layers, nn.LayerNorm(WIDTH, dtype=case.dtype), head


def one_process(case: Case, ids: Tensor, labels: Tensor) -> tuple[float, dict[str, Tensor]]:
    embedding, layers, norm, head = modules(case)
    tensors: tuple[Tensor, ...] = (embedding(ids),)
    for layer in layers:
        tensors = layer(*tensors)
    logits = head(norm(tensors[0]))[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    whole = {"embedding": embedding, "layers": nn.ModuleList(layers), "norm": norm, "head": head}
    return loss.item(), {
        f"{name}.{inner}": parameter.grad
        for name, module in whole.items()
        for inner, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def faults_of_cases(cases: list[Case]) -> list[str]:
    # Other backends round the fp32 tensor in another way.
    compiled = partial(compilation.compile_layer, backend="aot_eager")
    with mock.patch.object(compilation, "compile_layer", compiled):
        return [fault for case in cases for fault in faults_of(case)]


def faults_of(case: Case) -> list[str]:
    options = {"microbatches": MICROBATCHES, "parameter_dtype": case.dtype, "schedule": "1f1b", **case.options}
    if options.pop("recompute", False):
        order = generate(options["schedule"], case.processes, MICROBATCHES)
        options["schedule"] = add_recompute(order)
    pipeline = Pipeline.from_modules(*modules(case), edge_tensors=EDGE_TENSORS, **options)
    ids, labels = reference.batches(VOCABULARY, 2 * MICROBATCHES, TOKENS, 1)[0]
    loss, evaluated = float(pipeline.step(ids, labels).loss), float(pipeline.evaluate(ids, labels).loss)
    gradients = pipeline.full_gradients()
    pipeline.close()
    if torch.distributed.get_rank():
        return []
    expected_loss, expected = one_process(case, ids, labels)
    error, name = reference.worst({name: gradients[name] for name in expected}, expected)
    errors = {name: error, "loss": abs(loss / expected_loss - 1), "evaluation": abs(evaluated / expected_loss - 1)}
    limit = TOLERANCE[case.dtype]
    return [f"{case}: {name} is off by {error:.1e}" for name, error in errors.items() if not error <= limit]


HOST = OffloadOptions(activations="all")
CASES = [
    Case(2),
    Case(1, {"schedule": "interleaved", "schedule_options": {"stages_per_device": 4}}),
    *(Case(4, {"schedule": schedule}) for schedule in ("1f1b", "zb-h1", "interleaved", "zbv", "dualpipe-v")),
    Case(3, {"schedule": "zbv", "vocabulary": "first-last"}),
    Case(2, {"schedule": "zbv", "activation_checkpointing": "full"}),
    Case(2, {"schedule": "zb-h1", "activation_checkpointing": "selective"}),
    Case(4, {"activation_checkpointing": "full", "vocabulary": "vocab-1"}, torch.float32),
    Case(2, {"schedule": "zbv", "recompute": True}),
    Case(2, {"schedule": "zbv", "recompute": True}, in_place=True),
    Case(2, {"schedule": "zbv"}, in_place=True),
    Case(2, {"recompute": True, "offload": HOST}, in_place=True),
    Case(2, {"offload": HOST, "schedule": "interleaved"}),
    Case(2, {"compile_layers": True, "activation_checkpointing": "full"}),
    Case(2, {"layers_per_stage": [0, 3, 5, 0], "schedule": "interleaved"}),
    Case(4, {"dp": 2, "data_parallel": "shard", "schedule": "zbv"}, torch.float32),
]


def test_gradients_are_those_of_one_process(sample) -> None:
    check_cases(faults_of_cases, sample(CASES, 6))


ZAYA = {
    **GROUPED,
    "moe_intermediate_size": 32,
    "router_hidden_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "pad_token_id": 0,
}
OPT = {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "dropout": 0.0}
FAMILIES = [
    ("zaya", ZAYA, 2, {"schedule": "zbv", "activation_checkpointing": "full"}),
    ("zaya", ZAYA, 2, {"schedule": "interleaved", "layers_per_stage": [0, 3, 1, 0], "offload": HOST}),
    ("zaya", ZAYA, 4, {"dp": 2, "ep": 2}),
    ("opt", OPT, 4, {"schedule": "zb-h1", "activation_checkpointing": "full"}),
    ("opt", OPT, 4, {"tp": 2, "layers_per_stage": [4, 0]}),
    ("opt", OPT, 2, {"vocabulary": "first-last", "layers_per_stage": [0, 4]}),
]


def family_is_trained(model_type: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Zaya's layers hand a second tensor on; OPT 350m has hidden states wider than the embedding."""
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config._experts_implementation = "eager"  # the grouped product of experts takes no fp64
    model = whole_model(config)
    pipeline = Pipeline(model, parameter_dtype=torch.float64, microbatches=2, **options)
    data = [
        reference.batches(settings["vocab_size"], 4, TOKENS, 1, seed=1 + one)[0] for one in range(pipeline.replicas)
    ]
    loss, gradients = float(pipeline.step(*data[pipeline.replica]).loss), pipeline.full_gradients()
    pipeline.close()
    if torch.distributed.get_rank() == 0:
        ids, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
        expected = reference.train(model, [(ids, labels)])
        assert loss == pytest.approx(expected.losses[0], rel=1e-10)
        errors = gradient_errors({name: gradients[name] for name in expected.gradients}, expected.gradients)
        assert max(errors.values()) <= TOLERANCE[torch.float64], errors


@pytest.mark.parametrize(("model_type", "settings", "processes", "options"), FAMILIES)
@pytest.mark.sampled(2)
def test_families(model_type: str, settings: dict[str, Any], processes: int, options: dict[str, Any]) -> None:
    run_processes(family_is_trained, processes, model_type, settings, options)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused_on_tensor_ranks() -> None:
    model = whole_model(transformers.AutoConfig.for_model("zaya", **ZAYA))
    with pytest.raises(InputError, match="tp is 2; it must be 1 for 2 stages of ZayaForCausalLM"):
        Pipeline(model, microbatches=2, tp=2, self_check=False)


def test_a_second_tensor_does_not_travel_between_tensor_ranks() -> None:
    run_processes(refused_on_tensor_ranks, 4)


def test_estimates_of_memory_know_hidden_states_only() -> None:
    tracing = Tracing(sequence=TOKENS, compute_dtype=torch.float32)
    for model_type, settings in (("zaya", ZAYA), ("opt", OPT)):
        description = describe(transformers.AutoConfig.for_model(model_type, **settings))
        with pytest.raises(InputError, match="memory is estimated only for hidden states as wide as the embedding"):
            StageTracer(description, tracing)


def refused_by_processes() -> None:
    """Each process declares another width."""
    memory = EdgeTensor("memory", ("sequences", "tokens", NARROW + torch.distributed.get_rank()), torch.float64)
    with pytest.raises(InputError, match=r"stages 0 and 1 disagree .*, 5\] torch.*; or .*, 6\] torch"):
        Pipeline.from_modules(*modules(Case(2)), edge_tensors=[memory, *EDGE_TENSORS[1:]], microbatches=2)


def test_ends_that_disagree_are_refused() -> None:
    run_processes(refused_by_processes, 2)


class Returns(nn.Module):
    """Returns something else than it declares."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.linear, self._what = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), what

    def forward(self, hidden: Tensor, *others: Tensor) -> Any:
        return self._what(self.linear(hidden))


SHOWN = "hidden [sequences, tokens, 12] torch.float64, sums [sequences] torch.float32 without gradient"
WRONG = [
    (lambda hidden: hidden, f"1 tensor; expected {SHOWN}"),
    (lambda hidden: (hidden, hidden, hidden), f"3 tensors; expected {SHOWN}"),
    (lambda hidden: (hidden, None), "a NoneType; expected sums"),
    (lambda hidden: (hidden, hidden.detach().sum(-1).float()), r"[2, 6] torch.float32; expected sums"),
    (lambda hidden: (hidden, hidden.detach().sum((1, 2))), r"[2] torch.float64; expected sums"),
    (lambda hidden: (hidden, hidden.sum((1, 2)).float()), r"a tensor with a gradient; expected sums"),
]


@pytest.mark.parametrize(("what", "sentence"), WRONG)
def test_layers_that_return_something_else_are_refused(what: Any, sentence: str) -> None:
    embedding, _, norm, head = modules(Case(1))
    sums = EdgeTensor("sums", ("sequences",), torch.float32, has_gradient=False)
    layers = [Returns(what), Returns(what)]
    options = {"microbatches": 1, "parameter_dtype": torch.float64}
    ids = torch.zeros(2, TOKENS, dtype=torch.int64)
    pipeline = Pipeline.from_modules(embedding, layers, norm, head, edge_tensors=[sums], **options)
    with contextlib.closing(pipeline), pytest.raises(InputError) as caught:
        pipeline.step(ids)
    assert f"Layer 0 returned {sentence}" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "dtype", "has_gradient", "sentence"),
    [
        (("batch", 3), torch.float32, None, "shape of x"),
        ((0,), torch.float32, None, "shape of x"),
        ((3,), "fp32", None, "dtype of x"),
        ((3,), torch.int64, True, "has_gradient of x is true; it must be False for torch.int64"),
    ],
)
def test_forms_that_make_no_sense(shape: Any, dtype: Any, has_gradient: bool | None, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        EdgeTensor("x", shape, dtype, has_gradient)


def test_the_description_keeps_what_is_declared() -> None:
    description = describe_modules(*modules(Case(1)), EDGE_TENSORS)
    carried = [str(description.edge(layer, torch.float64)) for layer in (0, 1, LAYERS - 1, LAYERS)]
    hidden = "hidden [sequences, tokens, 12] torch.float64"
    assert carried[0] == carried[3] == hidden
    assert carried[1] == carried[2] == ", ".join((hidden, *map(str, EDGE_TENSORS)))
    assert copy.copy(description.edge(1, torch.float64)) == description.edge(1, torch.float64)
