"""Experts whose backward is split: gradients of transformers' own ways to run them, and what waits between I and W."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import EXPERTS, tiny_config, whole_model

from evenpipe.experts.adopt import IMPLEMENTATION, adopt_experts
from evenpipe.experts.products import grouped_outer, grouped_product
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


@pytest.mark.parametrize("family", [name for name in EXPERTS if name != "gpt_oss"])
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_gradients_are_those_of_grouped_products_bit_for_bit(family, choices) -> None:
    experts = experts_of(family, *AT_ONCE)
    given = routed(experts, torch.float32, choices)
    expected, queue = gradients(experts, given), WeightGradients()
    adopt_experts(experts, queue)
    found = gradients(experts, given, queue)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_biases_of_experts_are_summed_in_one_product() -> None:
    experts = experts_of("gpt_oss", *AT_ONCE)
    given = routed(experts, torch.float32, 2)
    expected, queue = gradients(experts, given), WeightGradients()
    adopt_experts(experts, queue)
    found = gradients(experts, given, queue)
    biases = [name for name in expected if name.endswith("bias")]
    assert len(biases) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected if name not in biases)
    assert max(gradient_errors(found, expected).values()) < 1e-6


@pytest.mark.parametrize(("implementation", "dtype"), [ONE_AFTER_THE_OTHER, AT_ONCE])
def test_an_expert_that_no_token_meets_gets_zeros(implementation, dtype) -> None:
    experts = experts_of("gpt_oss", implementation, dtype)
    given, queue = routed(experts, dtype, 2, among=3), WeightGradients()
    expected = gradients(experts, given)
    adopt_experts(experts, queue)
    found = gradients(experts, given, queue)
    for name, parameter in experts.named_parameters():
        assert not found[name][3].any() and not expected[name][3].any() and found[name].shape == parameter.shape


@pytest.mark.parametrize(("implementation", "dtype"), [ONE_AFTER_THE_OTHER, AT_ONCE])
def test_microbatches_that_are_not_split_run_as_configured(implementation, dtype) -> None:
    experts = experts_of("mixtral", implementation, dtype)
    given = routed(experts, dtype, 2)
    expected, queue = gradients(experts, given), WeightGradients()
    adopt_experts(experts, queue)
    assert experts.config._experts_implementation == IMPLEMENTATION
    found = gradients(experts, given)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_in_fp64_grouped_products_are_done_one_by_one() -> None:
    """transformers' default raises there."""
    experts = experts_of("mixtral", "grouped_mm", torch.float64)
    given = routed(experts, torch.float64, 2)
    with pytest.raises(RuntimeError, match="got Double"):
        gradients(experts, given)
    adopt_experts(experts, WeightGradients())
    same = experts_of("mixtral", *ONE_AFTER_THE_OTHER)
    found, expected = gradients(experts, given), gradients(same, given)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_rows_that_are_not_whole_16_bytes_are_multiplied_one_by_one(family, implementation) -> None:
    """transformers' default raises there."""
    small = {"moe_intermediate_size": 6, "intermediate_size": 6}
    experts = experts_of(family, implementation, torch.float32, **small)
    given = routed(experts, torch.float32, 2)
    if implementation == "grouped_mm":
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            gradients(experts, given)
    same = experts_of(family, "eager", torch.float32, **small)
    expected, queue = gradients(same, given), WeightGradients()
    adopt_experts(experts, queue)
    found = gradients(experts, given)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert max(gradient_errors(gradients(experts, given, queue), expected).values()) < 1e-6


def test_rows_and_their_gradients_wait_and_nothing_else() -> None:
    experts = experts_of("mixtral", *ONE_AFTER_THE_OTHER)
    hidden, chosen, weights, gradient = routed(experts, torch.float64, 2)
    queue = WeightGradients()
    adopt_experts(experts, queue)
    hidden.requires_grad_()
    queue.under_way = (0, 0)
    output = experts(hidden, chosen, weights)
    queue.begin((0, 0))
    output.backward(gradient)
    queue.under_way = None
    held = [
        tensor
        for entry in queue._entries[0, 0]
        for cell in entry.gradients.__closure__
        if isinstance(tensor := cell.cell_contents, torch.Tensor)
    ]
    assert all(tensor.grad_fn is None for tensor in held)
    rows = {tensor.shape for tensor in held if tensor.is_floating_point()}
    assert rows == {(2 * TOKENS, size) for size in (WIDTH, 96, 2 * 96)}, "each row as often as it met an expert"
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
    stops = torch.tensor(ends, dtype=torch.int32)
    found, outer = grouped_product(rows, matrices, stops), grouped_outer(rows, right, stops)
    for expert, (start, end) in enumerate(spans):
        torch.testing.assert_close(found[start:end], rows[start:end] @ matrices[expert])
        torch.testing.assert_close(outer[expert], rows[start:end].t() @ right[start:end])
