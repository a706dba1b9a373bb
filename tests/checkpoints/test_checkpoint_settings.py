"""What an optimizer and a scheduler know beside tensors comes back through JSON, by the names of parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates
from transformers import get_scheduler

from evenpipe.checkpoints.settings import describe_settings, merge_settings, plan_settings
from evenpipe.errors import InputError

STEPS = 8
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda one: rates.LambdaLR(one, lambda step: 1 / (step + 1)),
    "MultiStepLR": lambda one: rates.MultiStepLR(one, [2, 5, 5]),
    "CosineAnnealingLR": lambda one: rates.CosineAnnealingLR(one, STEPS),
    "CosineAnnealingWarmRestarts": lambda one: rates.CosineAnnealingWarmRestarts(one, 3),
    "CyclicLR": lambda one: rates.CyclicLR(one, 1e-3, 1e-2, 2),
    "OneCycleLR": lambda one: rates.OneCycleLR(one, 1e-2, STEPS + 1),
    "SequentialLR": lambda one: rates.SequentialLR(one, [rates.LinearLR(one), rates.ExponentialLR(one, 0.9)], [3]),
    "ReduceLROnPlateau": lambda one: rates.ReduceLROnPlateau(one, patience=1),
    "cosine of transformers": lambda one: get_scheduler("cosine", one, 2, STEPS),
}


class Holder:
    """The parameters that one process holds, in groups, with an optimizer and a scheduler."""

    def __init__(self, groups: list[str], scheduler: str | None = None, **rates_of_groups: float) -> None:
        self.names = {nn.Parameter(torch.ones(2)): name for group in groups for name in group}
        by_name = {name: parameter for parameter, name in self.names.items()}
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [by_name[name] for name in group],
                    "lr": rates_of_groups.get(group, 0.1),
                    "betas": (0.8, 0.9),
                }
                for group in groups
            ]
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

    @property
    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def saved(*holders: Holder) -> dict[str, Any]:
    return json.loads(json.dumps(merge_settings([holder.describe() for holder in holders])))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on(name: str) -> None:
    whole, other = Holder(["ab", "c"], name), Holder(["ab", "c"], name)
    for step in range(4):
        whole.take_step(step)
    other.load(saved(whole))
    assert other.scheduler.state_dict().keys() == whole.scheduler.state_dict().keys()
    for step in range(4, STEPS):
        assert whole.take_step(step) == other.take_step(step)


@pytest.mark.parametrize(
    ("saved_groups", "groups", "learning_rates"),
    [
        ([["ab", "cd"]], ["ab", "cd"], [1, 2]),
        ([["ab"], ["cd"]], ["ab", "cd"], [1, 2]),
        ([["ab", "cd"]], ["cd"], [2]),
        ([["ab", "cd"]], ["a", "b", "c"], [1, 1, 2]),
        ([["ab", "cd"]], ["", "cd"], [1, 2]),  # empty: by its place
        ([["cd"], ["ab", "cd"]], ["c", "a"], [2, 1]),
        ([["ab", "cd"]], ["ab", "ef"], [1, 9]),  # new parameters keep what they are given
        ([["ab", "cd"]], ["ae"], [1]),
    ],
    ids=str,
)
def test_parameters_keep_the_options_of_their_group(
    saved_groups: list[list[str]], groups: list[str], learning_rates: list[float]
) -> None:
    processes = [Holder(one, ab=1, cd=2) for one in saved_groups]
    other = Holder(groups, **dict.fromkeys(groups, 9))
    other.load(saved(*processes))
    assert other.learning_rates == learning_rates
    assert all(group["betas"] == (0.8, 0.9) for group in other.optimizer.param_groups)


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor() -> None:
    before, after = Holder(["a"]), Holder(["a"])
    before.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    rate = after.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    after.load(saved(before))
    assert after.optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_how_an_optimizer_computes_is_not_restored() -> None:
    before, after = Holder(["a"]), Holder(["a"])
    before.optimizer.param_groups[0]["fused"] = True
    after.load(saved(before))
    assert after.optimizer.param_groups[0]["fused"] is None


def test_a_schedule_that_is_left_out_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Holder(["a"]).load(saved(Holder(["a"], "LambdaLR")))
    assert "contains the state of a scheduler (LambdaLR), but no scheduler is given" in caplog.text


def test_what_json_cannot_hold_is_refused() -> None:
    holder = Holder(["a"])
    holder.optimizer.param_groups[0]["owner"] = object()
    with pytest.raises(InputError, match="'owner' of a group is object, expected numbers, texts"):
        holder.describe()


def test_groups_that_were_apart_may_not_be_put_together() -> None:
    with pytest.raises(
        InputError, match="'b' and 'c' are in one group, but have different options in the checkpoint 'x'"
    ):
        Holder(["bac"]).load(saved(Holder(["a", "c", "b"], a=1, c=2, b=1)))


def test_a_checkpoint_without_a_scheduler_is_not_taken_for_the_beginning_of_one() -> None:
    with pytest.raises(InputError, match="scheduler: LambdaLR, but the checkpoint 'x' was saved without one"):
        Holder(["a"], "LambdaLR").load(saved(Holder(["a"])))
