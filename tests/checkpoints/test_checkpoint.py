"""Checkpoints of one process: what comes back is what went in, bit for bit, or nothing is touched."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_run import METADATA, Run, assert_same, save_three, saved_steps, truncate
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import lr_scheduler as rates

from evenpipe.checkpoints import (
    abandon_later,
    find_latest,
    find_step,
    list_checkpoints,
    load,
    mark_unhealthy,
    open_checkpoint,
    prepare_folder,
    save,
)
from evenpipe.checkpoints.manifest import MANIFEST, read_manifest
from evenpipe.checkpoints.settings import describe_settings, merge_settings, plan_settings
from evenpipe.errors import InputError, RunError
from evenpipe.host.optimizer import MOMENTS, HostAdamW
from evenpipe.model.placement import Held


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return save_three(tmp_path)


def reloaded(path: Path, **options: Any) -> Run:
    """Another run, which has loaded the checkpoint."""
    other = Run(seed=5, **options)
    load(open_checkpoint(path), other.shards, other.optimizer)
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.sampled(3)
def test_all_comes_back_and_the_next_step_is_the_same(tmp_path: Path, dtype: torch.dtype, steps: int) -> None:
    """Also where the optimizer has stepped, and by no state, if there is none in the checkpoint."""
    run, other = Run(dtype=dtype), Run(seed=5, dtype=dtype)
    for step in range(steps):
        run.take_step(step)
    path = run.save(tmp_path, steps)
    assert path == tmp_path / f"step-{steps:08}"
    for step in range(3):
        other.take_step(step)
    assert load(open_checkpoint(path), other.shards, other.optimizer) == {**METADATA, "step": steps}
    assert_same(run.tensors(), other.tensors())
    run.take_step(5)
    other.take_step(5)
    assert_same(run.tensors(), other.tensors())


def test_moments_wider_than_their_parameters_keep_their_dtype(tmp_path: Path) -> None:
    run = Run(dtype=torch.bfloat16)
    for shard in run.shards.values():
        moments = {name: torch.rand(shard.tensor.shape) for name in MOMENTS}
        run.optimizer.state[shard.tensor] = {"step": torch.tensor(7.0), **moments}
    assert_same(run.tensors(), reloaded(run.save(tmp_path, 7), dtype=torch.bfloat16).tensors())


def on_the_host(run: Run) -> HostAdamW:
    return HostAdamW([shard.tensor for shard in run.shards.values()], share=1.0, lr=0.01)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    """A run after its first step, and its checkpoint."""
    run = Run()
    run.take_step(1)
    return run, run.save(tmp_path, 1)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_load_that_fails_leaves_moments_of_the_host_as_they_were(saved: tuple[Run, Path], steps: int) -> None:
    _, path = saved
    other, same = Run(seed=5), Run(seed=5)
    other.optimizer, same.optimizer = on_the_host(other), on_the_host(same)
    for step in range(steps):
        other.take_step(step)
        same.take_step(step)
    checkpoint = open_checkpoint(path)
    truncate(next(path.glob("*.distcp")), random.Random(0))
    with pytest.raises((InputError, RunError)):
        load(checkpoint, other.shards, other.optimizer)
    for step in (7, 8):
        assert_same(same.tensors(), other.tensors())
        other.take_step(step)
        same.take_step(step)


def test_the_folder_holds_what_its_manifest_says_and_nothing_else(three: Path) -> None:
    path = three / "step-00000003"
    manifest = read_manifest(path)
    assert {file.name for file in path.iterdir()} == {*manifest.files, MANIFEST}
    assert set(manifest.files) == {"__0_0.distcp", ".metadata", "run.json"}
    assert manifest.tensors["parameters.model.embed_tokens.weight"].shape == (9, 4)
    assert manifest.tensors["optimizer.step.model.norm.weight"].shape == ()
    assert len(manifest.tensors) == 3 * (1 + 3)
    assert str(three).encode() not in (path / ".metadata").read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_without_us(three: Path, tmp_path: Path) -> None:
    tensors = {"parameters.model.norm.weight": torch.zeros(4)}
    dcp.load(tensors, checkpoint_id=three / "step-00000003", no_dist=True)
    run = Run()
    load(open_checkpoint(three / "step-00000003"), run.shards)
    assert torch.equal(tensors["parameters.model.norm.weight"], run.shards["model.norm.weight"].tensor)
    dcp_to_torch_save(three / "step-00000003", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert whole.keys() == open_checkpoint(three / "step-00000003").manifest.tensors.keys()
    for name, shard in run.shards.items():
        assert torch.equal(whole[f"parameters.{name}"], shard.tensor)


# ---- what does not fit


def with_more(run: Run) -> None:
    run.shards["lm_head.weight"] = Held.whole(nn.Parameter(torch.zeros(9, 4)))


def with_fewer(run: Run) -> None:
    del run.shards["model.norm.weight"]
    run.optimizer = torch.optim.AdamW([shard.tensor for shard in run.shards.values()])


def with_wider_state(run: Run) -> None:
    run.take_step(1)
    state = run.optimizer.state[run.shards["model.norm.weight"].tensor]
    state["exp_avg"] = state["exp_avg"].double()


MISFITS: list[tuple[dict[str, Any], Callable[[Run], None] | None, str]] = [
    # options of the other model, what is changed in it, the sentence
    ({"rows": 10}, None, r"embed_tokens.weight' has shape \(9, 4\) in the checkpoint and \(10, 4\) in the model"),
    ({"dtype": torch.bfloat16}, None, "has dtype float32 in the checkpoint and bfloat16 in the model"),
    ({}, with_more, r"the checkpoint has no 'lm_head\.weight', which the model has"),
    ({}, with_fewer, r"has 'model\.norm\.weight' that the model does not"),
    ({}, with_wider_state, r"'exp_avg' of 'model\.norm\.weight' has dtype float32 in the .* and float64"),
]


def test_another_model_is_refused_and_stays_as_it_is(three: Path) -> None:
    for options, change, says in MISFITS:
        run = Run(**options)
        if change is not None:
            change(run)
        before = run.tensors()
        with pytest.raises(InputError, match=says):
            load(open_checkpoint(three / "step-00000003"), run.shards, run.optimizer)
        assert_same(before, run.tensors())


def test_what_cannot_be_saved_is_refused(three: Path) -> None:
    run, odd = Run(), Run()
    odd.optimizer.state[odd.shards["model.norm.weight"].tensor] = {"rounds": 3}
    for of_run, changes, says in (
        (run, {"metadata": {"when": object()}}, "metadata of a checkpoint: .*expected JSON values"),
        (run, {"keep": 0}, "keep is 0; it must be at least 1"),
        (run, {"shards": {}}, "optimizer: 3 of its 3 parameters are not among those of the pipeline"),
        (odd, {}, r"state 'rounds' of 'model\.norm\.weight' is int; expected a tensor"),
    ):
        arguments = {"shards": of_run.shards, "optimizer": of_run.optimizer, "metadata": METADATA, "keep": 2} | changes
        with pytest.raises(InputError, match=says):
            save(three, 4, **arguments)
        assert saved_steps(three) == ["step-00000001", "step-00000002", "step-00000003"]


# ---- parameters whose optimizer state begins anew: one warning says which ones

NAMES = {"embed": "model.embed_tokens.weight", "mlp": "model.layers.0.mlp.weight", "norm": "model.norm.weight"}


def trained(run: Run, names: str, optimizer: str = "AdamW") -> Run:
    """The run with an optimizer of these parameters only; all others are frozen."""
    for short, name in NAMES.items():
        run.shards[name].tensor.requires_grad_(short in names.split())
    parameters = [shard.tensor for shard in run.shards.values() if shard.tensor.requires_grad]
    run.optimizer = getattr(torch.optim, optimizer)(parameters, lr=0.01)
    return run


EMBED, MLP, NORM = (repr(name) for name in NAMES.values())

BEGINS = "which is trained now: its state begins"
NEWLY_TRAINED = [
    # trained before, optimizer, steps, trained now, what the warning says after the checkpoint's name
    ("embed mlp", "AdamW", 1, "embed mlp norm", f"no optimizer state of {NORM}, {BEGINS}"),
    ("norm", "AdamW", 1, "embed mlp norm", f"no optimizer state of {EMBED} and {MLP}, which are trained now: theirs b"),
    ("embed mlp norm", "AdamW", 1, "embed mlp norm", None),
    ("embed mlp norm", "AdamW", 1, "norm", None),
    ("norm", "AdamW", 0, "embed mlp norm", None),
    ("norm", "SGD", 2, "embed mlp norm", None),
]


def test_which_parameters_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (before, optimizer, steps, now, said) in enumerate(NEWLY_TRAINED):
        run = trained(Run(), before, optimizer)
        for step in range(steps):
            run.take_step(step)
        if optimizer == "SGD":  # keeps None where there is no momentum
            run.optimizer.state.clear()
        path = run.save(tmp_path / str(number), steps)
        other = trained(Run(seed=5), now, optimizer)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(open_checkpoint(path), other.shards, other.optimizer)
        loaded, state = run.tensors(), other.tensors()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items() if name in loaded)
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == (said is not None), warnings
        assert not warnings or warnings[0].startswith(f"the checkpoint '{path}' has {said}")


# ---- old ones


def test_a_damaged_one_does_not_count_as_kept(three: Path) -> None:
    truncate(three / "step-00000003" / "__0_0.distcp", random.Random(0))
    Run().save(three, 4, keep=2)
    assert saved_steps(three) == ["step-00000002", "step-00000003", "step-00000004"]
    Run().save(three, 5, keep=2)
    assert saved_steps(three) == ["step-00000004", "step-00000005"]


def test_later_ones_stay_when_a_run_went_back(three: Path) -> None:
    (three / "step-00000003").rename(three / "step-00000300")
    Run().save(three, 3, keep=1)
    assert saved_steps(three) == ["step-00000003", "step-00000300"]


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"the folder for checkpoints cannot be written to: .*file"):
        prepare_folder(tmp_path / "file" / "checkpoints")
    prepare_folder(tmp_path / "new" / "checkpoints")
    assert (tmp_path / "new" / "checkpoints").is_dir()


# ---- marks of health: which ones are kept, found and listed, and what is set aside when a run goes back


FAULT = "the loss has doubled"


def save_marked(folder: Path, step: int, *, healthy: bool = True, keep: int | None = 2) -> Path:
    run = Run()
    metadata = {"extra": {"step": step}, **({} if healthy else {"unhealthy": FAULT})}
    return save(folder, step, run.shards, run.optimizer, metadata, keep=keep)


def steps_in(folder: Path) -> str:
    """`1 2- 3`: steps 1 to 3, of which the second is unhealthy."""
    listed = reversed(list_checkpoints(folder))
    return " ".join(f"{saved.step}" + ("" if saved.unhealthy is None else "-") for saved in listed)


KEPT = [
    # saved in this order ("-": unhealthy), keep, left
    ("1 2 3 4", 2, "3 4"),
    ("1 2", 1, "2"),
    ("1 2 3- 4-", 2, "2 3- 4-"),
    ("1 2 3- 4- 5- 6-", 2, "2 5- 6-"),
    ("1 2 3- 4", 2, "3- 4"),
    ("1 2- 3-", 1, "1 3-"),
    ("1 2- 3- 4", 1, "4"),
    ("1- 2- 3- 4-", 2, "3- 4-"),
    ("1 2- 3-", None, "1 2- 3-"),
    ("1 2- 3 4-", 3, "2- 3 4-"),
]


def test_the_newest_healthy_one_is_never_deleted(tmp_path: Path) -> None:
    for number, (saved, keep, left) in enumerate(KEPT):
        for step in saved.split():
            save_marked(tmp_path / str(number), int(step.rstrip("-")), healthy=not step.endswith("-"), keep=keep)
        assert steps_in(tmp_path / str(number)) == left, (saved, keep)


def test_a_truncated_one_is_no_healthy_one(tmp_path: Path) -> None:
    for step in (1, 2):
        save_marked(tmp_path, step, keep=None)
    truncate(tmp_path / "step-00000002" / "__0_0.distcp", random.Random(0))
    for step in (3, 4, 5):
        save_marked(tmp_path, step, healthy=False, keep=1)
    assert steps_in(tmp_path) == "1 5-"


def test_one_that_turns_out_to_be_ruined_is_marked_afterwards(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_marked(tmp_path, step, healthy=step != 3, keep=None)
    mark_unhealthy(tmp_path, 2, "it led to a loss of nan")
    assert steps_in(tmp_path) == "1 2- 3-"
    assert find_step(tmp_path, 2).checkpoint.unhealthy == "it led to a loss of nan"
    assert open_checkpoint(tmp_path / "step-00000003").unhealthy == FAULT
    assert open_checkpoint(tmp_path / "step-00000001").unhealthy is None
    save_marked(tmp_path, 4, healthy=False, keep=2)
    assert steps_in(tmp_path) == "1 3- 4-"


def test_later_ones_are_abandoned_and_deleted_when_the_run_has_passed_them(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save_marked(tmp_path, step, keep=None)
    assert abandon_later(tmp_path, 2) == [4, 6]
    assert find_latest(tmp_path).checkpoint.step == 2
    assert steps_in(tmp_path) == "2"
    assert open_checkpoint(tmp_path / "step-00000006.abandoned").step == 6, "renaming it back is all it takes"
    save_marked(tmp_path, 3)
    abandoned = ["step-00000004.abandoned", "step-00000006.abandoned"]
    assert saved_steps(tmp_path) == ["step-00000002", "step-00000003", *abandoned]
    save_marked(tmp_path, 4)
    assert saved_steps(tmp_path) == ["step-00000003", "step-00000004", abandoned[1]]
    save_marked(tmp_path, 7)
    assert saved_steps(tmp_path) == ["step-00000004", "step-00000007"]


def test_a_step_may_be_abandoned_again(tmp_path: Path) -> None:
    """Also one whose save was interrupted between two renames."""
    for _ in range(2):
        save_marked(tmp_path, 2)
        save_marked(tmp_path, 4)
        assert abandon_later(tmp_path, 2) == [4]
        assert saved_steps(tmp_path) == ["step-00000002", "step-00000004.abandoned"]
    save_marked(tmp_path, 4)
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.replaced")
    assert abandon_later(tmp_path, 2) == [4]
    assert saved_steps(tmp_path) == ["step-00000002", "step-00000004.abandoned"]
    assert abandon_later(tmp_path, 2) == []


# ---- what an optimizer and a scheduler know beside tensors comes back through JSON, by the names of parameters


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


def through_json(*holders: Holder) -> dict[str, Any]:
    return json.loads(json.dumps(merge_settings([holder.describe() for holder in holders])))


def test_a_schedule_goes_on() -> None:
    for name in SCHEDULERS:
        whole, other = Holder(["ab", "c"], name), Holder(["ab", "c"], name)
        for step in range(4):
            whole.take_step(step)
        other.load(through_json(whole))
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
        other.load(through_json(*(Holder(held, ab=1, cd=2) for held in saved_groups)))
        assert [group["lr"] for group in other.optimizer.param_groups] == learning_rates, groups
        assert all(group["betas"] == (0.8, 0.9) for group in other.optimizer.param_groups)


def test_a_rate_that_is_a_tensor_stays_one_and_how_an_optimizer_computes_is_not_restored() -> None:
    before, after = Holder(["a"]), Holder(["a"])
    before.optimizer.param_groups[0] |= {"lr": torch.tensor(0.5), "fused": True}
    rate = after.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    after.load(through_json(before))
    (group,) = after.optimizer.param_groups
    assert group["lr"] is rate and rate == 0.5 and group["fused"] is None


def test_a_schedule_that_is_left_out_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Holder(["a"]).load(through_json(Holder(["a"], "LambdaLR")))
    assert "contains the state of a scheduler (LambdaLR), but no scheduler is given" in caplog.text


def test_what_cannot_be_saved_or_loaded_is_refused() -> None:
    holder = Holder(["a"])
    holder.optimizer.param_groups[0]["owner"] = object()
    apart = through_json(Holder(["a", "c", "b"], a=1, c=2, b=1))
    for call, says in (
        (holder.describe, "'owner' of a group is object; it must be a number, a text"),
        (
            lambda: Holder(["bac"]).load(apart),
            "'b' and 'c' are in one group, but have different options in the checkpoint 'x'",
        ),
        (
            lambda: Holder(["a"], "LambdaLR").load(through_json(Holder(["a"]))),
            "scheduler: LambdaLR, but the checkpoint 'x' was saved without one",
        ),
    ):
        with pytest.raises(InputError, match=says):
            call()
