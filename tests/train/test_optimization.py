"""Which optimizer a configuration makes, what it is told, and what is refused in one sentence; learning rates."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import wrong_refusals
from torch import nn
from transformers import get_scheduler

from evenpipe.errors import InputError
from evenpipe.host.optimizer import HostAdamW
from evenpipe.model.placement import TensorPlacement
from evenpipe.optimizers.held import HeldParameter
from evenpipe.train.learning_rates import learning_rate
from evenpipe.train.optimization import check_optimizer, make_optimizer, rate_shares
from evenpipe.train.run_sections import OptimizerConfig

MATRIX, NORM, FROZEN = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2), False)


def pipeline(communicator: Any = None) -> Any:
    """As far as an optimizer looks at it."""
    named = {"layers.0.weight": MATRIX, "norm.weight": NORM, "frozen": FROZEN}
    return SimpleNamespace(
        named_parameters=lambda: iter(named.items()),
        held_parameters=lambda: (
            HeldParameter(name, one, TensorPlacement(tuple(one.shape)), communicator) for name, one in named.items()
        ),
        description=SimpleNamespace(
            skeleton=SimpleNamespace(get_submodule=lambda path: nn.Linear(1, 1)),
            structure=SimpleNamespace(layers_name="layers"),
        ),
    )


def test_options_reach_torchs_classes() -> None:
    assert isinstance(make_optimizer(pipeline(), OptimizerConfig(host_share=1.0)), HostAdamW)
    optimizer = make_optimizer(pipeline(), OptimizerConfig(options={"amsgrad": True, "foreach": True}))
    assert all(group["amsgrad"] and group["foreach"] and not group["fused"] for group in optimizer.param_groups)
    optimizer = make_optimizer(pipeline(), OptimizerConfig(name="adafactor", options={"eps": ["none", 1e-2], "d": 2}))
    assert all(group["eps"] == (None, 1e-2) and group["d"] == 2 for group in optimizer.param_groups)
    optimizer = make_optimizer(pipeline(), OptimizerConfig(name="muon", betas=(0.8, 0.9), options={"ns_steps": 3}))
    assert [group.get("ns_steps") for group in optimizer.param_groups] == [3, None, None]
    assert [group.get("betas") for group in optimizer.param_groups] == [None, (0.8, 0.9), (0.8, 0.9)]
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_a_process_without_a_trained_parameter_has_none() -> None:
    nothing = SimpleNamespace(named_parameters=lambda: iter([("frozen", FROZEN)]))
    for name in ("adamw", "muon", "adafactor", "sgd", "no_such_module:make"):
        assert make_optimizer(nothing, OptimizerConfig(name=name)) is None
    assert rate_shares(None, OptimizerConfig()) == []


REFUSED = [
    # name, options, words that the sentence must hold
    ("sgd", {"momentun": 0.9}, ["optimizer.options.momentun is no option of torch.optim.SGD", '"momentum"', "known: "]),
    ("adamw", {"lr": 1.0}, ["optimizer.options.lr", "left out", "optimizer.learning_rate"]),
    ("muon", {"weight_decay": 1.0}, ["optimizer.options.weight_decay", "optimizer.weight_decay"]),
    ("muon", {"momentum": -1.0}, ["optimizer.options is {'momentum': -1.0}", "torch.optim.Muon says: momentum should"]),
    ("adafactor", {"foreach": True}, ["optimizer.options.foreach is no option of torch.optim.Adafactor"]),
    ("adafactor", {"d": 0.5}, ["torch.optim.Adafactor says: Clipping threshold d should be >= 1"]),
    ("no_module:make", {}, ['optimizer.name is "no_module:make"', "there is no module no_module, neither"]),
    ("mine:mke", {}, ["mine has no mke", 'did you mean "make"']),
    ("mine:make", {"factr": 1}, ["cannot be called", "{'factr': 1}", "unexpected keyword argument 'factr'"]),
    ("mine:no_rate", {}, ["cannot be called", "unexpected keyword argument 'lr'"]),
]

MINE = """
import torch

def make(named_parameters, lr, factor=1.0):
    parameters = dict(named_parameters)
    return torch.optim.Adam([
        {"params": [one for one in parameters.values() if one.dim() > 1]},
        {"params": [one for one in parameters.values() if one.dim() < 2], "lr": factor * lr},
    ], lr=lr)

def no_rate(named_parameters):
    return None

def nothing(named_parameters, lr):
    return None

def torch_adafactor(named_parameters, lr):
    return torch.optim.Adafactor([parameter for _, parameter in named_parameters], lr=lr)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the folder that the command is started in."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def test_what_does_not_fit_is_one_sentence_before_anything_starts(mine) -> None:
    assert not wrong_refusals(
        lambda name, options: check_optimizer(OptimizerConfig(name=name, options=options)), REFUSED
    )
    for name in ("adamw", "muon", "adafactor", "sgd", "mine:make"):
        check_optimizer(OptimizerConfig(name=name))


def test_a_function_of_ones_own_gets_trained_parameters_and_may_give_rates_to_groups(mine) -> None:
    config = OptimizerConfig(name="mine:make", learning_rate=1e-2, options={"factor": 0.25})
    optimizer = make_optimizer(pipeline(), config)
    assert type(optimizer) is torch.optim.Adam
    assert [group["params"] for group in optimizer.param_groups] == [[MATRIX], [NORM]]
    assert rate_shares(optimizer, config) == [1.0, 0.25]


def test_what_a_function_of_ones_own_gives_is_looked_at(mine) -> None:
    with pytest.raises(InputError, match=r'"mine:nothing", which returns NoneType; it must return a torch.optim'):
        make_optimizer(pipeline(), OptimizerConfig(name="mine:nothing"))
    assert make_optimizer(pipeline(), OptimizerConfig(name="mine:torch_adafactor")) is not None
    with pytest.raises(InputError, match=r'only rows of layers.0.weight.*optimizer.name = "adafactor" does'):
        make_optimizer(pipeline("rows are spread"), OptimizerConfig(name="mine:torch_adafactor"))


# ---- learning rates: those of transformers' `get_scheduler`, one step later and with one step more of warm-up


RATE = 3e-4


def ours(steps: int, **options) -> list[float]:
    config = OptimizerConfig(learning_rate=RATE, **options)
    return [learning_rate(step, steps, config) for step in range(steps)]


def theirs(name: str, steps: int, warmup: int, **options) -> list[float]:
    """Of steps 1 to `steps`, after one more step of warm-up."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler(name, optimizer, warmup + 1, steps, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


LOW = 0.1
WSD = "warmup-stable-decay"
ZERO = {"minimum_learning_rate_ratio": 0.0}
CASES = [
    # ours, name and options of theirs
    ({"schedule": "constant"}, "constant_with_warmup", {}),
    ({"schedule": "linear", **ZERO}, "linear", {}),
    ({"schedule": "linear"}, "polynomial", {"lr_end": LOW * RATE, "power": 1.0}),
    ({"schedule": "cosine"}, "cosine_with_min_lr", {"min_lr_rate": LOW}),
    ({"schedule": "cosine", **ZERO}, "cosine", {}),
    ({"schedule": WSD, "decay_steps": 7, **ZERO}, "warmup_stable_decay", {"num_decay_steps": 7}),
    ({"schedule": WSD, "decay_share": 0.25, **ZERO}, "warmup_stable_decay", {"num_decay_steps": 10}),
    ({"schedule": WSD, **ZERO}, "warmup_stable_decay", {"num_decay_steps": 8}),  # a fifth of the steps
]


def test_rates_are_those_of_transformers() -> None:
    steps = 40
    for options, name, their_options in CASES:
        for warmup in (0, 1, 6):
            expected = theirs(name, steps, warmup, **their_options)
            assert ours(steps, warmup_steps=warmup, **options) == pytest.approx(expected), (options, warmup)


def test_the_decay_of_warmup_stable_decay_ends_at_the_lowest_rate_as_theirs() -> None:
    """Only the warm-up differs: theirs starts at the lowest rate."""
    found = ours(40, warmup_steps=6, schedule="warmup-stable-decay", decay_steps=7)
    expected = theirs("warmup_stable_decay", 40, 6, num_decay_steps=7, min_lr_ratio=LOW)
    assert found[6:] == pytest.approx(expected[6:])
    assert found[-1] == pytest.approx(LOW * RATE)
    assert found[0] < expected[0]


def test_a_run_may_be_shorter_than_its_warm_up_and_its_decay() -> None:
    for schedule in ("linear", "constant", "warmup-stable-decay"):
        for steps in (1, 2, 5):
            rates = ours(steps, warmup_steps=3, schedule=schedule)
            assert len(rates) == steps and max(rates) == RATE and min(rates) > 0
    rates = ours(6, warmup_steps=2, schedule="warmup-stable-decay", decay_steps=100)
    assert rates[2] == RATE and rates[-1] == pytest.approx(LOW * RATE) and rates[2:] == sorted(rates[2:], reverse=True)
