"""New configurations, from a model and data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenpipe.declaration import describe_fields
from evenpipe.errors import InputError
from evenpipe.given import check_new
from evenpipe.train.config_file import config_from_dict, sections
from evenpipe.train.found_data import FoundData
from evenpipe.train.input_sections import DEFAULT_END_OF_TEXT
from evenpipe.train.model_source import model_config
from evenpipe.train.packing import split_rows
from evenpipe.train.planned_config import CORPUS, TOKENIZER_ENTRIES, model_tables, write_tables
from evenpipe.train.tokenizer import load_tokenizer, train_tokenizer
from evenpipe.words import count

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

LONGEST = 1024
"""Longest sequence of a new configuration."""
VALIDATION = 0.02
"""Share of the rows."""
COUNTED_CHARACTERS = 2**21
"""Tokens of a text up to this size are counted; more is enough for any new configuration."""
BYTES_PER_TOKEN = 4
"""Approximate bytes of text per token."""
LEAST_STEPS, MOST_STEPS = 20, 1000
"""Limits on the number of steps, which would otherwise be one pass over the data."""


def new_tables(model: str | None, data: FoundData | None, processes: int | None, name: str) -> dict[str, Any]:
    """Return the tables of a configuration that trains without changes.

    model: a hub name, a folder or a config file; None: a small model.
    data: None: sources of Python.
    processes: number of processes; None: one per GPU, or without GPUs one per core, at least two and at most four.
    name: name of the run.

    Raises:
        InputError: the model does not exist or has no tokenizer, or the data has too little text.
    """
    tables: dict[str, Any] = {"model": dict(SMALL_MODEL), "tokenizer": {"vocabulary_size": TOKENIZER_ENTRIES}}
    limits = [LONGEST]
    if model is not None:
        from evenpipe.model import describe

        description = describe(model)
        tables = model_tables(description, model)
        limits.append(description.longest_sequence or LONGEST)
    tables["data"] = {"corpus": CORPUS} if data is None else dict(data.table)
    keeps_weights = "source" in tables["model"]
    tokenizer = load_tokenizer(tables["model"]["source"], None) if keeps_weights else None
    if tokenizer is not None and tokenizer.model_max_length:
        limits.append(tokenizer.model_max_length)
    described = config_from_dict(tables)
    config = model_config(described.model)
    limits.append(getattr(config, "max_position_embeddings", None) or LONGEST)
    devices = min(processes or _processes(), config.num_hidden_layers)
    tables["pipeline"] = {"processes": devices, "schedule": "1f1b", "vocabulary": "balanced"}
    tokens = None
    if data is not None:
        tokens = _tokens(data, tokenizer, described.trained_tokenizer_entries)
    length, microbatches, passes = _batch(tokens, min(limits), devices)
    tables["data"] |= {"sequence_length": length, "validation_fraction": VALIDATION}
    tables["pipeline"]["microbatches"] = microbatches
    tables |= run_tables(passes, None if keeps_weights else 1e-3)
    tables["output"] = {"folder": f"runs/{name}"}
    tables["sample"] = {"prompts": ["The "] if data is not None else ["import os\n"]}
    order = [section for section in sections() if section in tables]
    tables = {section: tables[section] for section in order}
    config_from_dict(tables)
    return tables


def run_tables(passes: int, learning_rate: float | None) -> dict[str, Any]:
    """Return [optimizer], [training] and [checkpoint]. passes: steps of one pass over the data. learning_rate: for
    fresh weights; None: the model has weights."""
    steps = max(LEAST_STEPS, min(MOST_STEPS, passes))
    return {
        "optimizer": {"learning_rate": learning_rate or 2e-5, "warmup_steps": max(1, steps // 20)},
        "training": {"steps": steps, "evaluate_every_steps": max(1, steps // 5)},
        "checkpoint": {"every_steps": max(1, steps // 10)},
    }


def write_new(tables: Mapping[str, Any], path: Path) -> None:
    """Write the tables as TOML, with the meaning of every field above it. Raises InputError if the file exists."""
    check_new(path)
    write_tables(tables, path, how_to_train(path), field_comments())


def how_to_train(path: Path) -> str:
    """Return the notes at the top of a configuration."""
    return (
        f"To train:           evenpipe train {path}\nTo continue a run:  the same command again\n"
        f"All other fields:   evenpipe train --help\nTo replace a value: evenpipe train {path} training.steps=10"
    )


def field_comments() -> dict[str, str]:
    """Return the meaning of every field of a configuration, by `section.field`."""
    return {
        f"{section}.{field.name}": field.text.partition(". ")[0].rstrip(".")
        for section, kind in sections().items()
        for field in describe_fields(kind)
    }


def _processes() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(2, min(4, os.cpu_count() or 1))


def _tokens(data: FoundData, tokenizer: Any, entries: int | None) -> int | None:
    """Return the number of tokens of the data, counted if it is small, else estimated; None if it is not known.

    tokenizer: an existing one; None: the run trains one with `entries` entries.
    """
    if data.bytes is not None and data.bytes > BYTES_PER_TOKEN * COUNTED_CHARACTERS and not data.are_tables:
        return data.bytes // BYTES_PER_TOKEN
    texts, are_all = data.texts(COUNTED_CHARACTERS)
    if not any(texts):
        raise InputError("--data has no text; expected text to train on")
    if not are_all:
        return None if data.bytes is None else data.bytes // BYTES_PER_TOKEN
    if tokenizer is None:
        assert entries is not None
        tokenizer = train_tokenizer(texts, entries, DEFAULT_END_OF_TEXT)
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return sum(len(ids) + 1 for ids in encoded if ids)  # with the end of the text


def _batch(tokens: int | None, longest: int, devices: int) -> tuple[int, int, int]:
    """Return (tokens per sequence, microbatches per step, steps of one pass): little data gets shorter sequences and
    fewer microbatches. tokens: None: there are enough."""
    lengths = [length for length in (LONGEST, 512, 256, 128, 64, 32, 16) if length <= longest] or [longest]
    for length in lengths:
        rows = MOST_STEPS * 100 if tokens is None else _rows(tokens, length)
        for microbatches in (4 * devices, 2 * devices):
            if rows >= LEAST_STEPS * microbatches:
                return min(length, 256) if tokens is None else length, microbatches, rows // microbatches
    assert tokens is not None
    if _rows(tokens, lengths[-1]) < devices:
        raise InputError(
            f"--data has {tokens:,} tokens; it must have at least {(devices + 1) * lengths[-1]:,}:"
            f" a sequence of {lengths[-1]} for each of {count(devices, 'process')} and one for validation"
        )
    return lengths[-1], devices, 0


def _rows(tokens: int, length: int) -> int:
    """Return the rows to train on."""
    training, _ = split_rows(tokens // length, VALIDATION)
    return len(training)
