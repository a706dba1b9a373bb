"""A run that goes on with other sizes reads every row once per epoch: noted are the rows that pipelines are given."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from harness import run_processes
from test_training import StoppedError, logged, train_config_until, write_config

from evenpipe.runtime.pipeline import Pipeline
from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data, prepare

ROWS = 46

SIZES = [
    # processes, overrides of each part of the run, step before which it ends (None: at its end), epochs
    pytest.param(
        [
            (1, ("pipeline.microbatches=4",), 6),
            (1, ("pipeline.microbatches=8",), 9),
            (1, ("pipeline.microbatches=3",), None),
        ],
        id="larger steps, then smaller ones",
    ),
    pytest.param(
        [
            (2, ("pipeline.microbatches=5", "pipeline.microbatch_size=2"), 5),
            (2, ("pipeline.replicas=2", "pipeline.microbatches=3"), 8),
            (1, ("pipeline.microbatches=2", "pipeline.microbatch_size=7"), None),
        ],
        id="replicas between, over the end of an epoch",
    ),
    pytest.param(
        [
            (1, ("data.documents=separate", "pipeline.microbatches=7"), 7),
            (1, ("data.documents=separate", "pipeline.microbatches=5"), 10),
            (1, ("data.documents=separate", "pipeline.microbatches=6"), None),
        ],
        id="documents kept apart in packed rows",
    ),
]


def write_rows_config(folder: Path) -> Path:
    """`ROWS` rows that differ, of which none is held back, for two epochs."""
    path = write_config(folder, vocabulary="first-last")
    words = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = ("".join(words.choices(letters, k=9)) for _ in range(2000))
    (folder / "train.txt").write_text("\n".join(lines))
    written = path.read_text()
    for old, new in (
        (str(Path(__file__).with_name("test_training.py")), str(folder / "train.txt")),
        ("validation_fraction = 0.05", "validation_fraction = 0.0"),
        ("[model]\n", "[model]\nself_check = false\n"),
        ("steps = 12\n", "epochs = 2\n"),
        ("every_steps = 4", "every_steps = 1"),
    ):
        assert old in written
        written = written.replace(old, new)
    path.write_text(written)
    prepare(load_config(path), say=lambda text: None)
    tokens = open_data(load_config(path)).tokens_path
    with tokens.open("r+b") as file:
        file.truncate(ROWS * 32 * 4)
    data = folder / "run" / "data.json"
    data.write_text(json.dumps(json.loads(data.read_text()) | {"tokens": ROWS * 32}))
    return path


def train_and_note_rows(path: str, overrides: tuple[str, ...], until: int | None, folder: str) -> None:
    """The trainer; each process that feeds a pipeline notes in a file what it gives it, step by step."""
    take_step = Pipeline.step

    def step(pipeline, ids, *arguments, **options):
        if ids is not None:
            with (Path(folder) / f"replica {pipeline.replica}").open("a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")
        return take_step(pipeline, ids, *arguments, **options)

    Pipeline.step = step
    train_config_until(load_config(Path(path), overrides), until)


@pytest.mark.parametrize("parts", SIZES)
def test_every_row_is_read_once_per_epoch(parts: list[tuple[int, tuple[str, ...], int | None]], tmp_path: Path) -> None:
    path = write_rows_config(tmp_path)
    config = load_config(path)
    number_of = {tuple(row): number for number, row in enumerate(open_batches(config, open_data(config)).rows.tolist())}
    assert len(number_of) == ROWS
    read: list[int] = []
    for place, (processes, overrides, until) in enumerate(parts):
        notes = tmp_path / f"part {place}"
        notes.mkdir()
        overrides = (f"pipeline.processes={processes}", *overrides)
        if until is None:
            run_processes(train_and_note_rows, processes, str(path), overrides, until, str(notes))
        else:
            with pytest.raises(StoppedError):
                run_processes(train_and_note_rows, processes, str(path), overrides, until, str(notes))
        replicas = [note.read_text().splitlines() for note in sorted(notes.iterdir())]
        for step in zip(*replicas, strict=True):
            read += [number_of[tuple(row)] for rows in step for row in json.loads(rows)]
    for epoch in range(2):
        times = Counter(read[epoch * ROWS : (epoch + 1) * ROWS])
        assert times == Counter(range(ROWS)), f"epoch {epoch}"
    lines = [line for line in logged(tmp_path) if "loss" in line]
    assert lines[-1]["epoch"] == len(read) / ROWS
    assert lines[-2]["epoch"] < 2 <= lines[-1]["epoch"]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["epoch"] == lines[-1]["epoch"]
    assert np.all(np.diff([line["step"] for line in lines]) == 1)
