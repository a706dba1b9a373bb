"""The experts of a layer in closed form against the function itself, with real tensors, byte by byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from evenpipe.experts.function import Call, Overlap, run
from evenpipe.experts.layout import alone
from evenpipe.layers.checkpointing import Switch, checkpointed
from evenpipe.layers.weight_gradients import WeightGradients
from evenpipe.memory.operations import Operations
from evenpipe.memory.own_experts import ExpertSizes, OwnExperts
from evenpipe.memory.sketch import Sketch, Tape
from evenpipe.memory.tracker import Tracker

TOKENS, CHOICES, EXPERTS, HIDDEN, INNER = 24, 3, 5, 64, 40
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SHAPES = [
    SimpleNamespace(gated=True, bias=False, transposed=False),
    SimpleNamespace(gated=False, bias=False, transposed=False),
    SimpleNamespace(gated=True, bias=True, transposed=True),
    SimpleNamespace(gated=False, bias=True, transposed=False),
]
KEY = (0, 0)


class Experts(nn.Module):
    """What the function reads of a module of transformers."""

    def __init__(self, shape: Any, dtype: torch.dtype) -> None:
        super().__init__()
        first = (2 if shape.gated else 1) * INNER
        self.is_transposed, self.has_bias, self.has_gate = shape.transposed, shape.bias, shape.gated
        self.act_fn = functional.silu
        names = ("gate_up_proj" if shape.gated else "up_proj", "down_proj")
        for name, inputs, outputs in zip(names, (HIDDEN, INNER), (first, HIDDEN), strict=True):
            sizes = (inputs, outputs) if shape.transposed else (outputs, inputs)
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *sizes).to(dtype)))
            if shape.bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, outputs).to(dtype)))

    def _apply_gate(self, first: Tensor) -> Tensor:
        gate, up = first.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def counted(shape: Any, dtype: torch.dtype, weight: torch.dtype, choice: str, *, split: bool) -> dict[str, int]:
    experts, queue = Experts(shape, dtype), WeightGradients()
    index = torch.rand(TOKENS, EXPERTS).topk(CHOICES).indices
    for one in experts.parameters():
        one.grad = torch.zeros_like(one)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weights = torch.rand(TOKENS, CHOICES).to(weight).requires_grad_()

    def forward(hidden: Tensor, weights: Tensor) -> Tensor:
        return run(Call(experts, alone(index, EXPERTS), None, Overlap(), queue if split else None), hidden, weights)

    if choice != "none":
        forward = checkpointed(forward, choice, Switch(), torch.device("cpu"))
    found = {}
    with Tracker() as tracker:
        tracker.add(hidden, weights, *experts.parameters(), *(one.grad for one in experts.parameters()))
        with torch.no_grad(), tracker.span() as bare:
            forward(hidden, weights)
        with tracker.span() as span:
            output = forward(hidden, weights)
        found |= {"bare forward": bare.above, "kept": span.kept, "forward": span.above}
        edge, gradient = get_gradient_edge(output), torch.ones_like(output)
        del output
        queue.begin(KEY)
        with tracker.span() as span:
            torch.autograd.backward((edge,), (gradient,))
        found["backward"] = span.above
        del edge, gradient
        hidden.grad = weights.grad = None
        before = tracker.live
        with tracker.span() as span:
            queue.compute(KEY)
        found |= {"weight": span.above, "queued": before - tracker.live}
    return found


def sketched(shape: Any, element: int, weight: int, choice: str, *, split: bool) -> dict[str, int]:
    sizes = ExpertSizes(
        tokens=TOKENS, choices=CHOICES, experts=EXPERTS, hidden=HIDDEN, inner=INNER,
        gated=shape.gated, bias=shape.bias, element=element, weight=weight,
    )  # fmt: skip
    tape = Tape()
    meter, tape.queue = tape.meter, [] if split else None
    operations = Operations(tape)

    def gate(first: Sketch) -> Sketch:
        if not shape.gated:
            return operations.elementwise(first)
        gate, up = operations.parts(first, [first.elements // 2] * 2)
        return operations.times(operations.elementwise(gate), up)

    experts = OwnExperts(tape, sizes, gate)
    hidden, weights = tape.new(TOKENS * HIDDEN, element), tape.new(TOKENS * CHOICES, weight)
    hidden.node, weights.node = tape.leaf(), tape.leaf()
    found, output = {}, None
    for name in ("bare forward", "forward"):
        tape.recording, output = name == "forward", None
        meter.reset()
        before = meter.live
        if choice == "none" or not tape.recording:
            output = experts(hidden, weights)
        else:
            output = tape.checkpointed(experts, hidden, weights, keeps_products=choice == "selective")
        found |= {name: meter.peak - before, "kept": meter.live - before}
    root, gradient = output.node, [tape.new(*output.size)]
    held = gradient[0]
    del output
    meter.reset()
    before = meter.live
    del experts
    tape.backward(root, gradient)
    found["backward"] = meter.peak - before
    del root, held
    meter.reset()
    before = meter.live
    while tape.queue:
        tape.queue.pop().compute()
    found["weight"] = meter.peak - before
    return found | {"queued": before - meter.live}


CASES = [
    (shape, dtype, weight, choice, split)
    for shape in SHAPES
    for dtype, weight in (*((name, name) for name in DTYPES), ("bf16", "fp32"), ("fp64", "fp32"))
    for choice in ("none", "full", "selective")
    for split in (False, True)
]


def test_allocates_what_the_function_does(sample) -> None:
    wrong = []
    for case in sample(CASES, 20):
        shape, dtype, weight, choice, split = case
        real = counted(shape, DTYPES[dtype], DTYPES[weight], choice, split=split)
        ours = sketched(shape, DTYPES[dtype].itemsize, DTYPES[weight].itemsize, choice, split=split)
        if ours != real:
            wrong.append((case, ours, real))
    assert wrong == []
