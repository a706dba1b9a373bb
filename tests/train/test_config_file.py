"""Reading TOML and overrides; unknown names; the way back to plain data; and the help text."""

from __future__ import annotations

import dataclasses
import json

import pytest

from evenpipe.errors import InputError
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
def path(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(TOML)
    return file


def test_a_file_is_read(path):
    config = load_config(path)
    assert config.model.config == {"hidden_size": 64}
    assert config.pipeline.layers_per_stage == (1, 3)
    assert config.training.steps is None


OVERRIDES = [
    # override, field, value
    ("training.steps=7", ("training", "steps"), 7),
    ("optimizer.learning_rate=1e-3", ("optimizer", "learning_rate"), 1e-3),
    ("optimizer.betas=[0.5, 0.6]", ("optimizer", "betas"), (0.5, 0.6)),
    ("model.self_check=false", ("model", "self_check"), False),
    ("model.config.hidden_size=128", ("model", "config"), {"hidden_size": 128}),
    ("model.config.hidden_act=silu", ("model", "config"), {"hidden_size": 64, "hidden_act": "silu"}),
    ("output.folder=runs/a b", ("output", "folder"), "runs/a b"),
    ("output.folder=123", ("output", "folder"), "123"),
    ('output.folder="quoted"', ("output", "folder"), "quoted"),
    ("output.folder=a=b", ("output", "folder"), "a=b"),
    ("data.dataset_split=train[:1%]", ("data", "dataset_split"), "train[:1%]"),
    ("optimizer.clip_norm=none", ("optimizer", "clip_norm"), None),
    ("sample.prompts=import os", ("sample", "prompts"), ("import os",)),
    ('sample.prompts=["a", "b"]', ("sample", "prompts"), ("a", "b")),
    ("pipeline.vocabulary=first-last", ("pipeline", "vocabulary"), "first-last"),
    ("pipeline.microbatches=3\nprocesses=9", None, None),
]


@pytest.mark.parametrize(("override", "field", "value"), OVERRIDES)
def test_overrides(path, override, field, value):
    if field is None:  # more than one value must not slip in behind a line end
        with pytest.raises(InputError, match=r"pipeline\.microbatches"):
            load_config(path, [override])
    else:
        assert getattr(getattr(load_config(path, [override]), field[0]), field[1]) == value


def test_the_last_override_counts_and_tables_are_not_changed(path):
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
]


@pytest.mark.parametrize(("override", "words"), BAD_OVERRIDES)
def test_bad_overrides(path, override, words):
    with pytest.raises(InputError) as caught:
        load_config(path, [override])
    for word in words:
        assert word in str(caught.value)


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


@pytest.mark.parametrize(("content", "words"), BAD_FILES)
def test_bad_files(tmp_path, content, words):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.toml.*No such file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_config(tmp_path)


def test_plain_data_and_back(path):
    config = load_config(path, ["optimizer.clip_norm=none", "training.minutes=2"])
    assert config_from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_every_field_is_documented():
    text = configuration_help()
    for name, section in sections().items():
        described = describe_section(section)
        assert [field.name for field in described] == [field.name for field in dataclasses.fields(section)]
        assert f"[{name}]" in text
        for field in described:
            assert len(field.text) > 10, f"{name}.{field.name} needs a docstring"
            assert f"  {field.name} = {field.default}   ({field.type})" in text


def test_the_help_says_type_default_and_meaning():
    fields = {field.name: field for section in sections().values() for field in describe_section(section)}
    assert (fields["processes"].type, fields["processes"].default) == ("integer", "1")
    assert (fields["minutes"].type, fields["minutes"].default) == ("number or none", "none")
    assert fields["betas"].type == "list of 2 numbers or none"
    assert fields["files"].type == "list of text"
    assert fields["keep"].section == "checkpoint"
    assert fields["encoding_errors"].type == '"strict" | "replace"'
    assert fields["self_check"].default == "true"
    assert "python-standard-library" in configuration_help()
