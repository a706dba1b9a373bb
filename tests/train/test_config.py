"""Sections of the configuration: types, ranges, names, and what they imply for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import missing_words, refusal, wrong_refusals

from evenpipe.errors import InputError
from evenpipe.train.config import Config
from evenpipe.train.config_file import apply_overrides, config_from_dict

MINIMAL = {"model": {"architecture": "llama"}, "data": {"corpus": "python-standard-library"}}


def config(*overrides: str, **tables: dict[str, Any]) -> Config:
    """The smallest configuration, with other tables and then with overrides."""
    return config_from_dict(apply_overrides({**MINIMAL, **tables}, overrides))


REFUSED = [
    # words about what is accepted; overrides with another value, which the sentence must name with their field
    (["true or false"], ["model.self_check=yes", "pipeline.nccl_high_priority=1"]),
    (
        ["an integer"],
        ["data.sequence_length=256.0", "data.sequence_length=true", "pipeline.nccl_channels=2.5"],
    ),
    (["an integer"], ['pipeline.layers_per_stage=["2"]']),
    (["a number"], ['optimizer.learning_rate="3e-4"']),
    (["a list of number"], ["pipeline.memory_limit=true"]),
    (["a list of 2 numbers"], ["optimizer.betas=[0.9]"]),
    (["finite"], ["data.validation_fraction=nan"]),
    (["at least 0"], ["loss.z_loss=-0.1", "optimizer.weight_decay=-1", "optimizer.warmup_steps=-1"]),
    (["at least 0"], ["training.seed=-1", "sample.temperature=-0.5", "sample.top_k=-1"]),
    (["at least 1"], ["pipeline.processes=0", "pipeline.microbatches=-1", "pipeline.microbatch_size=0"]),
    (["at least 1"], ["pipeline.stages_per_device=0", "pipeline.group_size=0", "training.steps=0"]),
    (["at least 1"], ["training.evaluate_every_steps=0", "training.evaluation_batches=0", "checkpoint.keep=0"]),
    (["at least 1"], ["checkpoint.every_steps=0", "output.log_every_steps=0", "output.trace_steps=[0]"]),
    (["at least 1"], ["sample.new_tokens=0"]),
    (["at least 2"], ["data.sequence_length=1"]),
    (["at least 257"], ["tokenizer.vocabulary_size=256"]),
    (["above 0"], ["pipeline.timeout_seconds=0", "optimizer.learning_rate=0.0", "optimizer.clip_norm=0"]),
    (["above 0"], ["optimizer.epsilon=0", "training.epochs=0", "training.minutes=-1"]),
    (["above 0 and at most 1"], ["optimizer.decay_share=0.0"]),
    (["one number above 0, or 1"], ["pipeline.memory_limit=[4, 4]"]),
    (["below 1"], ["data.validation_fraction=1.0", "loss.label_smoothing=1", "optimizer.betas=[0.9, 1.0]"]),
    (["between 0 and 1"], ["optimizer.minimum_learning_rate_ratio=1.5"]),
    (["from 1 to 64, or none"], ["pipeline.nccl_channels=0", "pipeline.nccl_channels=65"]),
    (["one per stage"], ["pipeline.layers_per_stage=[0]", "pipeline.layers_per_stage=[3, -1]"]),
    (["a divisor of the 1 process"], ["pipeline.replicas=2"]),
    (['left out with schedule "1f1b"'], ["pipeline.group_size=4", "pipeline.memory_limit=4"]),
    (['left out with schedule "cosine"'], ["optimizer.decay_steps=5"]),
    (["existing file"], ["pipeline.schedule=missing.csv"]),
    # names: all that are accepted are listed, and the nearest is proposed
    (['did you mean "bfloat16"'], ["model.compute_dtype=bf16"]),
    (["python-standard-library"], ["data.corpus=wikipedia", "data.corpus=python-standard-library:"]),
    (["strict, replace"], ["data.encoding_errors=ignore"]),
    (["replicate, shard"], ["pipeline.data_parallel=fsdp"]),
    (["gpipe", 'did you mean "1f1b"'], ["pipeline.schedule=1f2b"]),
    (["redistribute", 'did you mean "vocab-2"'], ["pipeline.vocabulary=vocab2"]),
    (["per-pair, per-kind"], ["pipeline.communicators=two"]),
    (["none, full, selective"], ["pipeline.checkpointing=half"]),
    (["scheduled, none, free, all"], ["offload.activations=x"]),
    (["probabilities, nothing"], ["loss.keep=logits"]),
    (["adamw, muon, adafactor, sgd", 'did you mean "adamw"'], ["optimizer.name=adam"]),
    (["warmup-stable-decay", 'did you mean "cosine"'], ["optimizer.schedule=cosin"]),
    (['"module:name"'], ["optimizer.name=my module:make", "training.callbacks=my_module"]),
    (["training.callbacks[1]"], ['training.callbacks=["a.b:C", "a b:C"]']),
    (["output.trackers[0]", 'did you mean "wandb"'], ["output.trackers=wand"]),
    (["differ"], ['output.trackers=["wandb", "wandb"]']),
    (["but must be"], ["tokenizer.end_of_text=", "output.project=", "output.folder="]),
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


CONVERTED = [
    # section, field, value in the file, value in the configuration
    ("data", "files", "only.txt", ("only.txt",)),
    ("optimizer", "betas", [0, 0.5], (0.0, 0.5)),
    ("optimizer", "learning_rate", 1, 1.0),
    ("optimizer", "clip_norm", "none", None),
    ("checkpoint", "every_steps", "none", None),
    ("output", "trackers", "trackio", ("trackio",)),
    ("pipeline", "layers_per_stage", [1], (1,)),
]


def test_lists_become_tuples_whole_numbers_become_numbers_and_one_text_a_list() -> None:
    for section, field, value, expected in CONVERTED:
        converted = getattr(getattr(config(**{section: {field: value}}), section), field)
        assert (converted, type(converted)) == (expected, type(expected)), field


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
    with pytest.raises(InputError, match="stages_per_device is 2, but must be left out with a CSV file"):
        config(file, "pipeline.stages_per_device=2")


def test_options_of_a_schedule_are_those_that_are_given() -> None:
    for options, expected in (
        ({}, {}),
        ({"schedule": "gis", "stages_per_device": 4, "group_size": 3}, {"stages_per_device": 4, "group_size": 3}),
        ({"schedule": "v-budget", "memory_limit": 6}, {"memory_limit": 6.0}),
        ({"schedule": "v-budget", "memory_limit": [6, 5]}, {"memory_limit": (6.0, 5.0)}),
    ):
        assert config(pipeline={**options, "processes": 2}).pipeline.schedule_options == expected


def test_the_batch_follows_from_the_fields() -> None:
    for pipeline, devices, microbatches, sequences in (
        ({"processes": 3, "microbatch_size": 2}, 3, 12, 24),
        ({"processes": 3, "microbatches": 5}, 3, 5, 5),
        ({"processes": 6, "replicas": 2, "microbatch_size": 3}, 3, 12, 72),
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
