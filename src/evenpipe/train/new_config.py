"""New configurations, from a model and data, or copied from the examples."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import evenpipe
from evenpipe.errors import InputError
from evenpipe.given import beside
from evenpipe.train.config_file import config_from_dict, sections
from evenpipe.train.config_help import describe_section
from evenpipe.train.input_sections import DataConfig
from evenpipe.train.model_source import model_config
from evenpipe.train.planned_config import CORPUS, TOKENIZER_ENTRIES, model_tables, write_tables
from evenpipe.train.section import show, unknown
from evenpipe.train.sources import find_files, is_saved, kind_of
from evenpipe.train.tokenizer import load_tokenizer

SMALL_MODEL = {
    "architecture": "llama",
    "config": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
}
"""Default model."""

ALL = "all"
"""Name for the whole folder of examples."""

BYTES_PER_TOKEN = 4
"""Approximate bytes of text per token."""
LEAST_STEPS, MOST_STEPS = 20, 1000
"""Limits for the steps of one pass over the data."""


def new_tables(model: str | None, data: str | None, processes: int | None, name: str) -> dict[str, Any]:
    """Return the tables of a configuration that trains without changes.

    model: a hub name, a folder or a config file; None: a small model.
    data: a file, a folder with text, JSON lines or parquet, or one that `save_to_disk` wrote; None: sources of Python.
    processes: number of processes; None: one per GPU, or without GPUs one per core, at least two and at most four.
    name: name of the run.

    Raises:
        InputError: the model or data does not exist, the data has no text, or the model has no tokenizer.
    """
    tables: dict[str, Any] = {"model": dict(SMALL_MODEL), "tokenizer": {"vocabulary_size": TOKENIZER_ENTRIES}}
    if model is not None:
        from evenpipe.model import describe

        tables = model_tables(describe(model), model)
    tables["data"], size = ({"corpus": CORPUS}, None) if data is None else _data(data)
    keeps_weights = "source" in tables["model"]
    if keeps_weights:
        load_tokenizer(tables["model"]["source"], None)
    config = model_config(config_from_dict(tables).model)
    devices = min(processes or _processes(), config.num_hidden_layers)
    tables["pipeline"] = {"processes": devices, "schedule": "1f1b", "vocabulary": "balanced"}
    longest = min(1024, getattr(config, "max_position_embeddings", None) or 1024)
    length, microbatches, passes = _batch(size, longest, devices)
    tables["data"] |= {"sequence_length": length, "validation_fraction": 0.02}
    tables["pipeline"]["microbatches"] = microbatches
    steps = max(LEAST_STEPS, min(MOST_STEPS, passes))
    tables["optimizer"] = {"learning_rate": 2e-5 if keeps_weights else 1e-3, "warmup_steps": max(1, steps // 20)}
    tables["training"] = {"steps": steps, "evaluate_every_steps": max(1, steps // 5)}
    tables["checkpoint"] = {"every_steps": max(1, steps // 10)}
    tables["output"] = {"folder": f"runs/{name}"}
    tables["sample"] = {"prompts": ["The "] if data is not None else ["import os\n"]}
    order = [section for section in sections() if section in tables]
    tables = {section: tables[section] for section in order}
    config_from_dict(tables)
    return tables


def write_new(tables: Mapping[str, Any], path: Path) -> None:
    """Write the tables as TOML, with the meaning of every field above it. Raises InputError if the file exists."""
    _check_new(path)
    comments = {
        f"{section}.{field.name}": field.text.partition(". ")[0].rstrip(".")
        for section, kind in sections().items()
        for field in describe_section(kind)
    }
    notes = (
        f"To train:           evenpipe train {path}\nTo continue a run:  the same command again\n"
        f"All other fields:   evenpipe train --help\nTo replace a value: evenpipe train {path} training.steps=10"
    )
    write_tables(tables, path, notes, comments)


def examples() -> Path:
    """Return the folder of the examples that come with evenpipe."""
    package = Path(evenpipe.__file__).parent
    folder = package / "examples"
    return folder if folder.is_dir() else package.parent.parent / "examples"  # a source checkout


def example_configurations() -> dict[str, Path]:
    """Return the examples that `evenpipe train` runs, by name."""
    files = sorted(examples().glob("*.toml"))
    return {path.stem: path for path in files if "\n[model]" in path.read_text("utf-8")}


def write_example(name: str, path: Path) -> None:
    """Copy the configuration `name`. Raises InputError if the name is unknown or the file exists."""
    known = example_configurations()
    if name not in known:
        raise InputError(unknown("--example", name, (ALL, *known)))
    _check_new(path)
    text = known[name].read_text("utf-8").replace(f"examples/{name}.toml", str(path))
    path.write_text(text, encoding="utf-8")


def write_examples(folder: Path) -> None:
    """Copy all examples. Raises InputError if `folder` exists."""
    _check_new(folder)
    shutil.copytree(examples(), folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))


def _check_new(path: Path) -> None:
    if path.exists():
        raise InputError(f"{show(str(path))} exists already; -o names another one")


def _processes() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(2, min(4, os.cpu_count() or 1))


def _batch(size: int | None, longest: int, devices: int) -> tuple[int, int, int]:
    """Return (tokens per sequence, microbatches per step, steps of one pass) for `size` bytes of data: little data gets
    shorter sequences and fewer microbatches."""
    for length in (1024, 512, 256, 128, 64, 32, 16):
        rows = MOST_STEPS * 100 if size is None else size // BYTES_PER_TOKEN // length
        for microbatches in (4 * devices, 2 * devices):
            if length <= longest and rows >= LEAST_STEPS * microbatches:
                return min(length, 256) if size is None else length, microbatches, rows // microbatches
    return min(16, longest), devices, 0


def _data(name: str) -> tuple[dict[str, Any], int | None]:
    """Return [data] for a file or folder, and its bytes if they are known."""
    path = Path(name)
    if is_saved(name):
        return {"dataset": name}, None
    if path.is_file():
        if not path.stat().st_size:
            raise InputError(f"--data is {show(name)}, but that file is empty; expected text to train on")
        return {"files": [name], **_field(path)}, path.stat().st_size
    if not path.is_dir():
        raise InputError(f"--data is {show(name)}, but there is no such file or folder{beside(name)}")
    found = [one for one in sorted(path.rglob("*")) if one.is_file() and not one.name.startswith(".")]
    tables = [one for one in found if kind_of(one) != "text"]
    texts = [one for one in found if _is_text(one)]
    chosen = texts if len(texts) > len(tables) else tables
    if not chosen:
        raise InputError(f"--data is {show(name)}, but that folder has no text, JSON lines or parquet")
    suffixes = sorted({one.suffix for one in chosen})
    patterns = [f"{name.rstrip('/')}/**/*{suffix}" for suffix in suffixes]
    size = sum(one.stat().st_size for one in find_files(tuple(patterns)))
    return {"files": patterns, **_field(chosen[0])}, size


def _is_text(path: Path) -> bool:
    """Return whether a file starts with UTF-8 text, and is not JSON lines or parquet."""
    if kind_of(path) != "text" or not path.suffix:
        return False
    with path.open("rb") as file:
        begin = file.read(4096)
    try:
        return "\0" not in begin.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > len(begin) - 4 > 0  # cut in the middle of a character


def _field(path: Path) -> dict[str, str]:
    """Return `text_field` unless the default fits: the field with the longest text in the first record."""
    if kind_of(path) == "parquet":
        from pyarrow import parquet

        record = next(iter(parquet.ParquetFile(path).iter_batches(batch_size=1)), None)
        first = {} if record is None else record.to_pylist()[0]
    elif kind_of(path) == "jsonl":
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = json.loads(next((line for line in file if line.strip()), "{}"))
    else:
        return {}
    texts = {key: value for key, value in first.items() if isinstance(value, str)}
    if DataConfig.__dataclass_fields__["text_field"].default in texts or not texts:
        return {}
    return {"text_field": max(texts, key=lambda key: len(texts[key]))}
