"""A run that diverges: which checkpoint it names, what it refuses, and how it goes back and recovers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from training_runs import curve, logged, prepared, start, train

from evenpipe.checkpoints import list_checkpoints
from evenpipe.errors import InputError, RunError
from evenpipe.train.config_file import load_config
from evenpipe.train.recovery import find_start

STEPS = 32
RUINOUS = "optimizer.learning_rate=1e7"
SGD = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0, "clip_norm": "none"}


def prepared_sgd(folder: Path, *, every: int, log: int = 1, processes: int = 2) -> Path:
    changes = {f"optimizer.{name}": value for name, value in SGD.items()}
    sizes = {"training.steps": STEPS, "checkpoint.every_steps": every, "output.log_every_steps": log}
    return prepared(folder, {**changes, **sizes, "pipeline.processes": processes})


def marks(folder: Path) -> dict[int, bool]:
    """Return whether each checkpoint is healthy, by step."""
    listed = list_checkpoints(folder / "run" / "checkpoints")
    return {saved.step: saved.unhealthy is None for saved in reversed(listed)}


DIVERGENCES = [
    # steps between checkpoints, steps between log lines, last step of the good part
    (1, 1, 24),
    pytest.param(4, 1, 26, marks=pytest.mark.slow),
    pytest.param(5, 7, 25, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("every", "log", "good"), DIVERGENCES)
def test_a_run_that_has_diverged_goes_back_to_a_healthy_checkpoint(
    every: int, log: int, good: int, tmp_path: Path
) -> None:
    """`keep` is 2, but the last healthy checkpoint is left, and the curve from there is that of a run that has never
    diverged."""
    whole, path = (prepared_sgd(tmp_path / name, every=every, log=log) for name in ("whole", "a"))
    train(whole)
    assert all(marks(tmp_path / "whole").values())

    train(path, until=good)
    healthy = good // every * every
    failure = start(path, RUINOUS).exception
    assert isinstance(failure, RunError)
    said = re.fullmatch(
        r"loss \S+ and gradient norm \S+ in step (\d+): training has diverged; the newest healthy checkpoint is that of"
        r" step (\d+): change what led here, such as optimizer\.learning_rate, and add checkpoint\.resume_from=(\d+)"
        r" to the command",
        str(failure),
    )
    assert said, failure
    assert healthy < int(said[1]) <= healthy + 4
    assert int(said[2]) == int(said[3]) == healthy
    found = marks(tmp_path / "a")
    assert found[healthy] and not any(is_healthy for step, is_healthy in found.items() if step > healthy)

    if max(found) > healthy:
        refused = start(path).exception
        assert isinstance(refused, InputError)
        assert f"the newest checkpoint, step-{max(found):08d}" in str(refused)
        assert "is marked as unhealthy: " in str(refused)
        assert f"add checkpoint.resume_from={healthy} to the command" in str(refused)
        assert str(refused).endswith(f"; checkpoint.resume_from={max(found)} continues from the unhealthy one")

    option = f"checkpoint.resume_from={healthy}"
    printed = train(path, option, until=healthy + every)
    if max(found) > healthy:
        assert "end in .abandoned now" in printed or "ends in .abandoned now" in printed
    printed = train(path, option)
    assert f"continuing from {tmp_path / 'a' / 'run' / 'checkpoints' / f'step-{healthy + every:08d}'}" in printed
    assert curve(tmp_path / "a") == curve(tmp_path / "whole")
    assert all(marks(tmp_path / "a").values())
    assert not list((tmp_path / "a").rglob("*.abandoned"))


def test_only_steps_that_exist_can_be_chosen_and_an_unhealthy_one_only_by_name(tmp_path: Path) -> None:
    path = prepared_sgd(tmp_path, every=2, processes=1)
    folder = str(tmp_path / "run" / "checkpoints")

    def refused(step: int) -> str:
        with pytest.raises(InputError) as caught:
            find_start(load_config(path, [f"checkpoint.resume_from={step}"]), None)
        return str(caught.value)

    assert refused(2) == f"checkpoint.resume_from is 2, but there is no checkpoint in {folder!r}"
    train(path, until=22)
    bad = ("optimizer.learning_rate=10", "optimizer.clip_norm=1.0")  # the losses are bad, but finite
    train(path, *bad, until=30)
    assert marks(tmp_path) == {22: True, 28: False, 30: False}
    steps = "22, 28 (unhealthy) and 30 (unhealthy)"
    assert refused(3) == f"checkpoint.resume_from is 3, but {folder!r} has steps {steps}"
    printed = train(path, "checkpoint.resume_from=30", *bad)
    assert "this checkpoint is marked as unhealthy: " in printed
    assert logged(tmp_path)[-2]["step"] == STEPS
