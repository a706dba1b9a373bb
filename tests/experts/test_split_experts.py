"""Experts of one process: gradients of transformers' own ways to run them, and what waits between F, I and W."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import EXPERTS, tiny_config, whole_model
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.experts.adopt import adopt_experts
from evenpipe.experts.products import Groups, fill_grouped, grouped_outer, grouped_product
from evenpipe.layers.checkpointing import Switch, checkpointed
from evenpipe.layers.own_operations import WITHIN
from evenpipe.layers.weight_gradients import WeightGradients, split_layers
from evenpipe.model import gradient_errors

TOKENS, WIDTH = 24, 64
ONE_AFTER_THE_OTHER = ("eager", torch.float64)
AT_ONCE = ("grouped_mm", torch.float32)


def experts_of(family: str, implementation: str, dtype: torch.dtype, **changes: Any) -> Any:
    """The experts of the last layer of a tiny model."""
    config = tiny_config(family, **changes)
    config._experts_implementation = implementation
    model = whole_model(config, dtype)
    return next(module for module in model.base_model.layers[-1].modules() if hasattr(module, "_apply_gate"))


def routed(experts: Any, dtype: torch.dtype, choices: int, among: int | None = None) -> tuple[torch.Tensor, ...]:
    """(hidden, chosen experts, their weights, gradient of the output)."""
    generator = torch.Generator().manual_seed(3)
    count = next(experts.parameters()).shape[0] if among is None else among
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    scores = torch.rand(TOKENS, count, generator=generator).to(dtype)
    weights, chosen = scores.topk(choices, dim=-1)
    return hidden, chosen, weights, torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)


def gradients(experts: Any, given: tuple[torch.Tensor, ...], queue: WeightGradients | None = None) -> dict[str, Any]:
    """Of all parameters, the input and the weights; through I and W where there is a queue."""
    experts.zero_grad()
    hidden, chosen, weights, gradient = given
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
    found = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return found | {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_gradients_are_those_of_one_product_after_the_other(family, choices) -> None:
    experts = experts_of(family, *ONE_AFTER_THE_OTHER)
    given = routed(experts, torch.float64, choices)
    expected, queue = gradients(experts, given), WeightGradients()
    adopt_experts(experts, queue)
    assert max(gradient_errors(gradients(experts, given, queue), expected).values()) < 1e-14


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_gradients_are_those_of_grouped_products(family, choices) -> None:
    """Weights come before the second product, not after it: the same numbers, rounded elsewhere."""
    experts = experts_of(family, *AT_ONCE)
    given = routed(experts, torch.float32, choices)
    expected, queue = gradients(experts, given), WeightGradients()
    adopt_experts(experts, queue)
    assert max(gradient_errors(gradients(experts, given, queue), expected).values()) < 1e-6


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize(("implementation", "dtype"), [ONE_AFTER_THE_OTHER, AT_ONCE])
def test_a_backward_that_is_not_split_has_the_same_bits(family, implementation, dtype) -> None:
    experts, queue = experts_of(family, implementation, dtype), WeightGradients()
    given = routed(experts, dtype, 2)
    adopt_experts(experts, queue)
    whole, split = gradients(experts, given), gradients(experts, given, queue)
    assert all(torch.equal(whole[name], split[name]) for name in whole)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("implementation", "dtype"), [ONE_AFTER_THE_OTHER, AT_ONCE])
def test_a_choice_of_no_expert_adds_nothing(implementation, dtype, split) -> None:
    experts, queue = experts_of("mixtral", implementation, dtype), WeightGradients()
    hidden, chosen, weights, gradient = routed(experts, dtype, 2)
    count = experts.gate_up_proj.shape[0]
    absent = torch.arange(TOKENS) % 3 == 0
    expected = gradients(experts, (hidden, chosen, torch.where(absent[:, None], 0, weights), gradient))
    adopt_experts(experts, queue)
    given = hidden, torch.where(absent[:, None], count, chosen), weights, gradient
    found = gradients(experts, given, queue if split else None)
    assert not found["output"][absent].any() and not found["weights"][absent].any()
    expected["weights"][absent] = 0
    assert max(gradient_errors(found, expected).values()) < (1e-14 if dtype == torch.float64 else 1e-6)


def test_experts_train_where_nothing_before_them_does() -> None:
    experts, queue = experts_of("mixtral", *ONE_AFTER_THE_OTHER), WeightGradients()
    hidden, chosen, weights, gradient = routed(experts, torch.float64, 2)
    adopt_experts(experts, queue)
    experts(hidden, chosen, weights).backward(gradient)
    assert all(parameter.grad is not None for parameter in experts.parameters())


@pytest.mark.parametrize(("implementation", "dtype"), [ONE_AFTER_THE_OTHER, AT_ONCE])
def test_an_expert_that_no_token_meets_gets_zeros(implementation, dtype) -> None:
    experts = experts_of("gpt_oss", implementation, dtype)
    given, queue = routed(experts, dtype, 2, among=3), WeightGradients()
    expected = gradients(experts, given)
    adopt_experts(experts, queue)
    found = gradients(experts, given, queue)
    for name, parameter in experts.named_parameters():
        assert not found[name][3].any() and not expected[name][3].any() and found[name].shape == parameter.shape


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize(
    ("dtype", "changes"), [(torch.float64, {}), (torch.float32, {"moe_intermediate_size": 6, "intermediate_size": 6})]
)
def test_what_torch_cannot_multiply_at_once_is_multiplied_one_by_one(family, dtype, changes) -> None:
    """fp64, and rows that are not whole 16 bytes; transformers' default raises there."""
    experts = experts_of(family, "grouped_mm", dtype, **changes)
    given = routed(experts, dtype, 2)
    with pytest.raises(RuntimeError, match=r"got Double|multiple of 16 bytes"):
        gradients(experts, given)
    same = experts_of(family, "eager", dtype, **changes)
    expected, queue = gradients(same, given), WeightGradients()
    adopt_experts(experts, queue)
    assert max(gradient_errors(gradients(experts, given, queue), expected).values()) < (
        1e-14 if dtype == torch.float64 else 1e-6
    )


@pytest.mark.parametrize("split", [False, True])
def test_hooks_of_parameters_run_once_and_find_a_gradient(split) -> None:
    """As those that add the gradient of a copy in bf16 to its master."""
    experts, queue, found = experts_of("gpt_oss", *ONE_AFTER_THE_OTHER), WeightGradients(), []
    for name, parameter in experts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: found.append((name, one.grad is not None)))
    adopt_experts(experts, queue)
    gradients(experts, routed(experts, torch.float64, 2), queue if split else None)
    assert sorted(found) == sorted((name, True) for name, _ in experts.named_parameters())


@pytest.mark.parametrize("implementation", [ONE_AFTER_THE_OTHER, AT_ONCE], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("choice", ["full", "selective"])
def test_checkpointed_experts_compute_the_same(family, choice, implementation) -> None:
    """Biases are added to the first product in place, which "selective" keeps."""
    experts, dtype = experts_of(family, *implementation), implementation[1]
    given, queue = routed(experts, dtype, 2), WeightGradients()
    adopt_experts(experts, queue)
    expected = gradients(experts, given, queue)
    experts.forward = checkpointed(experts.forward, choice, Switch(), torch.device("cpu"))
    assert all(torch.equal(one, expected[name]) for name, one in gradients(experts, given).items())
    assert all(torch.equal(one, expected[name]) for name, one in gradients(experts, given, queue).items())


def test_selective_checkpointing_repeats_no_product() -> None:
    experts, queue = experts_of("mixtral", *AT_ONCE), WeightGradients()
    adopt_experts(experts, queue)
    hidden, chosen, weights, gradient = routed(experts, torch.float32, 2)
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


def test_what_is_kept_until_the_backward() -> None:
    """n (h + 2 k f + k) elements, of which the h are the layer's input, and integers."""
    experts, queue = experts_of("mixtral", *ONE_AFTER_THE_OTHER), WeightGradients()
    hidden, chosen, weights, _ = routed(experts, torch.float64, 2)
    adopt_experts(experts, queue)
    hidden.requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        experts(hidden, chosen, weights)
    assert [tuple(one.shape) for one in kept] == [(TOKENS, WIDTH), (2 * TOKENS, 2 * 96), (2 * TOKENS,)]
    assert kept[0].data_ptr() == hidden.data_ptr()


def test_what_waits_between_i_and_w() -> None:
    """b (2 n h + k n (2 f + f) + k n) bytes, without integers."""
    experts, queue = experts_of("mixtral", *ONE_AFTER_THE_OTHER), WeightGradients()
    hidden, chosen, weights, gradient = routed(experts, torch.float64, 2)
    adopt_experts(experts, queue)
    hidden.requires_grad_()
    queue.under_way = (0, 0)
    output = experts(hidden, chosen, weights)
    queue.begin((0, 0))
    output.backward(gradient)
    queue.under_way = None
    (entry,) = queue._entries[0, 0]
    cells = [cell.cell_contents for cell in inspect.unwrap(entry.gradients).__closure__]
    held = [one for one in cells if isinstance(one, torch.Tensor)]
    assert all(one.grad_fn is None for one in held)
    assert sorted(tuple(one.shape) for one in held) == sorted(
        [(TOKENS, WIDTH), (TOKENS, WIDTH), (2 * TOKENS, 2 * 96), (2 * TOKENS, 96), (2 * TOKENS,)]
    )
    queue.compute((0, 0))
    assert not len(queue)


def test_frozen_experts_leave_nothing() -> None:
    experts = experts_of("gpt_oss", *ONE_AFTER_THE_OTHER)
    given = routed(experts, torch.float64, 2)
    experts.gate_up_proj.requires_grad_(False)
    experts.down_proj_bias.requires_grad_(False)
    expected, queue = gradients(experts, given), WeightGradients()
    adopt_experts(experts, queue)
    found = gradients(experts, given, queue)
    assert found["gate_up_proj"] is None and found["down_proj_bias"] is None
    assert max(gradient_errors(found, expected).values()) < 1e-14


@pytest.mark.parametrize(("family", "router"), [("mixtral", "gate"), ("gpt_oss", "router")])
def test_only_the_routers_are_not_split(family, router) -> None:
    model = whole_model(tiny_config(family)).base_model
    queue = WeightGradients()
    experts = adopt_experts(model, queue)
    others = [name for name in split_layers(model, queue) if name not in experts]
    assert others == ["embed_tokens.weight", *(f"layers.{index}.mlp.{router}.weight" for index in range(4))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[5, 5, 9, 12], [0, 12, 12, 12], [0, 0, 0, 12]])
def test_products_by_group(dtype, ends) -> None:
    """Against a loop over the groups; in fp64 that loop is the implementation."""
    torch.manual_seed(0)
    rows, matrices = torch.randn(12, 16).to(dtype), torch.randn(4, 16, 8).to(dtype)
    right = torch.randn(12, 8).to(dtype)
    spans = list(zip([0, *ends], ends, strict=False))
    stops = Groups(torch.tensor(ends, dtype=torch.int32))
    found, outer = grouped_product(rows, matrices, stops), grouped_outer(rows, right, stops)
    for expert, (start, end) in enumerate(spans):
        torch.testing.assert_close(found[start:end], rows[start:end] @ matrices[expert])
        torch.testing.assert_close(outer[expert], rows[start:end].t() @ right[start:end])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_of_a_part_are_written_to_their_places(dtype) -> None:
    """Against the product of all rows; others stay as they are."""
    torch.manual_seed(0)
    rows, matrices = torch.randn(12, 16).to(dtype), torch.randn(4, 16, 8).to(dtype)
    ends, places = [5, 5, 9, 12], torch.tensor([0, 1, 2, 7, 8, 9])  # of the experts 0, 2, 2, 3
    whole = grouped_product(rows, matrices, Groups(torch.tensor(ends, dtype=torch.int32)))
    found = torch.full_like(whole, 7.0)
    fill_grouped(found, places, rows[places], matrices, Groups(torch.tensor([3, 3, 5, 6], dtype=torch.int32)))
    others = torch.ones(12, dtype=torch.bool)
    others[places] = False
    torch.testing.assert_close(found[places], whole[places])
    assert (found[others] == 7.0).all()
