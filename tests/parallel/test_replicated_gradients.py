"""Sums over replicas, here all in one process: what is summed, when, and what becomes of earlier sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenpipe.parallel import ReplicatedGradients
from evenpipe.parallel.gradients import ALONE_ELEMENTS


class Meeting:
    """The n-th sums of all replicas meet: each `all_reduce` is under way until all have issued theirs."""

    def __init__(self, replicas: int) -> None:
        self.issued: list[list[tuple[str, Tensor]]] = [[] for _ in range(replicas)]

    def of(self, replica: int) -> Side:
        return Side(self, replica)


class Side:
    def __init__(self, meeting: Meeting, replica: int) -> None:
        self.meeting, self.replica = meeting, replica

    def all_reduce(self, tensor: Tensor, what: str) -> Side:
        self.meeting.issued[self.replica].append((what, tensor))
        return self

    def wait(self, needed_by: str = "") -> None:
        """The first wait does all the sums."""
        for together in zip(*self.meeting.issued, strict=True):
            assert len({what for what, _ in together}) == 1, together
            total = torch.stack([tensor for _, tensor in together]).sum(0)
            for _, tensor in together:
                tensor.copy_(total)
        for issued in self.meeting.issued:
            issued.clear()


SIZES = {"small": (3, 2), "smaller": (5,), "large": (ALONE_ELEMENTS // 4, 4), "frozen": (2,), "unused": (3,)}
PARTS = {"stage 0": ("small", "large", "unused"), "embedding": ("smaller", "frozen")}


class Replica:
    def __init__(self, meeting: Meeting, number: int) -> None:
        self.parameters = {
            name: nn.Parameter(torch.zeros(shape), requires_grad=name != "frozen") for name, shape in SIZES.items()
        }
        parts = {part: [self.parameters[name] for name in names] for part, names in PARTS.items()}
        self.sums = ReplicatedGradients(parts, meeting.of(number), is_first=number == 0)

    def add(self, name: str, value: float) -> None:
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad += value

    def gradients(self) -> dict[str, float | None]:
        """By name; every element of a gradient is the same number."""
        found: dict[str, float | None] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape
                assert len(set(parameter.grad.flatten().tolist())) == 1, name
            found[name] = None if parameter.grad is None else float(parameter.grad.flatten()[0])
        return found


def walk(replicas: list[Replica], values: list[dict[str, float]]) -> None:
    """One step: each replica adds its gradients, part by part."""
    for replica in replicas:
        replica.sums.begin()
    for replica, added in zip(replicas, values, strict=True):
        for part, names in PARTS.items():
            for name in names:
                if name in added:
                    replica.add(name, added[name])
            replica.sums.reduce(part)
    for replica in replicas:
        replica.sums.finish()


@pytest.mark.parametrize("count", [2, 3])
def test_sums_of_one_and_of_several_steps(count: int) -> None:
    meeting = Meeting(count)
    replicas = [Replica(meeting, number) for number in range(count)]
    wanted = {"small": 0.0, "smaller": 0.0, "large": 0.0}
    for step in range(3):
        values = [{name: float(10**step * (number + 1)) for name in wanted} for number in range(count)]
        walk(replicas, values)
        wanted = {name: before + sum(value[name] for value in values) for name, before in wanted.items()}
        for replica in replicas:
            assert replica.gradients() == wanted | {"frozen": None, "unused": None}


def test_a_gradient_that_only_some_replicas_have() -> None:
    """As where an expert got no token on one of them: all get the sum."""
    meeting = Meeting(2)
    replicas = [Replica(meeting, number) for number in range(2)]
    walk(replicas, [{"small": 1.0, "large": 2.0}, {"smaller": 3.0}])
    first = {"small": 1.0, "large": 2.0, "smaller": 3.0, "frozen": None, "unused": None}
    assert [replica.gradients() for replica in replicas] == [first, first]
    walk(replicas, [{}, {"unused": 5.0}])  # and in a later step nobody adds to the others
    assert [replica.gradients() for replica in replicas] == [first | {"unused": 5.0}] * 2


def test_a_gradient_of_any_layout_is_summed() -> None:
    meeting = Meeting(2)
    replicas = [Replica(meeting, number) for number in range(2)]
    shape = SIZES["large"]
    for replica in replicas:
        replica.sums.begin()
        replica.parameters["large"].grad = torch.arange(float(ALONE_ELEMENTS)).view(shape[::-1]).t()
        replica.sums.reduce("stage 0")
    for replica in replicas:
        replica.sums.finish()
        assert torch.equal(
            replica.parameters["large"].grad, 2 * torch.arange(float(ALONE_ELEMENTS)).view(shape[::-1]).t()
        )
