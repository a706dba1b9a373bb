"""Gradients are scaled together, and each has the bits that it would have by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.parallel import clip_gradients, total_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((33, 65), (0, 4), (), (7,), (2, 3, 5))


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[operation._schema.name] += 1
        return operation(*args, **(kwargs or {}))


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES for dtype in DTYPES]
    return [*made, torch.randn(6, 8, generator=generator).t(), torch.randn(9, 9, generator=generator)[:, ::2]]


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_the_bits_of_each_by_itself(max_norm: float) -> None:
    found, wanted = gradients(), gradients()
    norm = total_norm(found, torch.device("cpu"), None)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in wanted:
        gradient.mul_(factor.to(gradient.dtype))
    with Calls() as calls:
        clip_gradients(found, norm, max_norm)
    assert all(map(torch.equal, found, wanted))
    assert calls.seen["aten::_foreach_mul_"] == len(DTYPES)


def test_no_gradients() -> None:
    clip_gradients([], torch.tensor(3.0, dtype=torch.float64), 1.0)
