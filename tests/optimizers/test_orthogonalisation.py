"""Orthogonalisation has the bits of `torch.optim.Muon`, for one matrix and for several."""

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
