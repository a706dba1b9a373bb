"""Bad model folders are refused with one sentence each, and no file outside the folder is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import tiny_config, whole_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from evenpipe.cli import main as cli
from evenpipe.errors import InputError
from evenpipe.model import as_stored, build_stage, describe, fill_parameters, fill_rows
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.model_source import model_config

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    whole_model(tiny_config("llama"), torch.float32).save_pretrained(folder, max_shard_size="100KB")
    assert (folder / INDEX).is_file()
    return folder


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


REFUSED = "has a config that transformers refuses"
CONFIGS = [
    # settings in config.json, and the expected message; text instead of a dictionary is the whole file
    ({"vocab_size": 10**12}, ["vocab_size is 1000000000000", "must be from 1 to 67108864"]),
    ({"vocab_size": 2**63}, ["vocab_size is 9223372036854775808", "from 1 to"]),
    ({"vocab_size": -3}, ["vocab_size is -3", "from 1 to"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "from 1 to 16384"]),
    ({"num_hidden_layers": 10**12}, ["num_hidden_layers is 1000000000000", "from 1 to 16384"]),
    ({"num_attention_heads": 0}, ["num_attention_heads is 0", "from 1 to"]),
    ({"num_key_value_heads": 0}, ["num_key_value_heads is 0", "from 1 to"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads is 3", "must divide 4"]),
    ({"head_dim": 0}, ["head_dim is 0", "from 1 to"]),
    ({"hidden_size": 0}, ["hidden_size is 0", "from 1 to"]),
    ({"hidden_size": -64}, ["hidden_size is -64", "from 1 to"]),
    ({"hidden_size": 2**40}, ["hidden_size is 1099511627776", "from 1 to"]),
    ({"intermediate_size": -5}, ["intermediate_size is -5", "from 1 to"]),
    ({"hidden_size": 66}, [REFUSED, "66", "4"]),
    ({"hidden_size": "64"}, [REFUSED, "'hidden_size' expected int, got str (value: '64')"]),
    ({"num_hidden_layers": "two"}, [REFUSED, "'num_hidden_layers' expected int, got str (value: 'two')"]),
    ({"num_hidden_layers": None}, [REFUSED, "'num_hidden_layers' expected int"]),
    ({"vocab_size": [3]}, [REFUSED, "'vocab_size' expected int, got list"]),
    ({"rope_parameters": "x"}, [REFUSED, "'rope_parameters' with value 'x'"]),
    ({"model_type": "nobody"}, [REFUSED, "nobody"]),
    ({"model_type": 3}, [REFUSED, "3"]),
    (b"", ["not a valid JSON file"]),
    (b'{"hidden_size": ', ["not a valid JSON file"]),
    (b"\xff\xfe\x00", ["not a valid JSON file"]),
    (b"[]", [REFUSED, "expected a JSON object"]),
    (b"null", [REFUSED, "expected a JSON object"]),
    (b"[" * 100_000, [REFUSED, "expected a JSON object"]),
]


def test_configs_that_describe_no_model(folder, capsys) -> None:
    """The command line and the configuration file say it in one line each, with the name of the field."""
    config = folder / "config.json"
    sound = json.loads(config.read_text())
    for content, words in CONFIGS:
        config.write_bytes(json.dumps(sound | content).encode() if isinstance(content, dict) else content)
        assert cli.main(["estimate", "--model", str(folder), "--pp", "1"]) == 2
        (printed,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
        with pytest.raises(InputError) as caught:
            data = {"corpus": "python-standard-library", "sequence_length": 16}
            model_config(config_from_dict({"model": {"source": str(folder)}, "data": data}).model)
        for text, field in ((printed, f"model = '{folder}'"), (str(caught.value), f"model.source = '{folder}'")):
            assert "\n" not in text
            assert all(word in text for word in (field, *words)), (words, text)


def test_a_config_with_a_family_s_own_names_and_one_made_in_python() -> None:
    tables = {"model": {"architecture": "gpt2", "config": {"n_layer": 0}}}
    with pytest.raises(InputError, match=r"n_layer is 0 in the model's config; it must be from 1"):
        model_config(config_from_dict(tables | {"data": {"corpus": "python-standard-library"}}).model)
    with pytest.raises(InputError, match="vocab_size is 1000000000000"):
        describe(LlamaConfig(vocab_size=10**12))


def content_of(index: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))

    return damage


def place(file: object) -> Callable[[Path], None]:
    """Return a function that makes the index name this file for one tensor."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][UP] = file
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def wrong_shard(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    others = sorted({*index["weight_map"].values()} - {index["weight_map"][UP]})
    place(others[0])(folder)


def shards(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            file.write_bytes(change(file.read_bytes()))

    return damage


INSIDE = "must name a .safetensors file inside the folder"
FILES = [
    (content_of([]), [INDEX, "is damaged", "expected a table with a weight_map"]),
    (content_of("null"), [INDEX, "is damaged"]),
    (content_of('"weight_map"'), [INDEX, "is damaged"]),
    (content_of("{"), [INDEX, "is damaged"]),
    (content_of("[" * 100_000), [INDEX, "is damaged"]),
    (content_of({}), [INDEX, "is damaged"]),
    (content_of({"weight_map": []}), ["weight_map", "is list", "must be a table from names to files"]),
    (content_of({"weight_map": None}), ["weight_map", "is NoneType"]),
    (content_of({"weight_map": {}}), ["has no tensor for"]),
    (place(3), [UP, "is in 3", INSIDE]),
    (place(None), [UP, "is in None", INSIDE]),
    (place(["a"]), [UP, "is in ['a']", INSIDE]),
    (place(""), [UP, "is in ''", INSIDE]),
    (place(".."), [UP, "is in '..'", INSIDE]),
    (place("config.json"), [UP, "'config.json'", INSIDE]),
    (place("a\0.safetensors"), [UP, INSIDE]),
    (place("nowhere.safetensors"), ["has no file nowhere.safetensors"]),
    (wrong_shard, [UP, "should be in model-0000", "does not give it out"]),
    (shards(lambda content: content[: len(content) // 2]), ["is damaged"]),
    (shards(lambda content: b"\0garbage" * 100), ["is damaged"]),
    (shards(lambda content: (2**40).to_bytes(8, "little") + content[8:]), ["is damaged"]),
    (shards(lambda content: b""), ["is damaged"]),
]


def stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return a function that changes the tensors of a single file."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def without(end: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            del tensors[name]

    return stored(change)


EXPERT = "model.layers.1.block_sparse_moe.experts.2"
SINGLE_FILES = [
    (
        "llama",
        lambda folder: (folder / "model.safetensors").unlink(),
        ["holds neither model.safetensors nor model.safetensors.index.json"],
    ),
    ("llama", without("layers.1.mlp.gate_proj.weight"), ["has no tensor for model.layers.1.mlp.gate_proj.weight"]),
    (
        "llama",
        stored(lambda tensors: tensors.update({UP: torch.zeros(96, 63)})),
        ["up_proj.weight has the shape (96, 63), and the config asks for (96, 64)"],
    ),
    (
        "mixtral",
        without(f"{EXPERT}.w2.weight"),
        ["down_proj has the shape (3, 64, 96), and the config asks for (4, 64, 96)"],
    ),
    ("mixtral", without("w3.weight"), ["gate_up_proj"]),
    (
        "mixtral",
        stored(lambda tensors: tensors.update({f"{EXPERT}.w1.weight": torch.zeros(95, 64)})),
        ["model.layers.1.mlp.experts.gate_up_proj cannot be put together from"],
    ),
]


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    description = as_stored(describe(folder))
    stage = build_stage(description, 0, 4, is_first=True, is_last=True)
    try:
        fill_parameters(stage, description)
    except InputError:
        assert all(parameter.isnan().all() for parameter in stage.parameters()), "nothing was half loaded"
        raise
    rows = {name: fill_rows(description, name, 0, 503) for name in description.vocabulary_names}
    return {name: parameter.detach() for name, parameter in stage.named_parameters()} | rows


def assert_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_all(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.count(str(folder)) == 1
    assert all(word in sentence for word in words), (words, sentence)


def test_weights_that_are_not_there(sound, tmp_path, sample) -> None:
    for number, (damage, words) in enumerate(sample(FILES, 10)):
        folder = shutil.copytree(sound, tmp_path / str(number))
        damage(folder)
        assert_refused(folder, words)
    whole = {}
    for number, (family, damage, words) in enumerate(SINGLE_FILES):
        if family not in whole:
            whole[family] = tmp_path / family
            whole_model(tiny_config(family), torch.float32).save_pretrained(whole[family])
        folder = shutil.copytree(whole[family], tmp_path / f"single {number}")
        damage(folder)
        assert_refused(folder, words)


@pytest.mark.parametrize(
    "way", ["../secret/", "{folder}/../secret/", "a/../../secret/", "..\\secret\\", "C:\\secret\\"]
)
def test_an_index_that_leads_out_of_the_folder(folder, way) -> None:
    """Check that an index cannot make files outside the folder be read, even if they contain the tensors."""
    shutil.copytree(folder, folder.parent / "secret")
    index = json.loads((folder / INDEX).read_text())
    prefix = way.format(folder=folder)
    index["weight_map"] = {name: prefix + file for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=INSIDE):
        load_all(folder)


def test_links_and_folders_below_are_followed(folder, sound) -> None:
    """Follow links: the hub's cache consists of links to files elsewhere."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    index = json.loads((folder / INDEX).read_text())
    (folder / "parts").mkdir()
    for number, file in enumerate(sorted({*index["weight_map"].values()})):
        (folder / file).rename(blobs / str(number))
        (folder / "parts" / file).symlink_to(Path("..", "..", "blobs", str(number)))
    index["weight_map"] = {name: f"parts/{file}" for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    wanted = {name: tensor for file in sound.glob("*.safetensors") for name, tensor in load_file(file).items()}
    loaded = load_all(folder)
    assert loaded.keys() == wanted.keys() and all(torch.equal(loaded[name], wanted[name]) for name in wanted)
