"""A trained model is written in the form of what it was made from: files to the byte, tensors in their dtypes, whatever
processes held them."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import run_processes
from safetensors.torch import load_file, save_file
from small_families import USUAL
from training_runs import prepared, train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from evenpipe.cli.main import main
from evenpipe.errors import InputError, RunError
from evenpipe.model import describe, write_folder_metadata
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.schedule import Order
from evenpipe.train.export import export_checkpoint
from evenpipe.train.tokenizer import train_tokenizer

TEXT = "a stage sends hidden states, and waits for gradients\n" * 300
IDS = torch.arange(48).reshape(4, 12) * 7 % 290
SMALL = {**USUAL, "vocab_size": 300}


# --- models to train --------------------------------------------------------------------------------------------------


def write_model(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """Write a model with random weights, and a tokenizer."""
    torch.manual_seed(1)
    conditional = getattr(transformers, (config.architectures or [""])[0], None)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=dtype)
        if conditional is None
        else conditional._from_config(config, dtype=dtype)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """With settings that only its own file knows, and templates."""
    train_tokenizer([TEXT], 300, "<|end|>").save_pretrained(folder)
    edit(folder / "tokenizer_config.json", model_max_length=131072, unheard_of=[1, {"a": None}])
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>", "lstrip": false}}')
    (folder / "chat_template.jinja").write_bytes(b"{% for m in messages %}\r\n{{ m.content }} \xc3\xbc{% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def edit(path: Path, *, without: tuple[str, ...] = (), **values: Any) -> None:
    """Write other values into a JSON file, in a layout that no program writes."""
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(kept | values, indent=1, separators=(" ,", " : ")) + "\n\n")


def bf16_llama(folder: Path) -> None:
    """With settings that transformers refuses to write, an older name of the dtype, and a field that is unheard of."""
    write_model(folder, LlamaConfig(**SMALL))
    edit(folder / "config.json", without=("dtype",), torch_dtype="bfloat16", of_a_lab={"tokens": 15e12})
    edit(folder / "generation_config.json", do_sample=False, temperature=0.6, eos_token_id=[2, 7])
    (folder / "README.md").write_text("# A card of another model")
    (folder / "LICENSE").write_text("A licence")


def tied_in_shards(folder: Path) -> None:
    """No generation config, and no dtype in the config."""
    write_model(folder, LlamaConfig(**SMALL | {"tie_word_embeddings": True}), max_shard_size="5KB")
    assert (folder / "model.safetensors.index.json").exists()
    edit(folder / "config.json", without=("dtype", "transformers_version"))
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "generation_config.json").unlink()


def experts_beside_fp32_routers(folder: Path) -> None:
    write_model(folder, transformers.MixtralConfig(**SMALL, num_local_experts=4))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "gate.weight" in name:
            tensors[name] = tensors[name].float() + 1e-4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fp16_gpt2(folder: Path) -> None:
    """Vocabulary and merges in the files of the older kind."""
    config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=4, n_head=2, n_positions=64)
    write_model(folder, config, torch.float16)
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink()
    shutil.rmtree(folder / "additional_chat_templates")
    tokenizer = train_tokenizer([TEXT], 300, "<|endoftext|>")
    tokenizer.backend_tokenizer.model.save(str(folder))  # without the token for the end
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')


def with_pictures(folder: Path) -> None:
    """A model that also sees, trained on text."""
    text = {**SMALL, "head_dim": 4, "layer_types": ["full_attention"] * 4, "model_type": "gemma3_text"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    config.architectures = ["Gemma3ForConditionalGeneration"]
    write_model(folder, config)
    (folder / "preprocessor_config.json").write_text("{}\n\n")


CODE = {
    "configuration_mine.py": "from transformers import LlamaConfig\n\n\nclass MineConfig(LlamaConfig):\n"
    '    model_type = "mine"\n',
    "beside_mine.py": "NAME = 1  # \u00fc\r\n",
    "modeling_mine.py": "from transformers import LlamaForCausalLM\n\nfrom .beside_mine import NAME\n"
    "from .configuration_mine import MineConfig\n\n\nclass MineForCausalLM(LlamaForCausalLM):\n"
    "    config_class = MineConfig\n",
}


def with_code(folder: Path) -> None:
    write_model(folder, LlamaConfig(**SMALL))
    places = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    edit(folder / "config.json", model_type="mine", architectures=["MineForCausalLM"], auto_map=places)
    for name, text in CODE.items():
        (folder / name).write_bytes(text.encode())


def of_several_models(folder: Path) -> None:
    """A config with a model of text in it, which transformers builds alone."""
    text = transformers.Qwen3_5TextConfig(**SMALL, head_dim=4, layer_types=["full_attention"] * 4)
    write_model(folder, text)
    transformers.Qwen3_5Config(text_config=text.to_dict(), dtype="bfloat16").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")


def with_another_tokenizer(folder: Path) -> None:
    bf16_llama(folder)
    fp16_gpt2(folder.with_name("gpt2"))


# --- comparisons ------------------------------------------------------------------------------------------------------


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def files_in(folder: Path) -> dict[str, bytes]:
    """All but weights and cards."""
    left_out = ("README.md", "LICENSE", "model.safetensors.index.json")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.name not in left_out}


def assert_form(folder: Path, source: Path) -> None:
    """Of another folder: equal files, and tensors of equal names, shapes and dtypes, some of them with other values."""
    assert files_in(folder) == files_in(source)
    written, given = tensors_in(folder), tensors_in(source)
    forms = [{name: (each.dtype, each.shape) for name, each in tensors.items()} for tensors in (written, given)]
    assert forms[0] == forms[1]
    assert not all(torch.equal(written[name], given[name]) for name in given)


def assert_rounded(folder: Path, exact: Path, dtype: torch.dtype | None = torch.float32) -> None:
    """Tensors are those of another folder in other dtypes; dtype: that of the exact ones, None: the same."""
    written, wanted = tensors_in(folder), tensors_in(exact)
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == (dtype or written[name].dtype)
        assert torch.equal(written[name], tensor.to(written[name].dtype)), name


# --- runs -------------------------------------------------------------------------------------------------------------


def check_copy(folder: Path) -> None:
    """The export is as its source but for its weights; so is one in float32 but for the config's dtype."""
    source = folder / "source"
    exported = export_checkpoint(folder / "run", folder / "exported")
    assert_form(exported, source)
    before, after = (sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (source, exported))
    assert abs(after - before) < 0.05 * before + 8192, "headers differ in length"
    assert main(["export", str(folder / "run"), "-o", str(folder / "exact"), "--dtype", "float32"]) == 0
    assert_rounded(exported, folder / "exact")
    exact = files_in(folder / "exact")
    assert [name for name, content in files_in(source).items() if exact[name] != content] == ["config.json"]
    config, original = (json.loads((each / "config.json").read_text()) for each in (folder / "exact", source))
    inner = {key: value | {"dtype": "float32"} for key, value in original.items() if key.endswith("_config")}
    assert config == original | inner | {"torch_dtype" if "torch_dtype" in original else "dtype": "float32"}

    models = [AutoModelForCausalLM.from_pretrained(each) for each in (source, exported)]
    assert models[0].dtype == models[1].dtype != torch.float32
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (source, exported)]
    assert tokenizers[0](TEXT[:60])["input_ids"] == tokenizers[1](TEXT[:60])["input_ids"] != []
    assert tokenizers[0].model_max_length == tokenizers[1].model_max_length

    shutil.rmtree(source)
    shutil.move(folder / "run", folder / "moved")
    again = export_checkpoint(folder / "moved", folder / "again")
    assert files_in(again) == files_in(exported), "the run holds what it needs"
    assert_rounded(again, exported, None)
    with pytest.raises(InputError, match='dtype is "int8"; it must be one of source, float64, float32'):
        export_checkpoint(folder / "moved", folder / "never", dtype="int8")


def check_code(folder: Path) -> None:
    with pytest.raises(InputError, match=r"model_type 'mine' is not one of .* model\.trust_remote_code = true"):
        export_checkpoint(folder / "run", folder / "never")
    exported = export_checkpoint(folder / "run", folder / "exported", trust_remote_code=True)
    assert_form(exported, folder / "source")
    assert type(AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)).__name__ == "MineForCausalLM"
    assert export_checkpoint(folder / "run", exported, trust_remote_code=True), "an export that an export may replace"
    write_folder_metadata(describe(exported, trust_remote_code=True), folder / "of its class", None)
    assert CODE.keys() <= files_in(folder / "of its class").keys()


def check_several(folder: Path) -> None:
    exported = export_checkpoint(folder / "run", folder / "exported")
    config = json.loads((exported / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors_in(exported).values()} == {torch.bfloat16}
    source, files = files_in(folder / "source"), files_in(exported)
    assert source.keys() - files.keys() == {"preprocessor_config.json"}
    assert {name for name in files if files[name] != source[name]} == {"config.json"}
    AutoModelForCausalLM.from_pretrained(exported)


def check_other_tokenizer(folder: Path) -> None:
    exported = export_checkpoint(folder / "run", folder / "exported")
    assert files_in(exported)["config.json"] == files_in(folder / "source")["config.json"]
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    assert settings == {"model_max_length": 1024, "tokenizer_class": "GPT2Tokenizer", "eos_token": "\u0100"}
    assert (exported / "merges.txt").read_bytes() == (folder / "gpt2" / "merges.txt").read_bytes()
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder / "gpt2", exported)]
    assert tokenizers[1].eos_token == "\u0100"
    assert tokenizers[0](TEXT[:60])["input_ids"] == tokenizers[1](TEXT[:60])["input_ids"]


def check_fresh_weights(folder: Path) -> None:
    exported = export_checkpoint(folder / "run", folder / "exported")
    assert {tensor.dtype for tensor in tensors_in(exported).values()} == {torch.float32}
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & settings.keys()
    assert settings["model_max_length"] == AutoTokenizer.from_pretrained(exported).model_max_length > 1e29
    AutoModelForCausalLM.from_pretrained(exported).save_pretrained(folder / "as transformers")
    assert files_in(folder / "as transformers").items() <= files_in(exported).items()
    assert "null" not in (exported / "generation_config.json").read_text()


@dataclass(frozen=True)
class Kind:
    make: Callable[[Path], None]
    """Writes the model that is trained into a folder."""
    check: Callable[[Path], None] = check_copy
    """Exports the run in a folder in several ways."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the configuration."""


KINDS = {
    "bf16 llama": Kind(bf16_llama),
    "tied, in shards": Kind(tied_in_shards),
    "experts": Kind(experts_beside_fp32_routers),
    "fp16 gpt2": Kind(fp16_gpt2),
    "pictures": Kind(with_pictures),
    "code": Kind(with_code, check_code, {"model.trust_remote_code": True}),
    "several models": Kind(of_several_models, check_several),
    "other tokenizer": Kind(
        with_another_tokenizer, check_other_tokenizer, {"tokenizer.source": "gpt2", "tokenizer.end_of_text": "\u0100"}
    ),
    "fresh weights": Kind(
        bf16_llama, check_fresh_weights, {"model.fresh_weights": True, "tokenizer.vocabulary_size": 280}
    ),
}
RUN = {
    "model.architecture": None,
    "model.config": None,
    "data.sequence_length": 16,
    "data.validation_fraction": 0.0,
    "tokenizer.vocabulary_size": None,
    "pipeline.microbatches": 2,
    "optimizer.warmup_steps": 1,
    "training.steps": 2,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sampled(2)
def test_a_trained_model_has_the_form_of_its_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    KINDS[name].make(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    files = {"model.source": str(tmp_path / "source"), "data.files": [str(tmp_path / "text.txt")]}
    train(prepared(tmp_path, {**RUN, **files, **KINDS[name].changes}))
    KINDS[name].check(tmp_path)


# --- loops of one's own -----------------------------------------------------------------------------------------------


def own_loop(folder: Path) -> None:
    """Of a folder, and of a live model: the loss, one step, and what is written then."""
    source = folder / "source"
    live = AutoModelForCausalLM.from_pretrained(source)
    live.config.of_the_user = 3
    live.generation_config.do_sample, live.generation_config.top_k = True, 7
    live.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    live.save_pretrained(folder / f"live before {torch.distributed.get_rank()}")
    options = {"microbatches": 2, "compute_dtype": torch.float32, "self_check": False}
    for kind, model in (("folder", str(source)), ("live", live)):
        pipeline = Pipeline(model, vocabulary="first-last" if kind == "live" else "vocab-2", **options)
        optimizer = torch.optim.AdamW([one for one in pipeline.parameters() if one.requires_grad], lr=1e-2)
        pipeline.step(IDS)
        optimizer.step()
        pipeline.save_pretrained(folder / f"{kind} saved")
        pipeline.save_pretrained(folder / f"{kind} exact", dtype=torch.float32)
        checkpoint = pipeline.save_checkpoint(folder / f"{kind} checkpoints", 1, optimizer)
        with pytest.raises(InputError, match=r"dtype is torch\.int8; it must be one of torch\.float64"):
            pipeline.save_pretrained(folder / "never", dtype=torch.int8)
        if kind == "folder":
            check_loss(pipeline.evaluate(IDS).loss, folder / "folder exact", checkpoint, options)
        else:
            for parameter in pipeline.parameters():
                parameter.data.fill_(1e6)
            with pytest.raises(RunError, match="has values that float16 cannot hold"):
                pipeline.save_pretrained(folder / "never", dtype=torch.float16)
        pipeline.close()


def check_loss(loss: float, exact: Path, checkpoint: Path, options: dict[str, Any]) -> None:
    """Transformers has the same loss, and so has a pipeline that loads the checkpoint without an optimizer."""
    written = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    with torch.no_grad():
        assert written(input_ids=IDS, labels=IDS).loss.item() == pytest.approx(loss, rel=1e-5)
    other = Pipeline(LlamaConfig.from_pretrained(exact), vocabulary="vocab-1", **options)
    other.load_checkpoint(checkpoint)
    assert other.evaluate(IDS).loss == pytest.approx(loss, rel=1e-6)
    other.close()


def test_own_loops_write_the_form_of_their_model(tmp_path: Path) -> None:
    bf16_llama(tmp_path / "source")
    for name in ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "source" / name).unlink()
    shutil.rmtree(tmp_path / "source" / "additional_chat_templates")
    run_processes(own_loop, 2, tmp_path)
    assert_form(tmp_path / "folder saved", tmp_path / "source")
    assert_form(tmp_path / "live saved", tmp_path / "live before 0")
    before, after = (tensors_in(tmp_path / name) for name in ("source", "live saved"))
    frozen = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(before[frozen], after[frozen])
    for kind in ("folder", "live"):
        assert_rounded(tmp_path / f"{kind} saved", tmp_path / f"{kind} exact")
        exported = export_checkpoint(tmp_path / f"{kind} checkpoints", tmp_path / f"{kind} exported")
        assert_rounded(exported, tmp_path / f"{kind} saved", None)
        assert files_in(exported) == files_in(tmp_path / f"{kind} saved")


def written_by_a_process_without_parameters(folder: Path) -> None:
    """The first device has a stage between the others, without layers."""
    order = Order.from_csv("1F0,1B0\n0F0,0B0\n2F0,2B0")
    layers = SMALL["num_hidden_layers"]
    options = {"schedule": order, "vocabulary": "first-last", "layers_per_stage": [2, 0, layers - 2]}
    for kind, model in (("fresh", LlamaConfig(**SMALL)), ("folder", folder / "source")):
        pipeline = Pipeline(model, microbatches=1, parameter_dtype=torch.float64, self_check=False, **options)
        assert bool(pipeline.parameter_shards()) == (pipeline.device > 0)
        pipeline.save_pretrained(folder / kind)
        pipeline.close()


def test_a_first_process_without_parameters_writes_the_model(tmp_path: Path) -> None:
    bf16_llama(tmp_path / "source")
    run_processes(written_by_a_process_without_parameters, 3, tmp_path)
    dtypes = {kind: {one.dtype for one in tensors_in(tmp_path / kind).values()} for kind in ("fresh", "folder")}
    assert dtypes == {"fresh": {torch.float64}, "folder": {torch.bfloat16}}
    said = {
        kind: json.loads((tmp_path / kind / "config.json").read_text()).get("dtype") for kind in (*dtypes, "source")
    }
    assert said["fresh"] == "float64" and said["folder"] == said["source"]


def save_and_export_with_a_limit_on_files(folder: Path) -> str:
    """Only a real limit shows which exception the writer of tensors raises."""
    pipeline = Pipeline(LlamaConfig(**SMALL), microbatches=1, self_check=False)
    pipeline.save_checkpoint(folder, 1, None)
    pipeline.close()
    export_checkpoint(folder, folder / "model")
    earlier = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(RunError) as caught:
        export_checkpoint(folder, folder / "model")
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["model", "step-00000001"]
    assert {path.name: path.read_bytes() for path in (folder / "model").iterdir()} == earlier
    return str(caught.value)


def test_a_disk_that_does_not_hold_it_leaves_the_earlier_export(tmp_path: Path) -> None:
    error = run_processes(save_and_export_with_a_limit_on_files, 1, tmp_path)[0]
    assert error.startswith(f"the model was not written to '{tmp_path}/model': ")
    assert "File too large" in error
