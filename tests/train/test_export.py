"""From a checkpoint to a folder that transformers loads: the same model to the last bit."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_run import flip
from safetensors import safe_open
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from evenpipe.checkpoints import save
from evenpipe.errors import InputError
from evenpipe.model import persistent_buffers
from evenpipe.model.placement import Held
from evenpipe.train import export as module
from evenpipe.train.export import export_checkpoint

FAMILIES = ["cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "mixtral"]
FAMILIES += ["olmo2", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"]
EXPERTS = {
    "mixtral": {"num_local_experts": 3},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
    | {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
"""Stored one by one, or with a buffer beside the parameters."""
IDS = torch.arange(24).reshape(2, 12) * 5 % 97


def build(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model in which no parameter has a special value."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[family](**sizes | heads | tokens | EXPERTS.get(family, {}) | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
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
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(6)
def test_transformers_loads_what_was_trained(tmp_path: Path, family: str, tied: bool) -> None:
    model = build(family, tie_word_embeddings=tied)
    export_checkpoint(checkpoint_of(model, tmp_path), tmp_path / "model")
    assert_same_model(tmp_path / "model", model)
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
    head = {"gpt_neox": "embed_out.weight"}.get(family, "lm_head.weight")
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
    with pytest.raises(InputError, match=r"dtype is 'int8', but must be one of source, .*bfloat16"):
        export_checkpoint(checkpoint, tmp_path / "other", dtype="int8")


def test_large_models_come_in_several_files_which_replace_each_other(tmp_path: Path) -> None:
    model = build()
    checkpoint = checkpoint_of(model, tmp_path)
    export_checkpoint(checkpoint, tmp_path / "model", max_shard_size=20_000)
    assert_same_model(tmp_path / "model", model)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    for file in files:
        with safe_open(tmp_path / "model" / file, framework="pt") as opened:
            assert set(opened.keys()) == {name for name, where in index["weight_map"].items() if where == file}
            assert opened.metadata() == {"format": "pt"}
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


def test_what_is_no_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="has no checkpoint"):
            export_checkpoint(folder, tmp_path / "model")


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
    (with_config(num_hidden_layers=3), r"has no 'model\.layers\.2\."),
    (with_config(num_hidden_layers=1), r"has 'model\.layers\.1\..* does not have"),
    (with_config(vocab_size=98), r"has shape \(97, 32\) in the checkpoint"),
    (with_config(tie_word_embeddings=True), "has 'lm_head.weight'"),
    # an origin that no run has written
    (with_origin({"files": {"../../evil.json": "x"}, **NO_DTYPE}), NO_ORIGIN),
    (with_origin({"files": {"setup.cfg": "x"}, **NO_DTYPE}), NO_ORIGIN),
    (with_origin({**NO_DTYPE, "files": {}, "dtype": "int8"}), NO_ORIGIN),
    (with_origin({"files": ["config.json"], **NO_DTYPE}), NO_ORIGIN),
    (with_origin("config.json"), NO_ORIGIN),
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
    largest = 97 * 32 * 4
    export_checkpoint(checkpoint, tmp_path / "model", max_shard_size=1)
    assert len(read) == 21
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
    model = build("deepseek_v3")
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
