"""A run that goes on with other sizes reads every row once per epoch: noted are the rows that pipelines are given."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import run_processes
from training_runs import prepared, report_of, steps_logged, train_config_until

from evenpipe.runtime.pipeline import Pipeline
from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data

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
        (2, ("pipeline.replicas=2", "pipeline.microbatches=3"), 8),
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
