"""Runs that go on with other sizes read every row once per epoch; those that diverge name a checkpoint, refuse what is
unhealthy, go back and recover."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import run_processes
from training_runs import curve, logged, prepared, report_of, start, steps_logged, train, train_config_until

from evenpipe.checkpoints import list_checkpoints
from evenpipe.errors import InputError, RunError
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data
from evenpipe.train.recovery import find_start

# --- rows that pipelines are given ------------------------------------------------------------------------------------

ROWS = 46
SIZES = {
    # processes, overrides of each part of the run, number of steps after which it ends (None: at its end)
    "larger steps, then smaller ones": [
        (1, ("pipeline.microbatches=4",), 6),
        (1, ("pipeline.microbatches=8",), 9),
        (1, ("pipeline.microbatches=3",), None),
    ],
    "replicas between, over the end of an epoch": [
        (2, ("pipeline.microbatches=5", "pipeline.microbatch_size=2"), 5),
        (2, ("pipeline.dp=2", "pipeline.microbatches=3"), 8),
        (1, ("pipeline.microbatches=2", "pipeline.microbatch_size=7"), None),
    ],
    "documents kept apart in packed rows": [
        (1, ("data.documents=separate", "pipeline.microbatches=7"), 7),
        (1, ("data.documents=separate", "pipeline.microbatches=5"), 10),
        (1, ("data.documents=separate", "pipeline.microbatches=6"), None),
    ],
}


def write_run_of_rows(folder: Path) -> Path:
    """`ROWS` rows that differ, of which none is held back, for two epochs."""
    draw = random.Random(3)
    text = folder / "letters.txt"
    text.write_text("\n".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(2000)))
    length = {"training.steps": None, "training.epochs": 2, "checkpoint.every_steps": 1}
    data = {"data.files": [str(text)], "data.validation_fraction": 0.0}
    path = prepared(folder, {"pipeline.vocabulary": "first-last", **data, **length})
    with open_data(load_config(path)).tokens_path.open("r+b") as file:
        file.truncate(ROWS * 32 * 4)
    record = folder / "run" / "data.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"tokens": ROWS * 32}))
    return path


def train_and_note_rows(path: str, overrides: Sequence[str], until: int | None, folder: str) -> None:
    """The trainer; each process that feeds a pipeline notes in a file what it gives it, step by step."""
    take_step = Pipeline.step

    def step(pipeline, ids, *arguments, **options):
        if ids is not None:
            with (Path(folder) / f"replica {pipeline.replica}").open("a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")
        return take_step(pipeline, ids, *arguments, **options)

    Pipeline.step = step
    train_config_until(load_config(path, overrides), until)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.sampled(1)
def test_every_row_is_read_once_per_epoch(sizes: str, tmp_path: Path) -> None:
    path = write_run_of_rows(tmp_path)
    config = load_config(path)
    number_of = {tuple(row): number for number, row in enumerate(open_batches(config, open_data(config)).rows.tolist())}
    assert len(number_of) == ROWS
    read: list[int] = []
    for place, (processes, overrides, until) in enumerate(SIZES[sizes]):
        notes = tmp_path / f"part {place}"
        notes.mkdir()
        overrides = (f"pipeline.processes={processes}", *overrides)
        run_processes(train_and_note_rows, processes, str(path), overrides, until, str(notes))
        replicas = [note.read_text().splitlines() for note in sorted(notes.iterdir())]
        for step in zip(*replicas, strict=True):
            read += [number_of[tuple(row)] for rows in step for row in json.loads(rows)]
    for epoch in range(2):
        times = Counter(read[epoch * ROWS : (epoch + 1) * ROWS])
        assert times == Counter(range(ROWS)), f"epoch {epoch}"
    lines = steps_logged(tmp_path)
    assert lines[-1]["epoch"] == len(read) / ROWS == report_of(tmp_path)["epoch"]
    assert lines[-2]["epoch"] < 2 <= lines[-1]["epoch"]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


# --- divergence -------------------------------------------------------------------------------------------------------

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


def usual_losses(folder: Path) -> dict[str, object]:
    """Return what the newest checkpoint knows of the losses before it, by which later ones are judged."""
    return list_checkpoints(folder / "run" / "checkpoints")[0].extra["health"]


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
    assert usual_losses(tmp_path / "a") == usual_losses(tmp_path / "whole")
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
