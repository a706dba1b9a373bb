"""From [model] to what the pipeline is built from, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from evenpipe.errors import InputError
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.model_source import check_pipeline, model_config, pipeline_model

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def config(model=None, values=None, **tables):
    if model is None:
        model = {"architecture": "llama", "config": {**SMALL, **(values or {})}}
    data = {"corpus": "python-standard-library", "sequence_length": 32, **tables.pop("data", {})}
    return config_from_dict({"model": model, "data": data, **tables})


@pytest.fixture
def folder(tmp_path):
    """A saved model without weights: enough to be described."""
    LlamaConfig(**SMALL, vocab_size=300, eos_token_id=7, bos_token_id=6).save_pretrained(tmp_path / "saved")
    return str(tmp_path / "saved")


def test_a_described_model_takes_its_vocabulary_from_the_tokenizer():
    model = pipeline_model(config(), tokenizer_size=500, end_of_text_id=3)
    assert isinstance(model, PreTrainedConfig)
    assert (model.model_type, model.hidden_size, model.vocab_size) == ("llama", 16, 500)
    assert (model.eos_token_id, model.bos_token_id, model.pad_token_id) == (3, 3, None)


def test_what_the_description_says_stays():
    model = pipeline_model(config(values={"vocab_size": 512, "eos_token_id": 1, "pad_token_id": 0}), 500, 3)
    assert (model.vocab_size, model.eos_token_id, model.pad_token_id) == (512, 1, 0)


def test_other_names_of_an_architecture_are_its_own():
    gpt2 = {"architecture": "gpt2", "config": {"n_layer": 2, "num_attention_heads": 2, "n_embd": 8, "n_positions": 40}}
    model = pipeline_model(config(gpt2), 300, 0)
    assert (model.num_hidden_layers, model.n_head, model.max_position_embeddings) == (2, 2, 40)


def test_a_saved_model_is_passed_on_by_name_and_with_fresh_weights_as_its_config(folder):
    assert pipeline_model(config({"source": folder}), 300, 0) == folder
    fresh = pipeline_model(config({"source": folder, "fresh_weights": True}), 290, 0)
    assert isinstance(fresh, PreTrainedConfig)
    assert (fresh.vocab_size, fresh.eos_token_id) == (300, 7)
    own = config({"source": folder, "fresh_weights": True}, tokenizer={"vocabulary_size": 400})
    assert pipeline_model(own, 400, 5).vocab_size == 400


REFUSED = [
    ({"values": {"num_hiden_layers": 3}}, ["model.config.num_hiden_layers", 'did you mean "num_hidden_layers"']),
    ({"values": {"num_hidden_layers": "two"}}, ["[model.config]", "num_hidden_layers", "int"]),
    ({"values": {"hidden_size": 17}}, ["[model.config]", "17"]),
    ({"model": {"architecture": "lama"}}, ["model.architecture", '"lama"', 'did you mean "llama"']),
    ({"model": {"architecture": "vit"}}, ["model.architecture", '"vit"']),
    ({"model": {"source": "./nowhere"}}, ["model.source", "./nowhere"]),
    ({"pipeline": {"processes": 5}}, ["pipeline.processes is 5", "at most 4"]),
    ({"pipeline": {"processes": 5, "vocabulary": "redistribute"}}, ["pipeline.processes is 5", "at most 4"]),
    ({"pipeline": {"processes": 10, "replicas": 2}}, ["is 10", "at most 8, the layers of the model times 2 replicas"]),
    ({"pipeline": {"processes": 2, "layers_per_stage": [2, 1]}}, ["pipeline.layers_per_stage is [2, 1]", "4 layers"]),
    ({"pipeline": {"processes": 2, "layers_per_stage": [4, 0]}}, ["pipeline.layers_per_stage", "at least 1"]),
    (
        {"pipeline": {"checkpointing": ["full", "none"]}},
        ["pipeline.checkpointing has 2 choices", "4, one per layer"],
    ),
    ({"data": {"sequence_length": 65}}, ["data.sequence_length is 65", "at most 64"]),
    ({"values": {"vocab_size": 400}}, ["model.config.vocab_size is 400", "at least 500"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refused(changes, words):
    with pytest.raises(InputError) as caught:
        check_pipeline(config(**changes))
        pipeline_model(config(**changes), tokenizer_size=500, end_of_text_id=0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_saved_model_with_a_smaller_vocabulary_than_the_tokenizer_is_refused(folder):
    with pytest.raises(InputError, match="300, but must be at least 301"):
        pipeline_model(config({"source": folder}), 301, 0)


def test_a_stage_without_layers_belongs_to_redistribute():
    accepted = config(pipeline={"processes": 2, "layers_per_stage": [4, 0], "vocabulary": "redistribute"})
    check_pipeline(accepted)


SCHEDULES_REFUSED = [
    ({"processes": 3, "schedule": "zbv"}, ['pipeline.schedule is "zbv"', "6 stages on 3 devices", "at most 4"]),
    (
        {"processes": 2, "schedule": "interleaved", "stages_per_device": 3},
        ['pipeline.schedule is "interleaved"', "6 stages on 2 devices"],
    ),
    ({"processes": 2, "schedule": "zbv", "stages_per_device": 3}, ["'zbv' has 2 stages per device, not 3"]),
    ({"processes": 2, "schedule": "v-budget", "memory_limit": 1}, ["pipeline.memory_limit is 1", "4 stage activ"]),
    (
        {"processes": 2, "schedule": "zbv", "layers_per_stage": [2, 2]},
        ["pipeline.layers_per_stage is [2, 2]", "4 numbers, one for each stage", "on 2 devices"],
    ),
    (
        {"processes": 2, "schedule": "1f1b", "layers_per_stage": [1, 1, 1, 1]},
        ["pipeline.layers_per_stage is [1, 1, 1, 1]", "2 numbers"],
    ),
    (
        {"processes": 1, "schedule": "FILE"},
        ["pipeline.processes is 1", "must be 2", "the order in", "order.csv has 2 devices"],
    ),
    ({"processes": 2, "schedule": "FILE", "microbatches": 5}, ["pipeline.microbatches is 5", "must be 3"]),
    (
        {"processes": 2, "replicas": 2, "schedule": "FILE"},
        ["pipeline.processes is 2", "must be 4", "each of 2 replicas"],
    ),
    ({"processes": 2, "schedule": "BROKEN"}, ["row 1, column 2", "0X0"]),
]


@pytest.mark.parametrize(("pipeline", "words"), SCHEDULES_REFUSED)
def test_schedules_that_do_not_fit_are_refused_before_a_process_starts(pipeline, words, tmp_path):
    order, broken = tmp_path / "order.csv", tmp_path / "broken.csv"
    order.write_text("0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    broken.write_text("0F0,0X0\n1F0,1B0\n")
    named = {"FILE": str(order), "BROKEN": str(broken)}
    schedule = named.get(pipeline["schedule"], pipeline["schedule"])
    with pytest.raises(InputError) as caught:
        check_pipeline(config(pipeline={**pipeline, "schedule": schedule}))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"model\.source"):
        model_config(config({"source": str(tmp_path)}).model)
