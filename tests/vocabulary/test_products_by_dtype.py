"""Every way in which a product is carried out, and the errors of bf16 and fp16 that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from vocabulary_reference import BACKWARDS, Answer, Problem, assert_close, frobenius, problem, reference, sharded

from evenpipe.vocabulary import LossOptions, products

KEEP = ("probabilities", "nothing")
OPTIONS = {
    "plain": LossOptions(rows_per_block=16),
    "everything": LossOptions(label_smoothing=0.1, z_loss=1e-3, soft_cap=8.0, logit_scale=0.7, rows_per_block=16),
}


@pytest.fixture(params=[True, False], ids=["bf16 products", "upcast"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both policies for bf16 on a CPU, whatever this CPU has; and slices smaller than the shard."""
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: request.param)
    monkeypatch.setattr(products, "vocabulary_slices", lambda rows: _slices(rows, 7))
    return bool(request.param)


def _slices(rows: int, size: int) -> list[slice]:
    return [slice(start, min(rows, start + size)) for start in range(0, rows, size)]


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# dtype of the operands -> dtype of the result, tolerance with bf16 products, tolerance with upcast
PRODUCTS = {
    torch.float64: (torch.float64, 1e-14, 1e-14),
    torch.float32: (torch.float32, 1e-6, 1e-6),
    torch.bfloat16: (torch.float32, 4e-3, 1e-6),
    torch.float16: (torch.float32, 1e-6, 1e-6),
}


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("add", [True, False])
def test_products(native: bool, dtype: torch.dtype, add: bool) -> None:
    result, rounded, exact = PRODUCTS[dtype]
    tolerance = rounded if native else exact
    hidden, weight = random(9, 8, seed=0, dtype=dtype), random(23, 8, seed=1, dtype=dtype)
    factor = random(9, 23, seed=2, dtype=products.stored_dtype(dtype))
    coefficients = random(9, seed=3, dtype=result)

    logits = torch.full((9, 23), torch.nan, dtype=products.logits_dtype(hidden))
    assert logits.dtype == (dtype if native and dtype == torch.bfloat16 else result)
    products.logits_product(hidden, weight, logits)
    assert frobenius(logits, hidden.double() @ weight.double().t()) <= tolerance

    def begun_with(rows: int, seed: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | float]:
        """What is added to; or NaN, which must not be read."""
        if not add:
            return torch.full((rows, 8), torch.nan, dtype=kind), 0.0
        values = random(rows, 8, seed=seed, dtype=kind)
        return values, values.to(torch.float64, copy=True)

    total, begun = begun_with(9, 4, result)
    products.hidden_product(factor, weight, total, add=add)
    assert frobenius(total, begun + factor.double() @ weight.double()) <= tolerance

    for kind, allowed in ((result, tolerance), (factor.dtype, max(tolerance, PRODUCTS[factor.dtype][1]))):
        total, begun = begun_with(23, 5, kind)
        products.weight_product(factor, hidden.to(factor.dtype), total, add=add)
        assert frobenius(total, begun + factor.double().t() @ hidden.double()) <= allowed

    begun = random(23, seed=6, dtype=result)
    total = begun.clone()
    products.column_product(factor, coefficients, total)
    assert frobenius(total, begun.double() + factor.double().t() @ coefficients.double()) <= exact


def test_torch_offers_fp32_results_of_bf16_products() -> None:
    """Used on GPUs only, where this suite rarely runs: at least the overloads must exist."""
    assert "dtype_out" in torch.ops.aten.mm.overloads()
    assert "dtype_out" in torch.ops.aten.addmm.overloads()


def plain_bf16(given: Problem, options: LossOptions) -> Answer:
    """One process, bf16 product, fp32 loss, autograd: the yardstick."""
    hidden = given.hidden.clone().requires_grad_()
    weight = given.weight.clone().requires_grad_()
    logits = linear(hidden, weight).float() * options.logit_scale
    if options.soft_cap is not None:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    plain = cross_entropy(logits, given.labels, reduction="none")
    losses = cross_entropy(logits, given.labels, reduction="none", label_smoothing=options.label_smoothing)
    losses = losses + options.z_loss * logits.logsumexp(1).square()
    (losses * given.token_weights).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return Answer(losses.detach(), -plain.detach(), hidden.grad, weight.grad, None)


def test_bf16(native: bool, combinations) -> None:
    """fp32 logits: errors of the stored exponentials only. bf16 products: within three times plain bf16. Logits of a
    spread of 6 reach 20."""
    for spread, name, keep, backward in combinations((1.0, 6.0), OPTIONS, KEEP, BACKWARDS):
        inputs = problem(96, 64, 509, spread=spread).to(torch.bfloat16)
        options = replace(OPTIONS[name], keep=keep)
        expected = reference(inputs, options)
        actual = sharded(inputs, options, 3, backward=backward)
        if native:
            yardstick = plain_bf16(inputs, options)
            for field in ("losses", "log_probabilities", "hidden", "weight"):
                bound = 3 * frobenius(getattr(yardstick, field), getattr(expected, field))
                assert frobenius(getattr(actual, field), getattr(expected, field)) <= bound, field
        else:
            assert_close(actual, expected, 2e-3, row_tolerance=5e-3)
            assert float((actual.losses - expected.losses).abs().max()) <= 1e-5


def test_fp16_is_computed_in_fp32(combinations) -> None:
    """Exponentials and scaled hidden states have no room in fp16 when the weight of a token is 1e-6."""
    inputs = problem(96, 64, 509).to(torch.float16)
    inputs = replace(inputs, token_weights=inputs.token_weights * 1e-6)
    for keep, backward in combinations(KEEP, BACKWARDS):
        options = replace(OPTIONS["everything"], keep=keep)
        actual = sharded(inputs, options, 3, backward=backward)
        assert_close(actual, reference(inputs, options), 2e-5, row_tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_may_stay_in_fp32(dtype: torch.dtype) -> None:
    inputs = problem(30, 16, 103, bias=True)
    assert inputs.bias is not None
    inputs = replace(inputs.to(dtype), bias=inputs.bias.float())
    assert_close(sharded(inputs, LossOptions(), 2), reference(inputs, LossOptions()), 6e-3)
