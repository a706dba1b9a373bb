"""Weight gradients in bf16 are added to fp32 sums by their products, where a GPU can: here its products are torch's
own, called with fp32 operands."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from split_module import Layers, Split, data
from torch import Tensor, nn

from evenpipe.layers import weight_gradients
from evenpipe.parallel.parameters import StageParameters

MM, ADDMM = torch.mm, torch.addmm


def mm(left: Tensor, right: Tensor, **options: Any) -> Tensor:
    if "out_dtype" not in options:
        return MM(left, right, **options)
    return MM(left.to(options["out_dtype"]), right.to(options["out_dtype"]))


def addmm(total: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    if "out_dtype" not in options:
        return ADDMM(total, left, right, **options)
    assert options["out"] is total and total.dtype == options["out_dtype"]
    return ADDMM(total, left.to(total.dtype), right.to(total.dtype), out=total)


class Twice(nn.Module):
    """Uses a layer twice: those gradients are summed before they are added."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.twice(self.once(self.twice(hidden)))


def gradients(passes: str, *, on_gpu: bool) -> dict[str, Tensor]:
    """Return the gradients of the masters."""
    torch.manual_seed(0)
    module = Layers(Twice(), nn.Linear(8, 8))
    masters = StageParameters(module, torch.bfloat16)
    runner = Split(module, data(2, width=8, dtype=torch.bfloat16))
    with contextlib.ExitStack() as stack:
        if on_gpu:
            is_bf16 = mock.Mock(side_effect=lambda operand: operand.dtype == torch.bfloat16)
            stack.enter_context(mock.patch.object(weight_gradients, "writes_accumulator", is_bf16))
            stack.enter_context(mock.patch.multiple(torch, mm=mm, addmm=addmm))
        runner.run(passes)
    assert all(parameter.grad is None for parameter in module.parameters())
    return {name: master.grad for name, master in masters}


@pytest.mark.parametrize("passes", ["F0 F1 I0 I1 W1 W0", "F0 B0 F1 B1", "F0 F1 B0 I1 W1"])
def test_sums_in_fp32_are_those_of_the_products(passes: str) -> None:
    rounded, fused = (gradients(passes, on_gpu=on_gpu) for on_gpu in (False, True))
    for name, tensor in fused.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, rounded[name], rtol=2e-2, atol=2e-2)
    # A sum of bf16 has few bits, that of fp32 products all. A W sums the uses of one weight in bf16.
    of_products = {"layers.0.once.weight", "layers.1.weight"} | ({"layers.0.twice.weight"} if "B" in passes else set())
    for name, tensor in fused.items():
        bits = tensor.view(torch.int32) & 0xFF
        assert bool(bits.any()) == (name in of_products), name
