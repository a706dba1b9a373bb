"""Experts of one process: gradients of transformers' own ways to run them, and what waits between F, I and W."""

from __future__ import annotations

import inspect
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expert_layers import WIDTH, experts_of
from families import EXPERTS, tiny_config, whole_model
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.experts.adopt import adopt_experts
from evenpipe.experts.products import Groups, fill_grouped, grouped_outer, grouped_product
from evenpipe.layers.checkpointing import Switch, checkpointed
from evenpipe.layers.own_operations import WITHIN
from evenpipe.layers.weight_gradients import WeightGradients, split_layers
from evenpipe.model import gradient_errors

TOKENS = 24
WAYS = {"eager": torch.float64, "grouped_mm": torch.float32}
"""How transformers computes products of experts: one after the other, or at once."""
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6}
"""In fp32 weights come before the second product, not after it: the same numbers, rounded elsewhere."""


def routed(
    experts: Any, choices: int = 2, among: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """(hidden, chosen experts, their weights, gradient of the output)."""
    generator = torch.Generator().manual_seed(3)
    count = next(experts.parameters()).shape[0] if among is None else among
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    scores = torch.rand(TOKENS, count, generator=generator).to(dtype)
    weights, chosen = scores.topk(choices, dim=-1)
    return hidden, chosen, weights, torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)


def gradients(experts: Any, inputs: tuple[torch.Tensor, ...], queue: WeightGradients | None = None) -> dict[str, Any]:
    """Of all parameters, the input and the weights; through I and W where there is a queue."""
    experts.zero_grad()
    hidden, chosen, weights, gradient = inputs
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    if queue is None:
        output = experts(hidden, chosen, weights)
        output.backward(gradient)
    else:
        queue.under_way = (0, 0)
        output = experts(hidden, chosen, weights)
        queue.begin((0, 0))
        output.backward(gradient)
        queue.under_way = None
        assert all(parameter.grad is None for parameter in experts.parameters()), "nothing before W"
        queue.compute((0, 0))
    results = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return results | {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}


def adopted(experts: Any) -> WeightGradients:
    queue = WeightGradients()
    adopt_experts(experts, queue)
    return queue


def test_gradients_are_those_of_transformers(sample) -> None:
    """Of each way; and a backward that is not split has the same bits."""
    for family, way, choices in sample(itertools.product(EXPERTS, WAYS, (1, 2, 3))):
        dtype = WAYS[way]
        experts = experts_of(family, dtype, way)
        inputs = routed(experts, choices, dtype=dtype)
        expected, queue = gradients(experts, inputs), adopted(experts)
        whole, split = gradients(experts, inputs), gradients(experts, inputs, queue)
        assert max(gradient_errors(split, expected).values()) < TOLERANCE[dtype], (family, way, choices)
        assert all(torch.equal(whole[name], split[name]) for name in whole), (family, way, choices)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_choices_of_no_expert_add_nothing_and_an_expert_without_tokens_gets_zeros(way, split) -> None:
    dtype = WAYS[way]
    experts = experts_of("gpt_oss", dtype, way)
    hidden, chosen, weights, gradient = routed(experts, among=3, dtype=dtype)
    absent = torch.arange(TOKENS) % 3 == 0
    expected = gradients(experts, (hidden, chosen, torch.where(absent[:, None], 0, weights), gradient))
    queue = adopted(experts)
    inputs = hidden, torch.where(absent[:, None], 4, chosen), weights, gradient
    results = gradients(experts, inputs, queue if split else None)
    assert not results["output"][absent].any() and not results["weights"][absent].any()
    expected["weights"][absent] = 0
    assert max(gradient_errors(results, expected).values()) < TOLERANCE[dtype]
    for name, parameter in experts.named_parameters():
        assert results[name].shape == parameter.shape and not results[name][3].any()


def test_what_torch_cannot_multiply_at_once_is_multiplied_one_by_one(sample) -> None:
    """fp64, and rows that are not whole 16 bytes; transformers' default raises there."""
    narrow = {"moe_intermediate_size": 6, "intermediate_size": 6}
    for family, dtype in sample(itertools.product(EXPERTS, (torch.float64, torch.float32))):
        changes = narrow if dtype == torch.float32 else {}
        experts, same = (experts_of(family, dtype, way, **changes) for way in ("grouped_mm", "eager"))
        inputs = routed(experts, dtype=dtype)
        with pytest.raises(RuntimeError, match=r"got Double|multiple of 16 bytes"):
            gradients(experts, inputs)
        expected, queue = gradients(same, inputs), adopted(experts)
        errors = gradient_errors(gradients(experts, inputs, queue), expected)
        assert max(errors.values()) < TOLERANCE[dtype], (family, dtype)


def test_experts_train_where_nothing_before_them_does() -> None:
    experts = experts_of("mixtral")
    hidden, chosen, weights, gradient = routed(experts)
    adopted(experts)
    experts(hidden, chosen, weights).backward(gradient)
    assert all(parameter.grad is not None for parameter in experts.parameters())


@pytest.mark.parametrize("split", [False, True])
def test_hooks_of_parameters_run_once_and_find_a_gradient(split) -> None:
    """As those that add the gradient of a copy in bf16 to its master."""
    experts, seen = experts_of("gpt_oss"), []
    for name, parameter in experts.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda hooked, name=name: seen.append((name, hooked.grad is not None))
        )
    queue = adopted(experts)
    gradients(experts, routed(experts), queue if split else None)
    assert sorted(seen) == sorted((name, True) for name, _ in experts.named_parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("choice", ["full", "selective"])
@pytest.mark.sampled
def test_checkpointed_experts_compute_the_same(family, choice, way) -> None:
    """Biases are added to the first product in place, which "selective" keeps."""
    experts = experts_of(family, WAYS[way], way)
    inputs, queue = routed(experts, dtype=WAYS[way]), adopted(experts)
    expected = gradients(experts, inputs, queue)
    experts.forward = checkpointed(experts.forward, choice, Switch(), torch.device("cpu"))
    for results in (gradients(experts, inputs), gradients(experts, inputs, queue)):
        assert all(torch.equal(result, expected[name]) for name, result in results.items())


def test_selective_checkpointing_repeats_no_product() -> None:
    experts = experts_of("mixtral", torch.float32, "grouped_mm")
    adopted(experts)
    hidden, chosen, weights, gradient = routed(experts, dtype=torch.float32)
    with Products() as products:
        forward = checkpointed(experts, "selective", Switch(), torch.device("cpu"))
        output = forward(hidden.requires_grad_(), chosen, weights)
        assert products.count == 2
        output.backward(gradient)
    assert products.count == 2 + 4


class Products(TorchDispatchMode):
    """Counts grouped products, also inside of our own operations."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._grouped_mm.default
        with self if operation.name() in WITHIN else nullcontext():
            return WITHIN.get(operation.name(), operation)(*args, **(kwargs or {}))


def test_what_is_kept_until_the_backward_and_what_waits_for_w() -> None:
    """n (h + 2 k f + k) elements, of which h are the input; then b (2 n h + k n (2 f + f) + k n) bytes; both
    beside integers."""
    experts = experts_of("mixtral")
    hidden, chosen, weights, gradient = routed(experts)
    queue = adopted(experts)
    hidden.requires_grad_()
    kept: list[torch.Tensor] = []
    queue.under_way = (0, 0)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        output = experts(hidden, chosen, weights)
    assert [tuple(saved.shape) for saved in kept] == [(TOKENS, WIDTH), (2 * TOKENS, 2 * 96), (2 * TOKENS,)]
    assert kept[0].data_ptr() == hidden.data_ptr()
    queue.begin((0, 0))
    output.backward(gradient)
    queue.under_way = None
    (entry,) = queue._entries[0, 0]
    cells = [cell.cell_contents for cell in inspect.unwrap(entry.gradients).__closure__]
    held = [content for content in cells if isinstance(content, torch.Tensor)]
    assert all(tensor.grad_fn is None for tensor in held)
    assert sorted(tuple(tensor.shape) for tensor in held) == sorted(
        [(TOKENS, WIDTH), (TOKENS, WIDTH), (2 * TOKENS, 2 * 96), (2 * TOKENS, 96), (2 * TOKENS,)]
    )
    queue.compute((0, 0))
    assert not len(queue)


def test_frozen_experts_leave_nothing() -> None:
    experts = experts_of("gpt_oss")
    inputs = routed(experts)
    experts.gate_up_proj.requires_grad_(False)
    experts.down_proj_bias.requires_grad_(False)
    expected, queue = gradients(experts, inputs), adopted(experts)
    results = gradients(experts, inputs, queue)
    assert results["gate_up_proj"] is None and results["down_proj_bias"] is None
    assert max(gradient_errors(results, expected).values()) < 1e-14


@pytest.mark.parametrize(("family", "router"), [("mixtral", "gate"), ("gpt_oss", "router")])
def test_only_the_routers_are_not_split(family, router) -> None:
    model = whole_model(tiny_config(family)).base_model
    queue = WeightGradients()
    experts = adopt_experts(model, queue)
    others = [name for name in split_layers(model, queue) if name not in experts]
    assert others == ["embed_tokens.weight", *(f"layers.{index}.mlp.{router}.weight" for index in range(4))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_by_group(dtype) -> None:
    """Against a loop over the groups; in fp64 that loop is the implementation. Rows of a part are written to their
    places, and others stay as they are."""
    torch.manual_seed(0)
    rows, matrices, right = (torch.randn(*shape).to(dtype) for shape in ((12, 16), (4, 16, 8), (12, 8)))
    for ends in ([5, 5, 9, 12], [0, 12, 12, 12], [0, 0, 0, 12]):
        stops = Groups(torch.tensor(ends, dtype=torch.int32))
        products, outer = grouped_product(rows, matrices, stops), grouped_outer(rows, right, stops)
        for expert, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            torch.testing.assert_close(products[start:end], rows[start:end] @ matrices[expert])
            torch.testing.assert_close(outer[expert], rows[start:end].t() @ right[start:end])
    whole = grouped_product(rows, matrices, Groups(torch.tensor([5, 5, 9, 12], dtype=torch.int32)))
    places = torch.tensor([0, 1, 2, 7, 8, 9])  # of the experts 0, 2, 2, 3
    part = torch.full_like(whole, 7.0)
    fill_grouped(part, places, rows[places], matrices, Groups(torch.tensor([3, 3, 5, 6], dtype=torch.int32)))
    others = torch.ones(12, dtype=torch.bool)
    others[places] = False
    torch.testing.assert_close(part[places], whole[places])
    assert (part[others] == 7.0).all()
