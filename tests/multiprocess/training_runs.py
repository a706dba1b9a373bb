"""Small runs of the trainer: their configuration, training in processes of the harness or by the command, and what they
write."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import process_groups
from harness import Outcome, describe, run_outcomes

from evenpipe.train import trainer
from evenpipe.train.config import Config
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare

STEPS = 12
WORDS = ("a pipeline", "one device", "the batch", "waits for", "holds", "sends", "every stage", "its rows")
TABLES: dict[str, dict[str, Any]] = {
    "model": {"architecture": "llama", "self_check": False},
    "model.config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "data": {"sequence_length": 32, "validation_fraction": 0.05},
    "tokenizer": {"vocabulary_size": 301},
    "pipeline": {"processes": 2, "vocabulary": "vocab-2", "microbatches": 4},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3},
    "training": {"steps": STEPS},
    "checkpoint": {"every_steps": 4},
    "output": {"tensorboard": False, "export": False},
}


# --- configurations ---------------------------------------------------------------------------------------------------


def sentences(number: int, seed: int) -> str:
    """Return text of which a small model learns something in a few steps."""
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=6)) + ".\n" for _ in range(number))


def write_tables(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a configuration file; a value of None leaves a key out."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items() if value is not None)]
    path.write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def write_config(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write a configuration and the text that it trains on into `folder`, where its run goes, too.

    changes: values by section and key, as in {"training.steps": 4}; None leaves a key or a section out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_text(sentences(400, seed=1))
    files = {"data.files": [str(folder / "train.txt")], "output.folder": str(folder / "run")}
    tables = {name: dict(table) for name, table in TABLES.items()}
    for name, value in {**files, **(changes or {})}.items():
        section, _, key = name.rpartition(".")
        tables.setdefault(section, {})[key] = value
        if name in tables and value is None:
            del tables[name]
    path = folder / "config.toml"
    write_tables(path, tables)
    return path


def prepared(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write a configuration and prepare its data, as `evenpipe train` does before it starts processes."""
    path = write_config(folder, changes)
    prepare(load_config(path), say=lambda text: None)
    return path


# --- training ---------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """Ends a run in the middle, as a kill would."""


def train_config_until(config: Config, until: int | None) -> bool:
    """Train on the processes of the harness. Return whether the run ended as after a kill, with `until` steps done."""
    take_step = trainer._Run._step

    def step(run: Any) -> None:
        if run.progress.step == until:
            raise StoppedError
        take_step(run)

    trainer._Run._step = step
    try:
        trainer.train(config)
    except StoppedError:
        return True
    finally:
        trainer._Run._step = take_step
    return False


def _train_in_process(path: str, overrides: Sequence[str], until: int | None) -> bool:
    """As the command does that is started in the folder of the configuration."""
    os.chdir(Path(path).parent)
    sys.path.append(str(Path.cwd()))
    return train_config_until(load_config(Path(path), overrides), until)


def start(path: Path, *overrides: str, until: int | None = None) -> Outcome:
    """Train on as many new processes as the configuration says, and return how the first one ended; the others ended
    alike. until: as in `train_config_until`."""
    processes = load_config(path, overrides).pipeline.processes
    outcomes = run_outcomes(_train_in_process, processes, str(path), overrides, until)
    kinds = {(outcome.exit_code, type(outcome.exception)) for outcome in outcomes}
    assert len(kinds) == 1 and kinds <= {(0, type(None)), (1, type(outcomes[0].exception))}, describe(outcomes)
    return outcomes[0]


def train(path: Path, *overrides: str, until: int | None = None) -> str:
    """As `start`, for a run without failure; return what the first process printed."""
    outcome = start(path, *overrides, until=until)
    if outcome.exception is not None:
        raise outcome.exception
    assert outcome.value == (until is not None), f"stopped: {outcome.value}\n{outcome.printed}"
    return outcome.printed


def evenpipe(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own."""
    command = [sys.executable, "-m", "evenpipe.cli.main", *map(str, arguments)]
    return process_groups.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def finish(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    """Return what a command printed, once it has ended."""
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == exit_code, output
    assert "Traceback" not in output, output
    return output


# --- results ----------------------------------------------------------------------------------------------------------


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def steps_logged(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of steps, without those of validation."""
    return [line for line in logged(folder) if "loss" in line]


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """Return (step, loss, gradient norm, learning rate) of every step, and validation losses as (step, loss)."""
    return [
        (line["step"], line["loss"], line["gradient_norm"], line["learning_rate"])
        if "loss" in line
        else (line["step"], line["validation_loss"])
        for line in logged(folder)
    ]


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return report


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "run" / "checkpoints").glob("step-*"))


def worker_of(launcher: int) -> int:
    """Return a training process below a launcher: that with the most threads, those of its communicators."""
    workers = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            threads = len(list((entry / "task").iterdir()))
        except (OSError, IndexError):
            continue
        if session == launcher and int(entry.name) != launcher:
            workers.append((threads, int(entry.name)))
    return max(workers)[1]
