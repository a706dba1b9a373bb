"""From a checkpoint to a folder that transformers loads: the same model to the last bit; text from such a folder."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_run import flip
from families import whole_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_families import CONFIGS
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from evenpipe.checkpoints import save
from evenpipe.errors import InputError
from evenpipe.model import persistent_buffers
from evenpipe.model.placement import Held
from evenpipe.train import export as module
from evenpipe.train.export import export_checkpoint
from evenpipe.train.generation import Generator
from evenpipe.train.tokenizer import train_tokenizer

VOCABULARY = 97
IDS = torch.arange(24).reshape(2, 12) * 5 % VOCABULARY


def build(family: str = "llama", *, tied: bool = False) -> PreTrainedModel:
    """A small model in which no parameter or buffer has a special value."""
    model = whole_model(CONFIGS[family](vocab_size=VOCABULARY, tie_word_embeddings=tied), torch.float32).eval()
    for _, buffer in persistent_buffers(model):
        buffer.add_(torch.rand_like(buffer))
    return model


def checkpoint_of(model: PreTrainedModel, folder: Path, step: int = 7, **metadata: Any) -> Path:
    """What a run of one process saves: parameters, saved buffers, optimizer state, and the model's config."""
    buffers = {name: torch.nn.Parameter(buffer, requires_grad=False) for name, buffer in persistent_buffers(model)}
    shards = {name: Held.whole(parameter) for name, parameter in (*model.named_parameters(), *buffers.items())}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    facts = {"model_config": model.config.to_dict(), "tied": model.config.tie_word_embeddings}
    return save(folder, step, shards, optimizer, facts | metadata)


def loss_of(model: PreTrainedModel) -> float:
    with torch.no_grad():
        return model(input_ids=IDS, labels=IDS, use_cache=False).loss.item()


def assert_same_model(folder: Path, model: PreTrainedModel) -> None:
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    expected = dict(model.named_parameters())
    assert dict(loaded.named_parameters()).keys() == expected.keys()
    for (name, buffer), (_, other) in zip(persistent_buffers(loaded), persistent_buffers(model), strict=True):
        assert torch.equal(buffer, other), name
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.equal(parameter, expected[name]), name
    assert type(loaded) is type(model)
    assert abs(loss_of(loaded.eval()) - loss_of(model)) <= 1e-6 * loss_of(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.sampled(6)
def test_transformers_loads_what_was_trained(tmp_path: Path, family: str, tied: bool) -> None:
    model = build(family, tied=tied)
    export_checkpoint(checkpoint_of(model, tmp_path), tmp_path / "model")
    assert_same_model(tmp_path / "model", model)
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
    head = {"gpt-neox": "embed_out.weight"}.get(family, "lm_head.weight")
    assert (head in names) is not tied
    assert not any("optimizer" in name for name in names)


def test_the_folder_is_complete_in_its_own_dtype_and_in_another(tmp_path: Path) -> None:
    model = build()
    checkpoint = checkpoint_of(model, tmp_path)
    for dtype, name in (("source", "float32"), ("bfloat16", "bfloat16"), (torch.bfloat16, "bfloat16")):
        path = export_checkpoint(checkpoint, tmp_path / "model", dtype=dtype)
        assert path == tmp_path / "model"
        assert {file.name for file in path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
        config = json.loads((path / "config.json").read_text())
        assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], name)
        loaded = AutoModelForCausalLM.from_pretrained(path)
        for key, parameter in model.named_parameters():
            assert torch.equal(loaded.get_parameter(key), parameter.to(getattr(torch, name))), key
    with pytest.raises(InputError, match=r'dtype is "int8"; it must be one of source, .*bfloat16'):
        export_checkpoint(checkpoint, tmp_path / "other", dtype="int8")


def test_large_models_come_in_several_files_which_replace_each_other(tmp_path: Path) -> None:
    model = build()
    checkpoint = checkpoint_of(model, tmp_path)
    export_checkpoint(checkpoint, tmp_path / "model", max_shard_size=10_000)
    assert_same_model(tmp_path / "model", model)
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    (tmp_path / "empty").mkdir()
    for target in ("model", "empty"):
        assert_same_model(export_checkpoint(checkpoint, tmp_path / target), model)
        assert not list((tmp_path / target).glob("*-of-*"))
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["empty", "model", "step-00000007"]


def tokenizer_in(folder: Path) -> Path:
    from tokenizers import Tokenizer, models

    vocabulary = {"<eos>": 0, "<unk>": 1, "a": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")), eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    (folder / "private.txt").write_text("not part of a tokenizer")
    return folder


def test_the_tokenizer_comes_along_if_it_is_still_there(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(build(), tmp_path / "run" / "checkpoints", tokenizer="../../tokenizer")
    with pytest.warns(UserWarning, match=r"run\.json names the tokenizer .*/\.\./\.\./tokenizer, which does not exist"):
        export_checkpoint(checkpoint, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
    tokenizer_in(tmp_path / "run" / "tokenizer")
    export_checkpoint(checkpoint, tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("a")["input_ids"] == [2]
    assert not (tmp_path / "model" / "private.txt").exists()


def test_a_runs_folder_stands_for_its_newest_sound_checkpoint(tmp_path: Path) -> None:
    old, new = build(), build()
    checkpoint_of(old, tmp_path / "checkpoints", step=3)
    with torch.no_grad():
        new.model.norm.weight.add_(1)
    newest = checkpoint_of(new, tmp_path / "checkpoints", step=4)
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert_same_model(export_checkpoint(folder, tmp_path / "model"), new)
    flip(newest / "__0_0.distcp", random.Random(0))
    with pytest.warns(UserWarning, match=r"skipped .*step-00000004: the content of __0_0\.distcp"):
        export_checkpoint(tmp_path, tmp_path / "model")
    assert_same_model(tmp_path / "model", old)
    with pytest.raises(InputError, match=r"step-00000004' cannot be used: the content of __0_0\.distcp"):
        export_checkpoint(newest, tmp_path / "model")
    flip(tmp_path / "checkpoints" / "step-00000003" / "run.json", random.Random(0))
    with pytest.raises(InputError, match=r"has no sound checkpoint \(step-00000004: the content of __0_0\.distcp"):
        export_checkpoint(tmp_path, tmp_path / "model")
    assert_same_model(tmp_path / "model", old)


def without_config(facts: dict[str, Any]) -> None:
    del facts["model_config"]


def with_config(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts["model_config"].update(changes)


def with_origin(origin: Any) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts.update(origin=origin)


NO_DTYPE = {"dtype": None, "other_dtypes": {}}
NO_ORIGIN = "step-00000001': the origin of the model"
REFUSED = [
    # what is wrong in run.json, the sentence
    (without_config, r"run\.json has no model_config"),
    (with_config(model_type="never heard of"), "model_type 'never heard of'"),
    (with_config(num_hidden_layers=5), r"has no 'model\.layers\.4\."),
    (with_config(num_hidden_layers=3), r"has 'model\.layers\.3\..* does not have"),
    (with_config(vocab_size=98), r"has shape \(97, 16\) in the checkpoint"),
    (with_config(tie_word_embeddings=True), "has 'lm_head.weight'"),
    # an origin that no run has written
    (with_origin({"files": {"../../evil.json": "x"}, **NO_DTYPE}), NO_ORIGIN),
    (with_origin({**NO_DTYPE, "files": {}, "dtype": "int8"}), NO_ORIGIN),
    (with_origin({"files": ["config.json"], **NO_DTYPE}), NO_ORIGIN),
]


def test_what_is_not_of_the_parameters_or_no_run_has_written_is_refused(tmp_path: Path) -> None:
    model = build()
    shards = {name: Held.whole(parameter) for name, parameter in model.named_parameters()}
    for number, (change, says) in enumerate(REFUSED):
        facts = {"model_config": copy.deepcopy(model.config.to_dict()), "tied": False}
        change(facts)
        checkpoint = save(tmp_path / str(number), 1, shards, None, facts)
        with pytest.raises(InputError, match=says):
            export_checkpoint(checkpoint, tmp_path / "model")
        assert not (tmp_path / "model").exists()


# ---- where it goes


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(build(), tmp_path)
    for number, name in enumerate(("notes.md", "step-00000001/manifest.json", "weights.bin")):
        other = tmp_path / str(number) / name
        other.parent.mkdir(parents=True)
        other.write_text("precious")
        first = name.split("/", maxsplit=1)[0]
        with pytest.raises(InputError, match=f"{number}', has '{first}', which no export has written"):
            export_checkpoint(checkpoint, tmp_path / str(number))
        with pytest.raises(InputError, match="is a file or a link"):
            export_checkpoint(checkpoint, other)
        assert other.read_text() == "precious"


def test_memory_holds_one_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks which tensors are alive whenever another one has been read."""
    checkpoint = checkpoint_of(build(), tmp_path)
    read: list[tuple[StorageWeakRef, int]] = []
    most = 0
    real = module.read_state

    def counting(opened: Any, index: Any, state: dict[str, Held]) -> None:
        nonlocal most
        read.extend((StorageWeakRef(one.tensor.untyped_storage()), one.tensor.nbytes) for one in state.values())
        most = max(most, sum(size for reference, size in read if not reference.expired()))
        real(opened, index, state)

    monkeypatch.setattr(module, "read_state", counting)
    largest = VOCABULARY * 16 * 4
    export_checkpoint(checkpoint, tmp_path / "model", max_shard_size=1)
    assert len(read) == 39
    assert most <= 2 * largest
    most = 0
    export_checkpoint(checkpoint, tmp_path / "model")
    assert most > 5 * largest, "this test does not see what is held"


def test_the_generation_config_of_the_run_is_kept(tmp_path: Path) -> None:
    """An older checkpoint has all values, also those that are not set."""
    model = build()
    model.generation_config.temperature, model.generation_config.top_k = 0.5, 7
    model.generation_config.do_sample = True
    values = model.generation_config.to_dict()
    assert sum(value is None for value in values.values()) > 40
    path = export_checkpoint(checkpoint_of(model, tmp_path, generation_config=values), tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(path).generation_config.temperature == 0.5
    model.generation_config.save_pretrained(tmp_path / "wanted")
    name = "generation_config.json"
    assert (path / name).read_text() == (tmp_path / "wanted" / name).read_text()


def test_16_bits_leave_what_transformers_keeps_in_32(tmp_path: Path) -> None:
    model = build("deepseek-v3")
    path = export_checkpoint(checkpoint_of(model, tmp_path), tmp_path / "model", dtype="bfloat16")
    loaded, expected = AutoModelForCausalLM.from_pretrained(path), dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
    for (name, buffer), (_, other) in zip(persistent_buffers(loaded), persistent_buffers(model), strict=True):
        assert buffer.dtype == torch.float32 and torch.equal(buffer, other), name
    with torch.no_grad():
        model.model.layers[1].mlp.shared_experts.up_proj.weight.fill_(1e5)
    checkpoint = checkpoint_of(model, tmp_path, step=8)
    with pytest.raises(InputError, match=r"shared_experts\.up_proj\.weight has values that float16 cannot hold"):
        export_checkpoint(checkpoint, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()


# ---- text from an exported folder


PROMPT = "import os\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with fresh weights and its tokenizer, as an export leaves them."""
    path = tmp_path_factory.mktemp("exported")
    tokenizer = train_tokenizer(["import os\n\ndef f(x):\n    return x\n"], 300, "<|endoftext|>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **tokens, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_same_seed_writes_the_same_text_and_leaves_the_callers_random_state(folder):
    before = torch.random.get_rng_state()
    generator = Generator(folder)
    texts = [Generator(folder)(PROMPT, max_new_tokens=20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] == generator(PROMPT, max_new_tokens=20, seed=0) != texts[2]
    assert all(text.startswith(PROMPT) and len(text) > len(PROMPT) for text in texts)
    assert isinstance(generator("", max_new_tokens=5), str), "an empty prompt begins a document"
    assert torch.equal(torch.random.get_rng_state(), before)


def test_temperature_zero_and_one_candidate_take_the_likeliest_token(folder):
    generator = Generator(folder)
    text = generator(PROMPT, max_new_tokens=4, temperature=0.0, seed=1)
    assert text == generator(PROMPT, max_new_tokens=4, temperature=0.0, seed=2)
    assert text == generator(PROMPT, max_new_tokens=4, temperature=5.0, top_k=1, seed=3)
    assert text != generator(PROMPT, max_new_tokens=4, temperature=5.0, top_k=0, seed=3)
    tokens = generator._tokenizer(PROMPT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert text == generator._tokenizer.decode(tokens, skip_special_tokens=True)


def test_folders_without_a_model(folder, tmp_path):
    with pytest.raises(InputError, match=r"nowhere.*is not a model folder"):
        Generator(tmp_path / "nowhere")(PROMPT)
    with pytest.raises(InputError, match="is not a model folder"):
        Generator(tmp_path)(PROMPT)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InputError, match=r"has no tokenizer: .* put the tokenizer of the model into"):
        Generator(tmp_path)(PROMPT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be loaded"):
        Generator(tmp_path)(PROMPT)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        Generator(tmp_path)(PROMPT)


def test_numbers_that_cannot_be_and_similar_names(folder):
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Generator(folder)(PROMPT, **wrong)
    with pytest.raises(InputError, match=rf'did you mean "{folder}"\?$'):
        Generator(f"{folder}x")


def test_the_folder_of_a_run_stands_for_its_model(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")  # the run's own
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r'^".*" has checkpoints but no exported model; evenpipe export .* -o FOLDER'):
        Generator(tmp_path)
    shutil.copytree(folder, tmp_path / "model")
    assert Generator(tmp_path)(PROMPT, max_new_tokens=5) == Generator(folder)(PROMPT, max_new_tokens=5)
