"""Reading TOML and overrides; unknown names; the way back to plain data; and the help text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from refusals import wrong_refusals

from evenpipe.train.changed_values import changed_values
from evenpipe.train.config import Config
from evenpipe.train.config_file import apply_overrides, config_from_dict, load_config, sections
from evenpipe.train.config_help import configuration_help, describe_section

TOML = """
[model]
architecture = "llama"
[model.config]
hidden_size = 64
[data]
corpus = "python-standard-library"
[pipeline]
processes = 2
layers_per_stage = [1, 3]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(TOML)
    return file


OVERRIDES = [
    # override, field, value
    ("training.steps=7", "training.steps", 7),
    ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 1e-3),
    ("optimizer.betas=[0.5, 0.6]", "optimizer.betas", (0.5, 0.6)),
    ("model.self_check=false", "model.self_check", False),
    ("model.config.hidden_size=128", "model.config", {"hidden_size": 128}),
    ("model.config.hidden_act=silu", "model.config", {"hidden_size": 64, "hidden_act": "silu"}),
    ("output.folder=runs/a b", "output.folder", "runs/a b"),
    ("output.folder=123", "output.folder", "123"),
    ('output.folder="quoted"', "output.folder", "quoted"),
    ("output.folder=a=b", "output.folder", "a=b"),
    ("data.dataset_split=train[:1%]", "data.dataset_split", "train[:1%]"),
    ("optimizer.clip_norm=none", "optimizer.clip_norm", None),
    ("sample.prompts=import os", "sample.prompts", ("import os",)),
    ('sample.prompts=["a", "b"]', "sample.prompts", ("a", "b")),
    ("pipeline.vocabulary=first-last", "pipeline.vocabulary", "first-last"),
]


def test_a_file_is_read_and_overrides_replace_its_values(path: Path) -> None:
    config = load_config(path)
    assert (config.model.config, config.pipeline.layers_per_stage) == ({"hidden_size": 64}, (1, 3))
    assert config.training.steps is None
    for override, field, value in OVERRIDES:
        section, key = field.split(".")
        assert getattr(getattr(load_config(path, [override]), section), key) == value, override


def test_the_last_override_counts_and_tables_are_not_changed() -> None:
    tables = {"training": {"steps": 1}}
    assert apply_overrides(tables, ["training.steps=2", "training.steps=3"]) == {"training": {"steps": 3}}
    assert tables == {"training": {"steps": 1}}


BAD_OVERRIDES = [
    ("training.steps", ["training.steps", "section.key=value"]),
    ("steps=3", ["steps=3", "section.key=value"]),
    ("training.=3", ["section.key=value"]),
    ("training.steps.more=3", ["training.steps=value"]),
    ("model.config=3", ["model.config.NAME=value"]),
    ("trainin.steps=3", ["[trainin]", 'did you mean "training"']),
    ("training.step=3", ["training.step ", 'did you mean "steps"']),
    ("pipeline.microbatches=3\nprocesses=9", ["pipeline.microbatches"]),  # no second value behind a line end
]
BAD_FILES = [
    (b"[model\n", ["is not TOML", "line 1"]),
    (b"\xff", ["not UTF-8 at byte 0"]),
    (b"steps = 3\n", ["[steps]"]),
    (b"model = 3\n", ["[model] must be a table, not 3"]),
    (b"[optimiser]\n", ["[optimiser]", 'did you mean "optimizer"']),
    (b"[training]\nsteps = 5\nsteps = 6\n", ["is not TOML"]),
    (b"[data]\nsequence_lenght = 5\n", ["data.sequence_lenght", 'did you mean "sequence_length"']),
    (b"[sample]\nunlike_anything_known = 5\n", ["sample.unlike_anything_known", "known: prompts, new_tokens"]),
]


def test_bad_overrides_and_files(path: Path, tmp_path: Path) -> None:
    def load(content: bytes) -> None:
        (tmp_path / "bad.toml").write_bytes(content)
        load_config(tmp_path / "bad.toml")

    assert not wrong_refusals(lambda override: load_config(path, [override]), BAD_OVERRIDES)
    assert not wrong_refusals(load, BAD_FILES)
    missing = [(tmp_path / "nowhere.toml", ["nowhere.toml", "No such file"]), (tmp_path, "cannot be read")]
    assert not wrong_refusals(load_config, missing)


def test_plain_data_and_back(path: Path) -> None:
    config = load_config(path, ["optimizer.clip_norm=none", "training.minutes=2"])
    assert config_from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_the_help_says_type_default_and_meaning_of_every_field() -> None:
    text = configuration_help()
    fields: dict[str, Any] = {}
    for name, section in sections().items():
        described = describe_section(section)
        assert [field.name for field in described] == [field.name for field in dataclasses.fields(section)]
        assert f"[{name}]" in text
        for field in described:
            assert field.text, f"{name}.{field.name} needs a docstring"
            assert f"  {field.name} = {field.default}   ({field.type})" in text
            fields[f"{field.section}.{field.name}"] = (field.type, field.default)
    for name, described in {
        "pipeline.processes": ("integer", "1"),
        "training.minutes": ("number or none", "none"),
        "optimizer.betas": ("list of 2 numbers or none", "none"),
        "data.files": ("list of text", "[]"),
        "data.encoding_errors": ('"strict" | "replace"', '"strict"'),
        "model.self_check": ("true or false", "true"),
    }.items():
        assert fields[name] == described
    assert "python-standard-library" in text


# ---- what is said of the configuration of a run that continues with another one

BASE = {
    "model": {"architecture": "llama", "config": {"hidden_size": 64, "rope_parameters": {"factor": 2.0}}},
    "data": {"files": ["a.txt"], "sequence_length": 64},
    "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
}


def made(**sections: dict[str, object]) -> Config:
    return config_from_dict({name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}})


def saved(config: Config) -> dict[str, object]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


CHANGES = [
    ({}, {}),
    ({"pipeline": {"microbatches": 8}}, {"pipeline.microbatches": "none -> 8"}),
    (
        {"training": {"seed": 1}, "optimizer": {"learning_rate": 1e-4, "clip_norm": "none"}},
        {
            "optimizer.learning_rate": "0.0003 -> 0.0001",
            "optimizer.clip_norm": "1.0 -> none",
            "training.seed": "0 -> 1",
        },
    ),
    ({"optimizer": {"options": {"momentum": 0.8}}}, {"optimizer.options.momentum": "0.9 -> 0.8"}),
    (
        {"optimizer": {"options": {"nesterov": True}}},
        {"optimizer.options.nesterov": "none -> true", "optimizer.options.momentum": "0.9 -> none"},
    ),
    (
        {"model": {"config": {"hidden_size": 64, "rope_parameters": {"factor": 4.0}}}},
        {"model.config.rope_parameters.factor": "2.0 -> 4.0"},
    ),
    ({"data": {"files": ["a.txt", "b.txt"]}}, {"data.files": '["a.txt"] -> ["a.txt", "b.txt"]'}),
    ({"checkpoint": {"resume_from": 80}}, {"checkpoint.resume_from": "none -> 80"}),
    ({"output": {"log_every_steps": 1, "tensorboard": True}}, {}),
]


def test_every_changed_value_is_said() -> None:
    for change, said in CHANGES:
        assert changed_values(saved(made()), made(**change)) == said


def test_fields_that_another_version_has_or_had() -> None:
    """One that is new had its default."""
    before = saved(made())
    del before["checkpoint"]["resume_from"], before["experts"]
    assert changed_values(before, made()) == {}
    assert changed_values(before, made(checkpoint={"resume_from": 3})) == {"checkpoint.resume_from": "none -> 3"}
    before = saved(made())
    before["training"]["turbo"] = True
    assert changed_values(before, made()) == {"training.turbo": "true -> none"}
