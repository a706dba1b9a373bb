"""What an optimizer and a scheduler know beside tensors comes back through JSON, by the names of parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from evenpipe.checkpoints.settings import describe_settings, merge_settings, plan_settings
from evenpipe.errors import InputError

STEPS = 8
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda one: rates.LambdaLR(one, lambda step: 1 / (step + 1)),
    "MultiStepLR": lambda one: rates.MultiStepLR(one, [2, 5, 5]),
    "OneCycleLR": lambda one: rates.OneCycleLR(one, 1e-2, STEPS + 1),
    "SequentialLR": lambda one: rates.SequentialLR(one, [rates.LinearLR(one), rates.ExponentialLR(one, 0.9)], [3]),
    "ReduceLROnPlateau": lambda one: rates.ReduceLROnPlateau(one, patience=1),
}


class Holder:
    """The parameters that one process holds, in groups, with an optimizer and a scheduler."""

    def __init__(self, groups: list[str], scheduler: str | None = None, **rates_of_groups: float) -> None:
        self.names = {nn.Parameter(torch.ones(2)): name for group in groups for name in group}
        by_name = {name: parameter for parameter, name in self.names.items()}
        options = [{"lr": rates_of_groups.get(group, 0.1), "betas": (0.8, 0.9)} for group in groups]
        parameters = [[by_name[name] for name in group] for group in groups]
        self.optimizer = torch.optim.AdamW(
            [{"params": held, **option} for held, option in zip(parameters, options, strict=True)]
        )
        self.scheduler = None if scheduler is None else SCHEDULERS[scheduler](self.optimizer)

    def take_step(self, step: int) -> list[tuple[float, float]]:
        self.optimizer.step()
        plateau = isinstance(self.scheduler, rates.ReduceLROnPlateau)
        self.scheduler.step(*([1.0 if step < 3 else 2.0] if plateau else []))
        return [(group["lr"], group["betas"][0]) for group in self.optimizer.param_groups]

    def describe(self) -> dict[str, Any]:
        return describe_settings(self.optimizer, self.scheduler, self.names)

    def load(self, settings: dict[str, Any]) -> None:
        plan_settings(settings, self.optimizer, self.scheduler, self.names, where="the checkpoint 'x'")()


def saved(*holders: Holder) -> dict[str, Any]:
    return json.loads(json.dumps(merge_settings([holder.describe() for holder in holders])))


def test_a_schedule_goes_on() -> None:
    for name in SCHEDULERS:
        whole, other = Holder(["ab", "c"], name), Holder(["ab", "c"], name)
        for step in range(4):
            whole.take_step(step)
        other.load(saved(whole))
        assert other.scheduler.state_dict().keys() == whole.scheduler.state_dict().keys(), name
        for step in range(4, STEPS):
            assert whole.take_step(step) == other.take_step(step), name


REGROUPED = [
    # groups of each process that saved, groups of the one that loads, its learning rates
    ([["ab", "cd"]], ["ab", "cd"], [1, 2]),
    ([["ab"], ["cd"]], ["ab", "cd"], [1, 2]),
    ([["ab", "cd"]], ["cd"], [2]),
    ([["ab", "cd"]], ["a", "b", "c"], [1, 1, 2]),
    ([["ab", "cd"]], ["", "cd"], [1, 2]),  # empty: by its place
    ([["cd"], ["ab", "cd"]], ["c", "a"], [2, 1]),
    ([["ab", "cd"]], ["ab", "ef"], [1, 9]),  # new parameters keep what they are given
    ([["ab", "cd"]], ["ae"], [1]),
]


def test_parameters_keep_the_options_of_their_group() -> None:
    for saved_groups, groups, learning_rates in REGROUPED:
        other = Holder(groups, **dict.fromkeys(groups, 9))
        other.load(saved(*(Holder(held, ab=1, cd=2) for held in saved_groups)))
        assert [group["lr"] for group in other.optimizer.param_groups] == learning_rates, groups
        assert all(group["betas"] == (0.8, 0.9) for group in other.optimizer.param_groups)


def test_a_rate_that_is_a_tensor_stays_one_and_how_an_optimizer_computes_is_not_restored() -> None:
    before, after = Holder(["a"]), Holder(["a"])
    before.optimizer.param_groups[0] |= {"lr": torch.tensor(0.5), "fused": True}
    rate = after.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    after.load(saved(before))
    (group,) = after.optimizer.param_groups
    assert group["lr"] is rate and rate == 0.5 and group["fused"] is None


def test_a_schedule_that_is_left_out_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Holder(["a"]).load(saved(Holder(["a"], "LambdaLR")))
    assert "contains the state of a scheduler (LambdaLR), but no scheduler is given" in caplog.text


def test_what_cannot_be_saved_or_loaded_is_refused() -> None:
    holder = Holder(["a"])
    holder.optimizer.param_groups[0]["owner"] = object()
    apart = saved(Holder(["a", "c", "b"], a=1, c=2, b=1))
    for call, says in (
        (holder.describe, "'owner' of a group is object, expected numbers, texts"),
        (
            lambda: Holder(["bac"]).load(apart),
            "'b' and 'c' are in one group, but have different options in the checkpoint 'x'",
        ),
        (
            lambda: Holder(["a"], "LambdaLR").load(saved(Holder(["a"]))),
            "scheduler: LambdaLR, but the checkpoint 'x' was saved without one",
        ),
    ):
        with pytest.raises(InputError, match=says):
            call()
