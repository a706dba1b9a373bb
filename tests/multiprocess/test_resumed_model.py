"""A run that is started again with another model: refused with the field's name, or gone on with and said."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from harness import run_processes
from test_training import curve, write_config

from evenpipe.errors import InputError
from evenpipe.train import trainer
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare

STEPS = 4


def train(path: str, steps: int, *changes: str) -> None:
    trainer.train(load_config(Path(path), [f"training.steps={steps}", "optimizer.warmup_steps=1", *changes]))


def said_in_training(*arguments) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        train(*arguments)
    return said.getvalue()


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run of four steps with two heads, on one process."""
    path = write_config(tmp_path_factory.mktemp("begun"), processes=1)
    prepare(load_config(path, []))
    run_processes(train, 1, str(path), STEPS)
    return path


def test_the_same_shapes_and_another_function_are_refused(begun) -> None:
    before = curve(begun.parent)
    for change, words in (
        ("model.config.num_attention_heads=4", "num_attention_heads is now 4, was 2"),
        ('model.config.hidden_act="gelu"', 'hidden_act is now "gelu", was "silu"'),
        ("model.config.rms_norm_eps=1e-3", "rms_norm_eps is now 0.001, was 1e-06"),
        ('model.architecture="mistral"', 'model_type is now "mistral", was "llama"'),
    ):
        with pytest.raises(InputError) as caught:
            run_processes(train, 1, str(begun), STEPS + 1, change)
        assert words in str(caught.value) and "step-00000004" in str(caught.value)
    assert curve(begun.parent) == before


def test_what_does_not_change_the_function_is_said(begun) -> None:
    changes = ("pipeline.processes=2", "model.config.attention_dropout=0.1")
    said, _ = run_processes(said_in_training, 2, str(begun), STEPS + 1, *changes)
    assert "the model's attention_dropout is now 0.1, was 0.0\n" in said
    assert [line[0] for line in curve(begun.parent)][-2:] == [STEPS + 1, STEPS + 1]
