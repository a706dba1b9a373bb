"""Sections of the configuration: types, ranges, names, and what they imply for each other."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from evenpipe.errors import InputError
from evenpipe.train.config_file import config_from_dict, sections

MINIMAL = {"model": {"architecture": "llama"}, "data": {"corpus": "python-standard-library"}}


def config(**changes: dict):
    """The smallest configuration with changes per section."""
    tables = {name: {**MINIMAL.get(name, {}), **changes.get(name, {})} for name in {**MINIMAL, **changes}}
    return config_from_dict(tables)


BAD_VALUES = [
    # field, value, words that the sentence must hold
    ("model.source", "a-hub-name", ["source", "architecture", "both"]),
    ("model.fresh_weights", True, ["model.fresh_weights", "true", "model.source"]),
    ("model.compute_dtype", "bf16", ["model.compute_dtype", '"bf16"', 'did you mean "bfloat16"']),
    ("model.self_check", "yes", ["model.self_check", '"yes"', "true or false"]),
    ("model.config", 3, ["model.config", "a table"]),
    ("data.corpus", "wikipedia", ["data.corpus", '"wikipedia"', "python-standard-library"]),
    ("data.corpus", "python-standard-library:", ["data.corpus"]),
    ("data.files", "a.txt", ["files and corpus"]),
    ("data.dataset_config", "en", ["data.dataset_config", "dataset"]),
    ("data.encoding_errors", "ignore", ["data.encoding_errors", '"strict", "replace"'.replace('"', "")]),
    ("data.sequence_length", 1, ["data.sequence_length is 1", "at least 2"]),
    ("data.sequence_length", 256.0, ["data.sequence_length", "an integer"]),
    ("data.sequence_length", True, ["data.sequence_length is true", "an integer"]),
    ("data.validation_fraction", 1.0, ["data.validation_fraction", "below 1"]),
    ("data.validation_fraction", float("nan"), ["data.validation_fraction", "finite"]),
    ("tokenizer.vocabulary_size", 256, ["tokenizer.vocabulary_size is 256", "at least 257"]),
    ("tokenizer.end_of_text", "", ["tokenizer.end_of_text"]),
    ("pipeline.processes", 0, ["pipeline.processes is 0", "at least 1"]),
    ("pipeline.replicas", 2, ["pipeline.replicas is 2", "a divisor of the 1 process"]),
    ("pipeline.data_parallel", "fsdp", ["pipeline.data_parallel", "replicate, shard"]),
    ("pipeline.microbatches", -1, ["pipeline.microbatches is -1", "at least 1"]),
    ("pipeline.microbatch_size", 0, ["pipeline.microbatch_size is 0"]),
    ("pipeline.timeout_seconds", 0, ["pipeline.timeout_seconds", "above 0"]),
    ("pipeline.schedule", "1f2b", ["pipeline.schedule", '"1f2b"', 'did you mean "1f1b"', "gpipe"]),
    ("pipeline.schedule", "missing.csv", ["pipeline.schedule", "missing.csv", "existing file"]),
    ("pipeline.vocabulary", "vocab2", ["pipeline.vocabulary", '"vocab2"', 'did you mean "vocab-2"', "redistribute"]),
    ("pipeline.layers_per_stage", [0], ["pipeline.layers_per_stage is [0]", "one per stage"]),
    ("pipeline.layers_per_stage", [3, -1], ["pipeline.layers_per_stage is [3, -1]"]),
    ("pipeline.stages_per_device", 0, ["pipeline.stages_per_device is 0", "at least 1"]),
    ("pipeline.group_size", 0, ["pipeline.group_size is 0", "at least 1"]),
    ("pipeline.group_size", 4, ["pipeline.group_size is 4", 'left out with schedule "1f1b"']),
    ("pipeline.memory_limit", 4, ["pipeline.memory_limit is [4.0]", 'left out with schedule "1f1b"']),
    ("pipeline.memory_limit", [4, 4], ["pipeline.memory_limit is [4.0, 4.0]", "one number above 0, or 1"]),
    ("pipeline.memory_limit", True, ["pipeline.memory_limit is true", "a list of number"]),
    ("pipeline.communicators", "two", ['pipeline.communicators is "two"', "per-pair, per-kind"]),
    ("pipeline.nccl_high_priority", 1, ["pipeline.nccl_high_priority is 1", "true or false"]),
    ("pipeline.nccl_channels", 0, ["pipeline.nccl_channels is 0", "from 1 to 64, or none"]),
    ("pipeline.nccl_channels", 65, ["pipeline.nccl_channels is 65", "from 1 to 64, or none"]),
    ("pipeline.nccl_channels", 2.5, ["pipeline.nccl_channels is 2.5", "an integer"]),
    ("pipeline.checkpointing", "half", ['pipeline.checkpointing is ["half"]', "none, full, selective"]),
    ("pipeline.layers_per_stage", ["2"], ["pipeline.layers_per_stage[0]", "an integer"]),
    ("loss.label_smoothing", 1, ["loss.label_smoothing", "below 1"]),
    ("loss.z_loss", -0.1, ["loss.z_loss", "at least 0"]),
    ("loss.keep", "logits", ["loss.keep", "probabilities, nothing"]),
    ("optimizer.learning_rate", 0.0, ["optimizer.learning_rate", "above 0"]),
    ("optimizer.learning_rate", "3e-4", ["optimizer.learning_rate", "a number"]),
    ("optimizer.betas", [0.9], ["optimizer.betas", "a list of 2 numbers"]),
    ("optimizer.betas", [0.9, 1.0], ["optimizer.betas", "below 1"]),
    ("optimizer.epsilon", 0, ["optimizer.epsilon"]),
    ("optimizer.weight_decay", -1, ["optimizer.weight_decay"]),
    ("optimizer.warmup_steps", -1, ["optimizer.warmup_steps"]),
    ("optimizer.minimum_learning_rate_ratio", 1.5, ["optimizer.minimum_learning_rate_ratio", "between 0 and 1"]),
    ("optimizer.clip_norm", 0, ["optimizer.clip_norm", "above 0"]),
    ("optimizer.name", "adam", ['optimizer.name is "adam"', "adamw, muon, adafactor, sgd", 'did you mean "adamw"']),
    ("optimizer.name", "my module:make", ['optimizer.name is "my module:make"', "module:name"]),
    ("optimizer.options", 3, ["optimizer.options is 3", "a table"]),
    ("optimizer.schedule", "cosin", ['optimizer.schedule is "cosin"', 'did you mean "cosine"', "warmup-stable-decay"]),
    ("optimizer.decay_steps", 5, ["optimizer.decay_steps is 5", 'left out with schedule "cosine"']),
    ("optimizer.decay_share", 0.0, ["optimizer.decay_share is 0.0", "above 0 and at most 1"]),
    ("training.steps", 0, ["training.steps is 0"]),
    ("training.epochs", 0, ["training.epochs is 0.0", "above 0"]),
    ("training.callbacks", "my_module", ['training.callbacks[0] is "my_module"', '"module:name"']),
    ("training.callbacks", ["a.b:C", "a b:C"], ['training.callbacks[1] is "a b:C"']),
    ("output.trackers", ["wand"], ['output.trackers[0] is "wand"', 'did you mean "wandb"']),
    ("output.trackers", ["wandb", "wandb"], ["output.trackers", "differ"]),
    ("output.project", "", ["output.project"]),
    ("training.minutes", -1, ["training.minutes", "above 0"]),
    ("training.seed", -1, ["training.seed"]),
    ("training.evaluate_every_steps", 0, ["training.evaluate_every_steps"]),
    ("training.evaluation_batches", 0, ["training.evaluation_batches"]),
    ("checkpoint.every_steps", 0, ["checkpoint.every_steps"]),
    ("checkpoint.keep", 0, ["checkpoint.keep"]),
    ("output.folder", "", ["output.folder"]),
    ("output.log_every_steps", 0, ["output.log_every_steps"]),
    ("sample.new_tokens", 0, ["sample.new_tokens"]),
    ("sample.temperature", -0.5, ["sample.temperature"]),
    ("sample.top_k", -1, ["sample.top_k"]),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD_VALUES)
def test_a_bad_value_is_one_sentence_that_names_it(field, value, words):
    section, key = field.split(".")
    with pytest.raises(InputError) as caught:
        config(**{section: {key: value}})
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


CONFLICTS = [
    ({"model": {}, "data": {"corpus": "python-standard-library"}}, ["neither"]),
    ({"model": {"architecture": "llama"}, "data": {}}, ["exactly one", "none"]),
    ({"data": {"corpus": "python-standard-library"}}, ["model needs", "neither"]),
    ({"model": {"source": "hub/name", "config": {"hidden_size": 8}}, "data": MINIMAL["data"]}, ["model.config"]),
    (
        {"model": {"source": "hub/name"}, "data": MINIMAL["data"], "tokenizer": {"vocabulary_size": 512}},
        ["tokenizer.vocabulary_size is 512", "hub/name"],
    ),
    ({**MINIMAL, "tokenizer": {"source": "hub/name", "vocabulary_size": 512}}, ["tokenizer.vocabulary_size"]),
    (
        {
            "model": {"architecture": "llama"},
            "data": {"files": ["a"], "validation_fraction": 0},
            "training": {"evaluate_every_steps": 5},
        },
        ["training.evaluate_every_steps is 5", "data.validation_fraction"],
    ),
    *(
        (
            {**MINIMAL, "optimizer": {"name": name, field: value}},
            [f"optimizer.{field} is", "left out", f'name "{name}"'],
        )
        for name, field, value in (
            ("sgd", "betas", [0.9, 0.95]),
            ("adafactor", "epsilon", 1e-8),
            ("my_module:make", "weight_decay", 0.1),
        )
    ),
    (
        {**MINIMAL, "optimizer": {"name": "muon", "host_share": 0.5}},
        ["optimizer.host_share is 0.5", '0 with name "muon"'],
    ),
    (
        {
            **MINIMAL,
            "optimizer": {"schedule": "warmup-stable-decay", "decay_steps": 5, "decay_share": 0.5},
        },
        ["optimizer.decay_share is 0.5", "left out when optimizer.decay_steps is given"],
    ),
    ({**MINIMAL, "training": {"steps": 5, "epochs": 1}}, ["training.epochs is 1.0", "left out", "training.steps"]),
    (
        {**MINIMAL, "data": {"files": ["a"], "validation_files": ["b"], "validation_fraction": 0.1}},
        ["data.validation_fraction is 0.1", "left out or 0", "data.validation_files", '"b"'],
    ),
    (
        {**MINIMAL, "data": {"dataset": "d", "validation_split": "test", "validation_fraction": 0.1}},
        ["data.validation_fraction is 0.1", "left out or 0", "data.validation_split", '"test"'],
    ),
    ({**MINIMAL, "data": {"files": ["a"], "validation_split": "test"}}, ["data.validation_split", "without dataset"]),
    ({**MINIMAL, "data": {"dataset": "d", "validation_split": "train"}}, ["data.validation_split", "another split"]),
    (
        {**MINIMAL, "data": {"dataset": "d", "validation_split": "test", "validation_files": ["b"]}},
        ["data.validation_split", "none when validation_files"],
    ),
    ({**MINIMAL, "sample": {"prompts": ["a"]}, "output": {"export": False}}, ["output.export", "sample.prompts"]),
]


@pytest.mark.parametrize(("tables", "words"), CONFLICTS)
def test_sections_that_contradict_each_other_are_refused(tables, words):
    with pytest.raises(InputError) as caught:
        config_from_dict(tables)
    for word in words:
        assert word in str(caught.value)


def test_defaults_are_accepted_and_the_configuration_cannot_change():
    minimal = config()
    assert set(dataclasses.asdict(minimal)) == set(sections())
    with pytest.raises(dataclasses.FrozenInstanceError):
        minimal.training.steps = 5  # type: ignore[misc]


def test_it_travels_to_other_processes():
    original = config(model={"config": {"hidden_size": 8}}, data={"sequence_length": 17})
    assert pickle.loads(pickle.dumps(original)) == original


def test_lists_become_tuples_whole_numbers_become_numbers_and_one_text_a_list():
    changed = config_from_dict(
        {
            "model": {"architecture": "llama"},
            "data": {"files": "only.txt"},
            "optimizer": {"betas": [0, 0.5], "learning_rate": 1},
            "pipeline": {"processes": 2, "layers_per_stage": [3, 1]},
        }
    )
    assert changed.data.files == ("only.txt",)
    assert changed.optimizer.betas == (0.0, 0.5)
    assert isinstance(changed.optimizer.learning_rate, float)
    assert changed.pipeline.layers_per_stage == (3, 1)


def test_a_fraction_is_held_back_unless_there_is_other_data_to_evaluate_on():
    for data, held_back, validates in (
        ({}, 0.01, True),
        ({"validation_fraction": 0.2}, 0.2, True),
        ({"validation_fraction": 0}, 0.0, False),
        ({"validation_files": ["b"]}, 0.0, True),
        ({"validation_files": ["b"], "validation_fraction": 0}, 0.0, True),
    ):
        found = config(data=data).data
        assert (found.held_back, found.validates) == (held_back, validates)
    own = config(data={"validation_files": ["b"]}, training={"evaluate_every_steps": 3})
    assert own.training.evaluate_every_steps == 3


def test_a_tracker_may_be_written_without_brackets():
    assert config(output={"trackers": "trackio"}).output.trackers == ("trackio",)


def test_none_is_written_as_a_word():
    assert config(optimizer={"clip_norm": "none"}).optimizer.clip_norm is None
    assert config(checkpoint={"every_steps": "none"}).checkpoint.every_steps is None


def test_a_csv_file_is_a_schedule_with_its_own_number_of_microbatches(tmp_path):
    order = tmp_path / "order.csv"
    order.write_text("0F0,0F1,0B0,0B1\n")
    pipeline = config(pipeline={"schedule": str(order)}).pipeline
    assert (pipeline.schedule, pipeline.microbatches_per_step) == (str(order), 2)
    assert config(pipeline={"schedule": str(order), "microbatches": 3}).pipeline.microbatches_per_step == 3
    with pytest.raises(InputError, match="stages_per_device is 2, but must be left out with a CSV file"):
        config(pipeline={"schedule": str(order), "stages_per_device": 2})


def test_options_of_a_schedule_are_those_that_are_given():
    plain = config(pipeline={"schedule": "gis", "stages_per_device": 4, "group_size": 3, "processes": 2})
    assert plain.pipeline.schedule_options == {"stages_per_device": 4, "group_size": 3}
    limited = {"schedule": "v-budget", "processes": 2}
    assert config(pipeline={**limited, "memory_limit": 6}).pipeline.schedule_options == {"memory_limit": 6.0}
    one_each = config(pipeline={**limited, "memory_limit": [6, 5]}).pipeline.schedule_options
    assert one_each == {"memory_limit": (6.0, 5.0)}
    assert config().pipeline.schedule_options == {}


def test_batch_and_folders_follow_from_the_fields():
    plain = config(pipeline={"processes": 3, "microbatch_size": 2}, output={"folder": "there"})
    assert (plain.pipeline.microbatches_per_step, plain.pipeline.sequences_per_step) == (12, 24)
    assert plain.cache_folder == Path("there/data")
    assert plain.checkpoint_folder == Path("there/checkpoints")
    assert plain.export_folder == Path("there/model")
    moved = config(
        pipeline={"processes": 3, "microbatches": 5},
        data={"cache_folder": "a"},
        checkpoint={"folder": "b"},
        output={"export_folder": "c"},
    )
    assert moved.pipeline.sequences_per_step == 5
    side_by_side = config(pipeline={"processes": 6, "replicas": 2, "microbatch_size": 3}).pipeline
    assert (side_by_side.devices, side_by_side.microbatches_per_step) == (3, 12)
    assert side_by_side.sequences_per_step == 72
    assert (moved.cache_folder, moved.checkpoint_folder, moved.export_folder) == (Path("a"), Path("b"), Path("c"))


TOKENIZERS = [
    # model, tokenizer -> (entries of the one to train, source of an existing one)
    ({"architecture": "llama"}, {}, (32768, None)),
    ({"architecture": "llama"}, {"vocabulary_size": 512}, (512, None)),
    ({"architecture": "llama"}, {"source": "t"}, (None, "t")),
    ({"source": "m"}, {}, (None, "m")),
    ({"source": "m"}, {"source": "t"}, (None, "t")),
    ({"source": "m", "fresh_weights": True}, {}, (None, "m")),
    ({"source": "m", "fresh_weights": True}, {"vocabulary_size": 512}, (512, None)),
]


@pytest.mark.parametrize(("model", "tokenizer", "expected"), TOKENIZERS)
def test_which_tokenizer_is_used(model, tokenizer, expected):
    chosen = config_from_dict({"model": model, "data": MINIMAL["data"], "tokenizer": tokenizer})
    assert (chosen.trained_tokenizer_entries, chosen.tokenizer_source) == expected
