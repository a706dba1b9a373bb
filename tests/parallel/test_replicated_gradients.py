"""Sums over two replicas of gradients that are too large for a bucket; tests/fuzz has small ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenpipe.parallel import ReplicatedGradients
from evenpipe.parallel.gradients import ALONE_ELEMENTS


class Side:
    """The sums of one replica; the n-th ones of both meet, and the first wait does them all."""

    def __init__(self) -> None:
        self.issued: list[Tensor] = []
        self.other = self

    def all_reduce(self, tensor: Tensor, what: str) -> Side:
        self.issued.append(tensor)
        return self

    def wait(self, needed_by: str) -> None:
        for tensor, other in zip(self.issued, self.other.issued, strict=True):
            tensor.add_(other)
            other.copy_(tensor)
        self.issued.clear()
        self.other.issued.clear()


SHAPES = {"large": (ALONE_ELEMENTS // 4, 4), "small": (3, 2), "frozen": (2,), "unused": (3,)}
STEPS: list[tuple[tuple[dict[str, float], ...], dict[str, float]]] = [
    # what each replica adds to its gradients, and what both have then
    (({"large": 1.0, "small": 2.0}, {"large": 3.0, "small": 4.0}), {"large": 4.0, "small": 6.0}),
    (({"large": 10.0}, {"small": 20.0}), {"large": 14.0, "small": 26.0}),  # as where an expert got no token on one
    (({}, {"unused": 5.0}), {"large": 14.0, "small": 26.0, "unused": 5.0}),
]


def test_sums_of_several_steps() -> None:
    """A gradient may have any layout, and stays away where no replica has one."""
    sides = Side(), Side()
    sides[0].other, sides[1].other = sides[::-1]
    replicas = [
        {name: nn.Parameter(torch.zeros(shape), requires_grad=name != "frozen") for name, shape in SHAPES.items()}
        for _ in sides
    ]
    sums = [
        ReplicatedGradients({"stage 0": parameters.values()}, side, is_first=side is sides[0])
        for parameters, side in zip(replicas, sides, strict=True)
    ]
    factors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    factors["large"] = torch.arange(float(ALONE_ELEMENTS)).view(4, -1).t() / ALONE_ELEMENTS + 1
    for added, expected in STEPS:
        for parameters, own, values in zip(replicas, sums, added, strict=True):
            own.begin()
            for name, value in values.items():
                gradient = value * factors[name]
                parameter = parameters[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            own.reduce("stage 0")
        for own in sums:
            own.finish()
        for parameters in replicas:
            gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name] * factors[name])
