"""Checkpoints of one process: what comes back is what went in, bit for bit, or nothing is touched."""

from __future__ import annotations

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

from evenpipe.checkpoints import find_latest, load, open_checkpoint, prepare_folder, save
from evenpipe.checkpoints.manifest import MANIFEST, read_manifest
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


def on_the_host(run: Run, share: float = 1.0, **changes: object) -> HostAdamW:
    return HostAdamW([shard.tensor for shard in run.shards.values()], share=share, lr=0.01, **changes)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    """A run after its first step, and its checkpoint."""
    run = Run()
    run.take_step(1)
    return run, run.save(tmp_path, 1)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_moments_of_the_host_are_read_to_where_they_stay(saved: tuple[Run, Path], share: float) -> None:
    (run, path), other = saved, Run(seed=5)
    other.optimizer = optimizer = on_the_host(other, share)
    load(open_checkpoint(path), other.shards, optimizer)
    assert optimizer.hosted
    for parameter in optimizer.hosted:
        for name in MOMENTS:
            assert optimizer.state[parameter][name] is optimizer.moment_on_host(parameter, name)
    for step in range(2, 4):
        assert_same(run.tensors(), other.tensors())
        run.take_step(step)
        other.take_step(step)
    load(open_checkpoint(path), other.shards, optimizer)  # over those of an optimizer that has stepped
    assert_same(reloaded(path).tensors(), other.tensors())


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


def test_parameters_load_without_an_optimizer_and_in_place(saved: tuple[Run, Path]) -> None:
    (run, path), other = saved, Run(seed=5)
    views = {name: shard.tensor.detach() for name, shard in other.shards.items()}
    load(open_checkpoint(path), other.shards)
    for name, shard in run.shards.items():
        assert torch.equal(views[name], shard.tensor)


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


def test_no_checkpoint_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("nothing", "empty", "file"):
        latest = find_latest(tmp_path / name)
        assert (latest.checkpoint, latest.rejected) == (None, ())


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
        (run, {"keep": 0}, "keep is 0, expected at least 1"),
        (run, {"shards": {}}, "optimizer: 3 of its 3 parameters are not among those of the pipeline"),
        (odd, {}, r"state 'rounds' of 'model\.norm\.weight' is int, expected a tensor"),
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
    ("norm", "RMSprop", 3, "embed norm", f"no optimizer state of {EMBED}, {BEGINS}"),
    ("embed", "AdamW", 1, "mlp norm", f"no optimizer state of {MLP} and {NORM}, which are"),
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


def test_a_checkpoint_without_an_optimizer_names_the_first_and_counts_the_others(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("evenpipe.checkpoints.checkpoint.SHOWN_NAMES", 1)
    run = Run()
    path = save(tmp_path, 3, run.shards, None, METADATA)
    load(open_checkpoint(path), run.shards, run.optimizer)
    (record,) = caplog.records
    assert f"no optimizer state of {EMBED} and 2 more parameters, which are trained now" in record.getMessage()
    load(open_checkpoint(path), run.shards)
    assert len(caplog.records) == 1, "without an optimizer there is nothing to begin"


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
