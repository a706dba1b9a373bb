"""A run that diverges: which checkpoint it names, what it refuses, and how it goes back and recovers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Outcome, run_outcomes
from test_training import StoppedError, curve, logged, train_config_until, write_config

from evenpipe.checkpoints import list_checkpoints
from evenpipe.errors import InputError, RunError
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare

STEPS = 32
RUINOUS = "optimizer.learning_rate=1e7"


def write_sgd_config(folder: Path, *, every: int, log: int = 1) -> Path:
    path = write_config(folder, steps=STEPS)
    written = path.read_text()
    for old, new in (
        ("[model]\n", "[model]\nself_check = false\n"),
        ("learning_rate = 1e-2\nwarmup_steps = 3", SGD),
        ("every_steps = 4", f"every_steps = {every}"),
        ("tensorboard = false", f"tensorboard = false\nlog_every_steps = {log}"),
    ):
        assert old in written
        written = written.replace(old, new)
    path.write_text(written)
    prepare(load_config(path), say=lambda text: None)
    return path


SGD = """name = "sgd"
learning_rate = 0.1
schedule = "constant"
warmup_steps = 0
clip_norm = "none"
"""


def train_part(path: str, overrides: tuple[str, ...], until: int | None) -> None:
    train_config_until(load_config(Path(path), overrides), until)


def train(path: Path, *overrides: str, until: int | None = None) -> Outcome:
    """Return how the first process ended; all of them end alike."""
    outcomes = run_outcomes(train_part, 2, str(path), overrides, until)
    assert len({type(outcome.exception) for outcome in outcomes}) == 1, [outcome.exception for outcome in outcomes]
    return outcomes[0]


def marks(folder: Path) -> dict[int, bool]:
    """Return whether each checkpoint is healthy, by step."""
    listed = list_checkpoints(folder / "run" / "checkpoints")
    return {saved.step: saved.unhealthy is None for saved in reversed(listed)}


DIVERGENCES = [
    # steps between checkpoints, steps between log lines, last step of the good part
    (1, 1, 24),
    (4, 1, 26),
    (5, 7, 25),
]


@pytest.mark.parametrize(("every", "log", "good"), DIVERGENCES)
def test_a_run_that_has_diverged_goes_back_to_a_healthy_checkpoint(
    every: int, log: int, good: int, tmp_path: Path
) -> None:
    """`keep` is 2, but the last healthy checkpoint is left, and the curve from there is that of a run that has never
    diverged."""
    whole, path = (
        write_sgd_config(tmp_path / "whole", every=every, log=log),
        write_sgd_config(tmp_path / "a", every=every, log=log),
    )
    assert train(whole).exception is None
    assert all(marks(tmp_path / "whole").values())

    assert isinstance(train(path, until=good).exception, StoppedError)
    healthy = good // every * every
    failure = train(path, RUINOUS).exception
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
        refused = train(path).exception
        assert isinstance(refused, InputError)
        assert f"the newest checkpoint, step-{max(found):08d}" in str(refused)
        assert "is marked as unhealthy: " in str(refused)
        assert f"add checkpoint.resume_from={healthy} to the command" in str(refused)
        assert str(refused).endswith(f"; checkpoint.resume_from={max(found)} continues from the unhealthy one")

    option = f"checkpoint.resume_from={healthy}"
    back = train(path, option, until=healthy + every)
    assert isinstance(back.exception, StoppedError)
    if max(found) > healthy:
        assert "end in .abandoned now" in back.printed or "ends in .abandoned now" in back.printed
    again = train(path, option)
    assert again.exception is None
    assert f"continuing from {tmp_path / 'a' / 'run' / 'checkpoints' / f'step-{healthy + every:08d}'}" in again.printed
    assert curve(tmp_path / "a") == curve(tmp_path / "whole")
    assert all(marks(tmp_path / "a").values())
    assert not list((tmp_path / "a").rglob("*.abandoned"))


def test_only_steps_that_exist_can_be_chosen_and_an_unhealthy_one_only_by_name(tmp_path: Path) -> None:
    path = write_sgd_config(tmp_path, every=2)
    failure = train(path, "checkpoint.resume_from=2").exception
    assert isinstance(failure, InputError)
    assert str(failure) == (
        f"checkpoint.resume_from is 2, but there is no checkpoint in '{tmp_path / 'run' / 'checkpoints'}'"
    )
    assert isinstance(train(path, until=22).exception, StoppedError)
    bad = ("optimizer.learning_rate=10", "optimizer.clip_norm=1.0")  # the losses are bad, but finite
    assert isinstance(train(path, *bad, until=30).exception, StoppedError)
    assert marks(tmp_path) == {22: True, 28: False, 30: False}
    failure = train(path, "checkpoint.resume_from=3").exception
    assert isinstance(failure, InputError)
    assert str(failure) == (
        f"checkpoint.resume_from is 3, but '{tmp_path / 'run' / 'checkpoints'}' has steps 22, 28 (unhealthy) and"
        " 30 (unhealthy)"
    )
    onward = train(path, "checkpoint.resume_from=30", *bad)
    assert onward.exception is None
    assert "this checkpoint is marked as unhealthy: " in onward.printed
    assert logged(tmp_path)[-2]["step"] == STEPS
    over = train(path)
    assert over.exception is None, "no steps are left, so there is nothing to refuse"
    assert f"all {STEPS} steps were done before" in over.printed
