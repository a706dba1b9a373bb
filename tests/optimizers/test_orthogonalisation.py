"""Orthogonalisation has the bits of `torch.optim.Muon`, for one matrix and for several; how far a bit of bf16 goes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from evenpipe.optimizers.muon import checked_options, orthogonalise

OPTIONS = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
SHAPES = [(16, 16), (32, 16), (16, 48), (7, 11), (200, 150), (1, 5)]


def by_torch(matrix: Tensor) -> Tensor:
    """What `torch.optim.Muon` subtracts from a parameter of zeros, without momentum and at rate 1."""
    parameter = nn.Parameter(torch.zeros_like(matrix))
    parameter.grad = matrix.clone()
    torch.optim.Muon([parameter], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    return -parameter.detach()


def test_the_bits_are_those_of_torch() -> None:
    torch.manual_seed(0)
    for rows, columns in SHAPES:
        matrices = torch.randn(3, rows, columns)
        scale = math.sqrt(max(1, rows / columns))  # torch's rate for a tall matrix
        together = orthogonalise(matrices, **OPTIONS)
        for index, matrix in enumerate(matrices):
            alone = orthogonalise(matrix[None], **OPTIONS)[0]
            assert alone.dtype == torch.bfloat16
            assert torch.equal(torch.zeros_like(matrix).add_(alone, alpha=scale), by_torch(matrix)), (rows, columns)
            assert torch.equal(together[index], alone), (rows, columns)


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 40, 24), **OPTIONS).double())
    assert values.min() > 0.6 and values.max() < 1.3  # between the fixed points of the five steps


def test_a_bit_of_bf16_moves_the_whole_result_in_torch_too() -> None:
    """Why layouts are compared in fp64: in fp32 the order of sums moves gradients by some 1e-6, and then torch's own
    result moves by 0.1 to 1 %."""
    torch.manual_seed(0)
    matrix = torch.randn(300, 200, dtype=torch.float64)
    expected = by_torch(matrix)

    def moved_by(relative: float) -> float:
        moved = by_torch(matrix * (1 + relative * torch.randn_like(matrix)))
        return float((moved - expected).norm() / expected.norm())

    assert 1e-3 < moved_by(1e-6) < 1e-2
    assert moved_by(1e-15) == 0


def test_what_torch_refuses_only_in_a_step_is_refused_at_once() -> None:
    for options in (
        {"ns_coefficients": (1.0, 2.0)},
        {"ns_steps": 5.5},
        {"momentum": -1.0},
        {"adjust_lr_fn": "mine"},
        {"eps": "small"},
    ):
        with pytest.raises((ValueError, TypeError)):
            checked_options(**options)
