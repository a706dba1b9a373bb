"""Sums of gradients over two processes: in place, in a bucket, of different parts; tests/fuzz has whole pipelines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenpipe.model.placement import Cut, Held, TensorPlacement
from evenpipe.parallel import GradientReducer
from evenpipe.parallel.gradients import IN_PLACE_ELEMENTS


class Side:
    """The sums of one replica; the n-th ones of both meet, and the first wait does them all."""

    def __init__(self) -> None:
        self.issued: list[Tensor] = []
        self.other = self

    def all_reduce(self, tensor: Tensor, label: str) -> Side:
        self.issued.append(tensor)
        return self

    def wait(self, needed_by: str) -> None:
        for tensor, other in zip(self.issued, self.other.issued, strict=True):
            tensor.add_(other)
            other.copy_(tensor)
        self.issued.clear()
        self.other.issued.clear()


SHAPES = {"large": (IN_PLACE_ELEMENTS // 4, 4), "small": (3, 2), "frozen": (2,), "unused": (3,)}
STEPS: list[tuple[tuple[dict[str, float], ...], dict[str, float]]] = [
    # what each replica adds to its gradients, and what both have then
    (({"large": 1.0, "small": 2.0}, {"large": 3.0, "small": 4.0}), {"large": 4.0, "small": 6.0}),
    (({"large": 10.0}, {"small": 20.0}), {"large": 14.0, "small": 26.0}),  # as where an expert got no token on one
    (({}, {"unused": 5.0}), {"large": 14.0, "small": 26.0, "unused": 5.0}),
]


@pytest.mark.parametrize("apart", [False, True])
def test_sums_of_several_steps(apart: bool) -> None:
    """A gradient may have any layout, and stays away where no process has one."""
    sides = Side(), Side()
    sides[0].other, sides[1].other = sides[::-1]
    replicas = [
        {name: nn.Parameter(torch.zeros(shape), requires_grad=name != "frozen") for name, shape in SHAPES.items()}
        for _ in sides
    ]
    sums = []
    for parameters, side, copied in zip(replicas, sides, ((), ("dp",)), strict=True):
        held = [Held(one, TensorPlacement((*one.shape,), (), frozenset(copied))) for one in parameters.values()]
        sums.append(GradientReducer(held, side, ("dp",), "gradients of stage 0", set_aside=apart))
    factors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    factors["large"] = torch.arange(float(IN_PLACE_ELEMENTS)).view(4, -1).t() / IN_PLACE_ELEMENTS + 1
    for added, expected in STEPS:
        for parameters, own, values in zip(replicas, sums, added, strict=True):
            own.begin()
            for name, value in values.items():
                gradient = value * factors[name]
                parameter = parameters[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            own.reduce()
        for own in sums:
            own.finish()
        for parameters in replicas:
            gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name] * factors[name])


def test_sums_of_different_parts_and_of_another_dtype() -> None:
    """Two ranks hold the two halves of a matrix: each gets its own sum, together with a vector that both hold."""
    sides = Side(), Side()
    sides[0].other, sides[1].other = sides[::-1]
    ranks = []
    for part, side in enumerate(sides):
        half, both = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
        cut = Cut(("tp",), part, 2)
        copied = frozenset(("tp",) if part else ())
        held = [Held(half, TensorPlacement((4, 3), (cut,))), Held(both, TensorPlacement((2,), (), copied))]
        ranks.append((half, both, GradientReducer(held, side, ("tp",), "gradients that ranks share")))
    for step in (1, 2):
        for part, (half, both, sums) in enumerate(ranks):
            sums.begin()
            for parameter, value in ((half, 1.0 + part), (both, 5.0)):
                added = torch.full_like(parameter, value)
                parameter.grad = added if parameter.grad is None else parameter.grad + added
            sums.reduce()
        for part, (half, both, sums) in enumerate(ranks):
            sums.finish()
            assert half.grad.eq(step * (1.0 + part)).all() and half.grad.dtype == torch.float32
            assert both.grad.eq(step * 10.0).all() and both.grad.dtype == torch.float64
