"""From [model] to what the pipeline is built from, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import wrong_refusals
from transformers import LlamaConfig, PreTrainedConfig

from evenpipe.cli.model_argument import read_model
from evenpipe.errors import InputError
from evenpipe.model import Description, describe
from evenpipe.schedule import generate
from evenpipe.train.config_file import config_from_dict, load_config
from evenpipe.train.model_source import check_pipeline, model_config, pipeline_model
from evenpipe.train.planned_config import configured_model, model_tables

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


def test_a_described_model_takes_from_the_tokenizer_what_its_description_leaves_out() -> None:
    model = pipeline_model(config(), tokenizer_size=500, end_of_text_id=3)
    assert isinstance(model, PreTrainedConfig)
    assert (model.model_type, model.hidden_size, model.vocab_size) == ("llama", 16, 500)
    assert (model.eos_token_id, model.bos_token_id, model.pad_token_id) == (3, 3, None)
    model = pipeline_model(config(values={"vocab_size": 512, "eos_token_id": 1, "pad_token_id": 0}), 500, 3)
    assert (model.vocab_size, model.eos_token_id, model.pad_token_id) == (512, 1, 0)
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
    # options of `config`, words of the sentence
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
    ({"pipeline": {"checkpointing": ["full", "none"]}}, ["checkpointing has 2 choices", "4, one per layer"]),
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
    ({"schedule": "zbv", "stages_per_device": 3}, ["'zbv' has 2 stages per device, not 3"]),
    ({"schedule": "v-budget", "memory_limit": 1}, ["pipeline.memory_limit is 1", "4 stage activ"]),
    (
        {"schedule": "zbv", "layers_per_stage": [2, 2]},
        ["pipeline.layers_per_stage is [2, 2]", "4 numbers, one for each stage", "on 2 devices"],
    ),
    (
        {"schedule": "1f1b", "layers_per_stage": [1, 1, 1, 1]},
        ["pipeline.layers_per_stage is [1, 1, 1, 1]", "2 numbers"],
    ),
    (
        {"processes": 1, "schedule": "order.csv"},
        ["pipeline.processes is 1", "must be 2", "the order in", "order.csv has 2 devices"],
    ),
    ({"schedule": "order.csv", "microbatches": 5}, ["pipeline.microbatches is 5", "must be 3"]),
    ({"replicas": 2, "schedule": "order.csv"}, ["pipeline.processes is 2", "must be 4", "each of 2 replicas"]),
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
        check_pipeline(config(**changes))
        pipeline_model(config(**changes), tokenizer_size=500, end_of_text_id=0)

    cases = [({"pipeline": {"processes": 2, **pipeline}}, words) for pipeline, words in SCHEDULES_REFUSED]
    assert not wrong_refusals(check, [*REFUSED, *cases])


def test_a_saved_model_needs_a_model_and_room_for_the_tokenizer(folder: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="300, but must be at least 301"):
        pipeline_model(config({"source": folder}), 301, 0)
    with pytest.raises(InputError, match=r"model\.source"):
        model_config(config({"source": str(tmp_path)}).model)


def test_a_stage_without_layers_belongs_to_redistribute() -> None:
    check_pipeline(config(pipeline={"processes": 2, "layers_per_stage": [4, 0], "vocabulary": "redistribute"}))


def test_the_quickstart_is_accepted() -> None:
    quickstart = load_config(Path(__file__).parents[2] / "examples" / "quickstart.toml")
    model = pipeline_model(quickstart, quickstart.tokenizer.vocabulary_size, 0)
    assert (model.vocab_size, model.num_hidden_layers) == (8192, 8)


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
    written = describe(configured_model(config_from_dict({**tables, "pipeline": {"processes": 2}})))
    assert text_shapes(written) == text_shapes(planned)


def test_fields_that_only_the_model_reads_are_accepted() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    configured_model(config({"architecture": "qwen3_moe", "config": {**sizes, "head_dim": 32}}))
    with pytest.raises(InputError, match=r"model\.config\.head_dimension is no field of Qwen3MoeConfig"):
        configured_model(config({"architecture": "qwen3_moe", "config": {**sizes, "head_dimension": 32}}))
