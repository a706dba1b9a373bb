"""Every way in which a product is carried out, and the errors of bf16 and fp16 that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vocabulary_reference import BACKWARDS, KEEP, assert_close, frobenius, problem, reference, sharded

from evenpipe.vocabulary import LossOptions, products
from evenpipe.vocabulary.products import vocabulary_slices

OPTIONS = {
    "plain": LossOptions(rows_per_block=16),
    "everything": LossOptions(label_smoothing=0.1, z_loss=1e-3, soft_cap=8.0, logit_scale=0.7, rows_per_block=16),
}


@pytest.fixture(params=[True, False], ids=["bf16 products", "upcast"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both policies for bf16 on a CPU, whatever this CPU has; and slices smaller than the shard."""
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: request.param)
    monkeypatch.setattr(products, "vocabulary_slices", lambda rows: vocabulary_slices(rows, 7))
    return bool(request.param)


def test_torch_offers_fp32_results_of_bf16_products() -> None:
    """Used on GPUs only, where this suite rarely runs: at least the overloads must exist."""
    assert "dtype_out" in torch.ops.aten.mm.overloads()
    assert "dtype_out" in torch.ops.aten.addmm.overloads()


def test_bf16(native: bool, combinations) -> None:
    """fp32 logits: errors of the stored exponentials only. bf16 products: within three times plain bf16. Logits of a
    spread of 6 reach 20."""
    for spread, name, keep, backward in combinations((1.0, 6.0), OPTIONS, KEEP, BACKWARDS):
        inputs = problem(96, 64, 509, spread=spread).to(torch.bfloat16)
        options = replace(OPTIONS[name], keep=keep)
        expected = reference(inputs, options)
        actual = sharded(inputs, options, 3, backward=backward)
        if native:
            yardstick = reference(inputs, options, dtype=torch.bfloat16)  # bf16 product, fp32 loss
            for field in ("losses", "log_probabilities", "hidden", "weight"):
                bound = 3 * frobenius(getattr(yardstick, field), getattr(expected, field))
                assert frobenius(getattr(actual, field), getattr(expected, field)) <= bound, field
        else:
            assert_close(actual, expected, 2e-3, row_tolerance=5e-3)
            assert float((actual.losses - expected.losses).abs().max()) <= 1e-5


def test_fp16_is_computed_in_fp32(native: bool, combinations) -> None:
    """Exponentials and scaled hidden states have no room in fp16 when the weight of a token is 1e-6."""
    inputs = problem(96, 64, 509).to(torch.float16)
    inputs = replace(inputs, token_weights=inputs.token_weights * 1e-6)
    for keep, backward in combinations(KEEP, BACKWARDS):
        options = replace(OPTIONS["everything"], keep=keep)
        actual = sharded(inputs, options, 3, backward=backward)
        assert_close(actual, reference(inputs, options), 2e-5, row_tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_may_stay_in_fp32(native: bool, dtype: torch.dtype) -> None:
    inputs = problem(30, 16, 103, bias=True)
    assert inputs.bias is not None
    inputs = replace(inputs.to(dtype), bias=inputs.bias.float())
    assert_close(sharded(inputs, LossOptions(), 2), reference(inputs, LossOptions()), 6e-3)
