"""The configuration: types, ranges, names, what sections imply for each other; TOML, overrides, help and changes."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from refusals import missing_words, refusal, wrong_refusals
from transformers import LlamaConfig, PreTrainedConfig

from evenpipe.cli.options import read_model
from evenpipe.declaration import describe_fields
from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.schedule import generate
from evenpipe.train.changed_values import changed_values
from evenpipe.train.config import Config
from evenpipe.train.config_file import apply_overrides, config_from_dict, load_config, sections
from evenpipe.train.config_help import configuration_help, configuration_schema
from evenpipe.train.model_source import check_pipeline, model_config, pipeline_model
from evenpipe.train.planned_config import configured_model, model_tables

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINIMAL = {"model": {"architecture": "llama"}, "data": {"corpus": "python-standard-library"}}


def config(*overrides: str, **tables: dict[str, Any]) -> Config:
    """The smallest configuration, with other tables and then with overrides."""
    return config_from_dict(apply_overrides({**MINIMAL, **tables}, overrides))


REFUSED = [
    # words about what is accepted; overrides with another value, which the sentence must name with their field
    (["true or false"], ["model.self_check=yes", "pipeline.nccl_high_priority=1"]),
    (["an integer"], ["data.sequence_length=256.0", "data.sequence_length=true", "pipeline.nccl_channels=2.5"]),
    (["an integer"], ['pipeline.layers_per_stage=["2"]']),
    (["a number"], ['optimizer.learning_rate="3e-4"']),
    (["a number above 0, a list of them or none"], ["pipeline.max_in_flight=true"]),
    (["a list of 2 numbers"], ["optimizer.betas=[0.9]"]),
    (["finite"], ["data.validation_fraction=nan"]),
    (["at least 0"], ["loss.z_loss=-0.1", "sample.top_k=-1", "pipeline.layers_per_stage=[3, -1]"]),
    (["not all 0"], ["pipeline.layers_per_stage=[0]"]),
    (["at least 1"], ["pipeline.processes=0", "pipeline.microbatches=-1", "output.trace_steps=[0]"]),
    (["from 257"], ["tokenizer.vocabulary_size=256"]),
    (["above 0"], ["pipeline.timeout_seconds=0", "optimizer.clip_norm=0"]),
    (["above 0 and at most 1"], ["optimizer.decay_share=0.0"]),
    (["one number or 1, one per device"], ["pipeline.max_in_flight=[4, 4]"]),
    (["below 1"], ["loss.label_smoothing=1", "optimizer.betas=[0.9, 1.0]"]),
    (["from 0 to 1"], ["optimizer.minimum_learning_rate_ratio=1.5"]),
    (["from 1 to 64 or none"], ["pipeline.nccl_channels=0", "pipeline.nccl_channels=65"]),
    (["a divisor of the 1 process"], ["pipeline.dp=2"]),
    (['left out with schedule "1f1b"'], ["pipeline.group_size=4", "pipeline.max_in_flight=4"]),
    (['left out with schedule "cosine"'], ["optimizer.decay_steps=5"]),
    (["existing file"], ["pipeline.schedule=missing.csv"]),
    # names: all that are accepted are listed, and the nearest is proposed
    (['did you mean "bfloat16"'], ["model.compute_dtype=bf16"]),
    (
        ["python-standard-library", "python-documentation"],
        ["data.corpus=wikipedia", "data.corpus=python-standard-library:", "data.corpus=python-documentation:json"],
    ),
    (["strict, replace"], ["data.encoding_errors=ignore"]),
    (["replicate, shard"], ["pipeline.data_parallel=fsdp"]),
    (["gpipe", 'did you mean "1f1b"'], ["pipeline.schedule=1f2b"]),
    (["redistribute", 'did you mean "vocab-2"'], ["pipeline.vocabulary=vocab2"]),
    (["per-pair, per-kind"], ["pipeline.communicators=two"]),
    (['"none", "full", "selective" or a list of them'], ["pipeline.activation_checkpointing=half"]),
    (['"scheduled", "none", "free", "all" or number above 0'], ["offload.activations=x"]),
    (["probabilities, nothing"], ["loss.keep=logits"]),
    (["adamw, muon, adafactor, sgd", 'did you mean "adamw"'], ["optimizer.name=adam"]),
    (["warmup-stable-decay", 'did you mean "cosine"'], ["optimizer.schedule=cosin"]),
    (['"module:name"'], ["optimizer.name=my module:make", "training.callbacks=my_module"]),
    (["training.callbacks[1]"], ['training.callbacks=["a.b:C", "a b:C"]']),
    (["output.trackers[0]", 'did you mean "wandb"'], ["output.trackers=wand"]),
    (["differ"], ['output.trackers=["wandb", "wandb"]']),
    (["it must be"], ["tokenizer.end_of_text=", "output.project=", "output.folder="]),
]


def test_a_bad_value_is_one_sentence_that_names_it() -> None:
    faults = []
    for words, overrides in REFUSED:
        for override in overrides:
            field, _, value = override.partition("=")
            last = value.strip('[]"').split(", ")[-1].strip('"')
            fault = missing_words(refusal(config, override), [field, last, *words])
            faults += [f"{override}: {fault}"] if fault else []
    assert not faults


CORPUS = MINIMAL["data"]
HUB = {"source": "hub/name"}
CONFLICTS = [
    # tables beside those of the smallest configuration, words of the sentence
    ({"model": {}}, ["model needs", "neither"]),
    ({"model": {"architecture": "llama", "source": "a-hub-name"}}, ["source", "architecture", "both"]),
    ({"model": {"architecture": "llama", "fresh_weights": True}}, ["model.fresh_weights", "true", "model.source"]),
    ({"model": {"architecture": "llama", "config": 3}}, ["model.config", "a table"]),
    ({"model": {**HUB, "config": {"hidden_size": 8}}}, ["model.config"]),
    ({"data": {}}, ["exactly one", "none"]),
    ({"data": {**CORPUS, "files": "a.txt"}}, ["files and corpus"]),
    ({"data": {**CORPUS, "dataset_config": "en"}}, ["data.dataset_config", "dataset"]),
    (
        {"data": {"files": ["a"], "validation_files": ["b"], "validation_fraction": 0.1}},
        ["data.validation_fraction is 0.1", "left out or 0", "data.validation_files", '"b"'],
    ),
    (
        {"data": {"dataset": "d", "validation_split": "test", "validation_fraction": 0.1}},
        ["data.validation_fraction is 0.1", "left out or 0", "data.validation_split", '"test"'],
    ),
    ({"data": {"files": ["a"], "validation_split": "test"}}, ["data.validation_split", "without dataset"]),
    ({"data": {"dataset": "d", "validation_split": "train"}}, ["data.validation_split", "another split"]),
    (
        {"data": {"dataset": "d", "validation_split": "test", "validation_files": ["b"]}},
        ["data.validation_split", "none when validation_files"],
    ),
    (
        {"data": {"files": ["a"], "validation_fraction": 0}, "training": {"evaluate_every_steps": 5}},
        ["training.evaluate_every_steps is 5", "data.validation_fraction"],
    ),
    ({"model": HUB, "tokenizer": {"vocabulary_size": 512}}, ["tokenizer.vocabulary_size is 512", "hub/name"]),
    ({"tokenizer": {"source": "hub/name", "vocabulary_size": 512}}, ["tokenizer.vocabulary_size"]),
    ({"optimizer": {"options": 3}}, ["optimizer.options is 3", "a table"]),
    ({"optimizer": {"name": "sgd", "betas": [0.9, 0.95]}}, ["optimizer.betas is", "left out", 'name "sgd"']),
    ({"optimizer": {"name": "adafactor", "epsilon": 1e-8}}, ["optimizer.epsilon is", "left out", 'name "adafactor"']),
    ({"optimizer": {"name": "mine:make", "weight_decay": 0.1}}, ["optimizer.weight_decay is", 'name "mine:make"']),
    ({"optimizer": {"name": "muon", "host_share": 0.5}}, ["optimizer.host_share is 0.5", '0 with name "muon"']),
    (
        {"optimizer": {"schedule": "warmup-stable-decay", "decay_steps": 5, "decay_share": 0.5}},
        ["optimizer.decay_share is 0.5", "left out when optimizer.decay_steps is given"],
    ),
    ({"training": {"steps": 5, "epochs": 1}}, ["training.epochs is 1.0", "left out", "training.steps"]),
    ({"sample": {"prompts": ["a"]}, "output": {"export": False}}, ["output.export", "sample.prompts"]),
]


def test_sections_that_contradict_each_other_are_refused() -> None:
    assert not wrong_refusals(lambda tables: config(**tables), CONFLICTS)


def test_a_fraction_is_held_back_unless_there_is_other_data_to_evaluate_on() -> None:
    for data, held_back, validates in (
        ({}, 0.01, True),
        ({"validation_fraction": 0.2}, 0.2, True),
        ({"validation_fraction": 0}, 0.0, False),
        ({"validation_files": ["b"]}, 0.0, True),
        ({"validation_files": ["b"], "validation_fraction": 0}, 0.0, True),
    ):
        section = config(data={**CORPUS, **data}).data
        assert (section.held_back, section.validates) == (held_back, validates)
    own = config(data={**CORPUS, "validation_files": ["b"]}, training={"evaluate_every_steps": 3})
    assert own.training.evaluate_every_steps == 3


def test_a_csv_file_is_a_schedule_with_its_own_number_of_microbatches(tmp_path: Path) -> None:
    order = tmp_path / "order.csv"
    order.write_text("0F0,0F1,0B0,0B1\n")
    file = f"pipeline.schedule={order}"
    pipeline = config(file).pipeline
    assert (pipeline.schedule, pipeline.microbatches_per_step) == (str(order), 2)
    assert config(file, "pipeline.microbatches=3").pipeline.microbatches_per_step == 3
    with pytest.raises(InputError, match="stages_per_device is 2; it must be left out with a CSV file"):
        config(file, "pipeline.stages_per_device=2")


def test_options_of_a_schedule_are_those_that_are_given() -> None:
    for options, expected in (
        ({}, {}),
        ({"schedule": "gis", "stages_per_device": 4, "group_size": 3}, {"stages_per_device": 4, "group_size": 3}),
        ({"schedule": "v-budget", "max_in_flight": 6}, {"max_in_flight": 6.0}),
        ({"schedule": "v-budget", "max_in_flight": [6, 5]}, {"max_in_flight": (6.0, 5.0)}),
    ):
        assert config(pipeline={**options, "processes": 2}).pipeline.schedule_options == expected


def test_the_batch_follows_from_the_fields() -> None:
    for pipeline, devices, microbatches, sequences in (
        ({"processes": 3, "microbatch_size": 2}, 3, 12, 24),
        ({"processes": 3, "microbatches": 5}, 3, 5, 5),
        ({"processes": 6, "dp": 2, "microbatch_size": 3}, 3, 12, 72),
    ):
        section = config(pipeline=pipeline).pipeline
        expected = (devices, microbatches, sequences)
        assert (section.devices, section.microbatches_per_step, section.sequences_per_step) == expected


LLAMA = {"architecture": "llama"}
FRESH = {**HUB, "fresh_weights": True}
TOKENIZERS = [
    # model, tokenizer -> (entries of the one to train, source of an existing one)
    (LLAMA, {}, (32768, None)),
    (LLAMA, {"vocabulary_size": 512}, (512, None)),
    (LLAMA, {"source": "t"}, (None, "t")),
    (HUB, {}, (None, "hub/name")),
    (HUB, {"source": "t"}, (None, "t")),
    (FRESH, {}, (None, "hub/name")),
    (FRESH, {"vocabulary_size": 512}, (512, None)),
]


def test_which_tokenizer_is_used() -> None:
    for model, tokenizer, expected in TOKENIZERS:
        chosen = config(model=model, tokenizer=tokenizer)
        assert (chosen.trained_tokenizer_entries, chosen.tokenizer_source) == expected, (model, tokenizer)


# ---- files, overrides and the help text

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
    ("optimizer.betas=[0.5, 0.6]", "optimizer.betas", (0.5, 0.6)),
    ("model.self_check=false", "model.self_check", False),
    ("model.config.hidden_size=128", "model.config", {"hidden_size": 128}),
    ("model.config.hidden_act=silu", "model.config", {"hidden_size": 64, "hidden_act": "silu"}),
    ("output.folder=runs/a b", "output.folder", "runs/a b"),
    ("output.folder=123", "output.folder", "123"),
    ('output.folder="quoted"', "output.folder", "quoted"),
    ("data.dataset_split=train[:1%]", "data.dataset_split", "train[:1%]"),
    ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
    ("optimizer.clip_norm=none", "optimizer.clip_norm", None),
    ("output.trackers=trackio", "output.trackers", ("trackio",)),
    ("sample.prompts=import os", "sample.prompts", ("import os",)),
    ('sample.prompts=["a", "b"]', "sample.prompts", ("a", "b")),
]


def test_a_file_is_read_and_overrides_replace_its_values(path: Path) -> None:
    config = load_config(path)
    assert (config.model.config, config.pipeline.layers_per_stage) == ({"hidden_size": 64}, (1, 3))
    assert config.training.steps is None
    for override, field, value in OVERRIDES:
        section, key = field.split(".")
        read = getattr(getattr(load_config(path, [override]), section), key)
        assert (read, type(read)) == (value, type(value)), override


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
    (b"model = 3\n", ["[model] is 3; it must be a table"]),
    (b"[optimiser]\n", ["[optimiser]", 'did you mean "optimizer"']),
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


def test_the_help_says_type_default_and_meaning_of_every_field() -> None:
    text = configuration_help()
    fields: dict[str, Any] = {}
    for name, section in sections().items():
        described = describe_fields(section)
        assert [field.name for field in described] == [field.name for field in dataclasses.fields(section)]
        assert f"[{name}]" in text
        for field in described:
            assert field.text, f"{name}.{field.name} needs a docstring"
            assert f"  {field.name} = {field.default}   ({field.type})" in text
            fields[f"{name}.{field.name}"] = (field.type, field.default)
    for name, described in {
        "training.minutes": ("number above 0 or none", "none"),
        "optimizer.betas": ("list of 2 numbers of at least 0 and below 1 or none", "none"),
        "data.encoding_errors": ('"strict" or "replace"', '"strict"'),
    }.items():
        assert fields[name] == described


def test_the_schema_accepts_what_is_accepted() -> None:
    """Every example and every default; not an unknown name, and no number out of range."""
    schema = configuration_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for file in {*EXAMPLES.glob("*.toml")} - {EXAMPLES / "costs.toml", EXAMPLES / "copies.toml"}:
        validator.validate(tomllib.loads(file.read_text()))
    whole = json.loads(json.dumps(dataclasses.asdict(config())))
    validator.validate(whole)
    for section, name, value, fits in (
        ("pipeline", "processes", 0, False),
        ("pipeline", "process", 1, False),
        ("pipeline", "slices", "auto", True),
        ("pipeline", "slices", "most", False),
        ("pipeline", "activation_checkpointing", "full", True),
        ("pipeline", "activation_checkpointing", ["full", "none"], True),
        ("optimizer", "betas", [0.9, 1.0], False),
        ("optimizer", "clip_norm", "none", True),
        ("output", "trackers", "wandb", True),
        ("offload", "host_memory", "24GiB", True),
    ):
        assert validator.is_valid({**whole, section: {**whole[section], name: value}}) is fits, (section, name, value)


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
        assert config_from_dict(saved(made(**change))) == made(**change)


def test_fields_that_another_version_has_or_had() -> None:
    """One that is new had its default."""
    before = saved(made())
    del before["checkpoint"]["resume_from"], before["experts"]
    assert changed_values(before, made()) == {}
    assert changed_values(before, made(checkpoint={"resume_from": 3})) == {"checkpoint.resume_from": "none -> 3"}
    before = saved(made())
    before["pipeline"]["activation_checkpointing"], before["offload"]["copy_time"] = ["none"], [0.25]
    assert changed_values(before, made()) == {}, "what is one value now was a list of one"
    before["training"]["turbo"] = True
    assert changed_values(before, made()) == {"training.turbo": "true -> none"}


# ---- from [model] to what the pipeline is built from, and what is refused before anything starts


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def small(model=None, values=None, **tables):
    if model is None:
        model = {"architecture": "llama", "config": {**SMALL, **(values or {})}}
    data = {"corpus": "python-standard-library", "sequence_length": 32, **tables.pop("data", {})}
    return config_from_dict({"model": model, "data": data, **tables})


@pytest.fixture
def folder(tmp_path):
    """A saved model without weights: enough to be described."""
    LlamaConfig(**SMALL, vocab_size=300, eos_token_id=7, bos_token_id=6).save_pretrained(tmp_path / "saved")
    return str(tmp_path / "saved")


def test_a_described_model_takes_from_the_tokenizer_what_its_description_leaves_out() -> None:
    model = pipeline_model(small(), tokenizer_size=500, end_of_text_id=3)
    assert isinstance(model, PreTrainedConfig)
    assert (model.model_type, model.hidden_size, model.vocab_size) == ("llama", 16, 500)
    assert (model.eos_token_id, model.bos_token_id, model.pad_token_id) == (3, 3, None)
    model = pipeline_model(small(values={"vocab_size": 512, "eos_token_id": 1, "pad_token_id": 0}), 500, 3)
    assert (model.vocab_size, model.eos_token_id, model.pad_token_id) == (512, 1, 0)
    gpt2 = {"architecture": "gpt2", "config": {"n_layer": 2, "num_attention_heads": 2, "n_embd": 8, "n_positions": 40}}
    model = pipeline_model(small(gpt2), 300, 0)
    assert (model.num_hidden_layers, model.n_head, model.max_position_embeddings) == (2, 2, 40)


def test_a_saved_model_is_passed_on_by_name_and_with_fresh_weights_as_its_config(folder):
    assert pipeline_model(small({"source": folder}), 300, 0) == folder
    fresh = pipeline_model(small({"source": folder, "fresh_weights": True}), 290, 0)
    assert isinstance(fresh, PreTrainedConfig)
    assert (fresh.vocab_size, fresh.eos_token_id) == (300, 7)
    own = small({"source": folder, "fresh_weights": True}, tokenizer={"vocabulary_size": 400})
    assert pipeline_model(own, 400, 5).vocab_size == 400


UNFIT = [
    # options of `small`, words of the sentence
    ({"values": {"num_hiden_layers": 3}}, ["model.config.num_hiden_layers", 'did you mean "num_hidden_layers"']),
    ({"values": {"num_hidden_layers": "two"}}, ["[model.config]", "num_hidden_layers", "int"]),
    ({"values": {"hidden_size": 17}}, ["[model.config]", "17"]),
    ({"model": {"architecture": "lama"}}, ["model.architecture", '"lama"', 'did you mean "llama"']),
    ({"model": {"architecture": "vit"}}, ["model.architecture", '"vit"']),
    ({"model": {"source": "./nowhere"}}, ["model.source", "./nowhere"]),
    ({"pipeline": {"processes": 5}}, ["pipeline.processes is 5", "at most 4"]),
    ({"pipeline": {"processes": 10, "dp": 2}}, ["is 10", "at most 8, the layers of the model times 2 replicas"]),
    ({"pipeline": {"processes": 2, "layers_per_stage": [2, 1]}}, ["pipeline.layers_per_stage is [2, 1]", "4 layers"]),
    ({"pipeline": {"processes": 2, "layers_per_stage": [4, 0]}}, ["pipeline.layers_per_stage", "at least 1"]),
    (
        {"pipeline": {"activation_checkpointing": ["full", "none"]}},
        ['checkpointing is ["full", "none"]; it must be one choice, or 4', "4, one per layer"],
    ),
    ({"data": {"sequence_length": 65}}, ["data.sequence_length is 65", "at most 64"]),
    ({"values": {"vocab_size": 400}}, ["model.config.vocab_size is 400", "at least 500"]),
]
SCHEDULES_REFUSED = [
    # [pipeline] with 2 processes, words of the sentence
    ({"processes": 3, "schedule": "zbv"}, ['pipeline.schedule is "zbv"', "6 stages on 3 devices", "at most 4"]),
    (
        {"schedule": "interleaved", "stages_per_device": 3},
        ['pipeline.schedule is "interleaved"', "6 stages on 2 devices"],
    ),
    ({"schedule": "v-budget", "max_in_flight": 1}, ["pipeline.max_in_flight is 1", "4 stage activ"]),
    (
        {"schedule": "zbv", "layers_per_stage": [2, 2]},
        ["pipeline.layers_per_stage is [2, 2]", "4 numbers, one for each stage", "on 2 devices"],
    ),
    (
        {"processes": 1, "schedule": "order.csv"},
        ["pipeline.processes is 1", "must be 2", "the order in", "order.csv has 2 devices"],
    ),
    ({"schedule": "order.csv", "microbatches": 5}, ["pipeline.microbatches is 5", "must be 3"]),
    ({"dp": 2, "schedule": "order.csv"}, ["pipeline.processes is 2", "must be 4", "each of 2 replicas"]),
    ({"schedule": "broken.csv"}, ["row 1, column 2", "0X0"]),
    ({"schedule": "forwards.csv"}, ["only evaluates"]),
    ({"schedule": "stages.csv"}, ["has 6 stages", "at most 4, the layers"]),
]
ORDERS = {
    "order.csv": "0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
    "broken.csv": "0F0,0X0\n1F0,1B0\n",
    "forwards.csv": "0F0,0F1\n1F0,1F1\n",
}


def test_what_does_not_fit_is_refused_before_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in ORDERS.items():
        Path(name).write_text(rows)
    Path("stages.csv").write_text(generate("looped-bfs", 2, 2, stages_per_device=3).to_csv())

    def check(changes: dict[str, Any]) -> None:
        check_pipeline(small(**changes))
        pipeline_model(small(**changes), tokenizer_size=500, end_of_text_id=0)

    cases = [({"pipeline": {"processes": 2, **pipeline}}, words) for pipeline, words in SCHEDULES_REFUSED]
    assert not wrong_refusals(check, [*UNFIT, *cases])


def test_a_saved_model_needs_a_model_and_room_for_the_tokenizer(folder: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="300; it must be at least 301"):
        pipeline_model(small({"source": folder}), 301, 0)
    with pytest.raises(InputError, match=r"model\.source"):
        model_config(small({"source": str(tmp_path)}).model)


def test_a_stage_without_layers_belongs_to_redistribute() -> None:
    check_pipeline(small(pipeline={"processes": 2, "layers_per_stage": [4, 0], "vocabulary": "redistribute"}))


# ---- configurations of real models, as hubs have them: a plan for each can be written, and describes the same model

MODELS = sorted((Path(__file__).parents[2] / "examples" / "models").glob("*.json"))


def text_shapes(description: Description) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the language model."""
    names = {name.replace("model.language_model.", "model."): shape for name, shape in description.shapes.items()}
    images = ("model.vision_tower.", "model.multi_modal_projector.")
    return {name: tuple(shape) for name, shape in names.items() if not name.startswith(images)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_run_of_the_same_model_is_written(path: Path) -> None:
    planned = read_model(str(path))
    tables = model_tables(planned, str(path))
    written = configured_model(config_from_dict({**tables, "pipeline": {"processes": 2}}))
    assert text_shapes(written) == text_shapes(planned)


def test_the_code_of_a_model_is_trusted_where_the_configuration_says_so(tmp_path: Path) -> None:
    """By what only describes the model of a run, too: plan, estimate, profile."""
    classes = {"AutoConfig": "one.Config", "AutoModelForCausalLM": "one.One"}
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    values = {"model_type": "one", "architectures": ["One"], "auto_map": classes, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "one.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\nclass Config(LlamaConfig):\n    model_type = 'one'\n"
        "class One(LlamaForCausalLM):\n    config_class = Config\n"
    )
    model: dict[str, Any] = {"source": str(tmp_path)}
    with pytest.raises(InputError, match="run only with trust_remote_code = true"):
        configured_model(small(model))
    assert configured_model(small(model | {"trust_remote_code": True})).architecture == "One"


def test_fields_that_only_the_model_reads_are_accepted() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    configured_model(small({"architecture": "qwen3_moe", "config": {**sizes, "head_dim": 32}}))
    with pytest.raises(InputError, match=r"model\.config\.head_dimension is no field of Qwen3MoeConfig"):
        configured_model(small({"architecture": "qwen3_moe", "config": {**sizes, "head_dimension": 32}}))
