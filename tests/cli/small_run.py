"""What tests of commands share: a configuration in which nothing is wrong or takes long, and what commands print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evenpipe.cli.main import main

TOML = """
[model]
architecture = "llama"
[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 4
num_attention_heads = 2
max_position_embeddings = 64
[data]
files = "text.txt"
sequence_length = 16
[tokenizer]
vocabulary_size = 300
[pipeline]
processes = 2
microbatches = 2
[output]
folder = "run"
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Return what a command prints that ends with `code` and without a word on standard error."""
    capsys.readouterr()  # of libraries that wrote files before
    assert main(list(arguments)) == code
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the same, of a command that prints JSON."""
    values: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json", code=code))
    return values


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one sentence with which a command refuses its input."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("evenpipe: ") and output.err.count("\n") == 1
    return output.err
