"""A trained model is written in the form of what it was made from: files to the byte, tensors in their dtypes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_processes
from safetensors.torch import load_file, save_file
from small_families import USUAL
from test_training import train_config_until
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
)

from evenpipe.cli.main import main
from evenpipe.errors import InputError, RunError
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.data import prepare
from evenpipe.train.export import export_checkpoint
from evenpipe.train.tokenizer import train_tokenizer

TEXT = "a stage sends hidden states, and waits for gradients\n" * 300
IDS = torch.arange(48).reshape(4, 12) * 7 % 290
SMALL = {**USUAL, "vocab_size": 300}
Tensors = dict[str, torch.Tensor]


def random_weights(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


def with_tokenizer(folder: Path, **settings: Any) -> None:
    """A tokenizer with settings that only its own file knows, and templates."""
    train_tokenizer([TEXT], 300, "<|end|>").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"model_max_length": 131072, "unheard_of": [1, {"a": None}]} | settings
    path.write_text(json.dumps(values, indent=3))
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
    random_weights(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16)).save_pretrained(folder)
    edit(folder / "config.json", without=("dtype",), torch_dtype="bfloat16", of_a_lab={"tokens": 15e12})
    edit(folder / "generation_config.json", do_sample=False, temperature=0.6, eos_token_id=[2, 7])
    with_tokenizer(folder)
    (folder / "README.md").write_text("# A card of another model")
    (folder / "LICENSE").write_text("A licence")


def tied_in_shards(folder: Path) -> None:
    """No generation config, and no dtype in the config."""
    config = LlamaConfig(**SMALL | {"tie_word_embeddings": True})
    model = random_weights(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    model.save_pretrained(folder, max_shard_size="5KB")
    assert (folder / "model.safetensors.index.json").exists()
    edit(folder / "config.json", without=("dtype", "transformers_version"))
    (folder / "generation_config.json").unlink()
    with_tokenizer(folder, tokenizer_class="PreTrainedTokenizerFast")


def experts_beside_fp32_routers(folder: Path) -> None:
    config = MixtralConfig(**SMALL, num_local_experts=4)
    random_weights(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "gate.weight" in name:
            tensors[name] = tensors[name].float() + 1e-4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with_tokenizer(folder)


def fp16_gpt2(folder: Path) -> None:
    """Vocabulary and merges in the files of the older kind."""
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=4, n_head=2, n_positions=64)
    random_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float16)).save_pretrained(folder)
    tokenizer = train_tokenizer([TEXT], 300, "<|endoftext|>")
    tokenizer.backend_tokenizer.model.save(str(folder))  # without the token for the end
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')


def with_pictures(folder: Path) -> None:
    """A model that also sees, trained on text."""
    text = {**SMALL, "head_dim": 4, "layer_types": ["full_attention"] * 4, "model_type": "gemma3_text"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    random_weights(Gemma3ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}\n\n")
    with_tokenizer(folder)


SOURCES: dict[str, Callable[[Path], None]] = {
    "bf16 llama": bf16_llama,
    "tied, in shards": tied_in_shards,
    "experts": experts_beside_fp32_routers,
    "fp16 gpt2": fp16_gpt2,
    "pictures": with_pictures,
}


def run_of(folder: Path, source: str | None, **sections: dict[str, Any]) -> Config:
    (folder / "text.txt").write_text(TEXT)
    tables: dict[str, dict[str, Any]] = {
        "model": {"source": source, "self_check": False},
        "data": {"files": [str(folder / "text.txt")], "sequence_length": 16},
        "pipeline": {"processes": 2, "microbatches": 2},
        "optimizer": {"warmup_steps": 1, "learning_rate": 1e-2},
        "training": {"steps": 2},
        "checkpoint": {"every_steps": 1},
        "output": {"folder": str(folder / "run"), "tensorboard": False},
    }
    return config_from_dict({name: tables.get(name, {}) | sections.get(name, {}) for name in {**tables, **sections}})


def train(*configs: Config) -> None:
    for config in configs:
        train_config_until(config, None)


def trained(*configs: Config) -> None:
    for config in configs:
        prepare(config, say=lambda text: None)
    run_processes(train, 2, *configs)


def tensors_in(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def files_in(folder: Path) -> dict[str, bytes]:
    """All but weights and cards."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    left_out = ("README.md", "LICENSE", "model.safetensors.index.json")
    return {
        name: path.read_bytes()
        for name, path in paths.items()
        if name not in left_out and not name.endswith(".safetensors")
    }


def assert_form(folder: Path, source: Path) -> None:
    """Of another folder: equal files, and tensors of equal names, shapes and dtypes, some of them with other values."""
    assert files_in(folder) == files_in(source)
    written, given = tensors_in(folder), tensors_in(source)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in written.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in given.items()
    }
    assert not all(torch.equal(written[name], given[name]) for name in given)


def assert_rounded(folder: Path, exact: Path) -> None:
    """Tensors are those of another folder in other dtypes."""
    written, wanted = tensors_in(folder), tensors_in(exact)
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(written[name], tensor.to(written[name].dtype)), name


def test_a_trained_folder_is_as_its_source_but_for_its_weights(tmp_path: Path) -> None:
    configs = []
    for name, make in SOURCES.items():
        folder = tmp_path / name
        folder.mkdir()
        make(folder / "source")
        configs.append(run_of(folder, str(folder / "source")))
    trained(*configs)
    for name in SOURCES:
        folder, source = tmp_path / name, tmp_path / name / "source"
        exported = export_checkpoint(folder / "run", folder / "exported")
        assert_form(exported, source)
        given, written = (
            sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (source, exported)
        )
        assert abs(written - given) < 0.05 * given + 8192, "headers differ in length"
        assert main(["export", str(folder / "run"), "-o", str(folder / "exact"), "--dtype", "float32"]) == 0
        assert_rounded(exported, folder / "exact")
        changed = {key: files_in(folder / "exact")[key] != content for key, content in files_in(source).items()}
        assert [key for key in changed if changed[key]] == ["config.json"]
        config = json.loads((folder / "exact" / "config.json").read_text())
        before = json.loads((source / "config.json").read_text())
        inner = {key: value | {"dtype": "float32"} for key, value in before.items() if key.endswith("_config")}
        assert config == before | inner | {"torch_dtype" if name == "bf16 llama" else "dtype": "float32"}

        loaded = [AutoModelForCausalLM.from_pretrained(each) for each in (source, exported)]
        assert loaded[0].dtype == loaded[1].dtype != torch.float32
        tokenizers = [AutoTokenizer.from_pretrained(each) for each in (source, exported)]
        assert tokenizers[0](TEXT[:60])["input_ids"] == tokenizers[1](TEXT[:60])["input_ids"] != []
        assert tokenizers[0].model_max_length == tokenizers[1].model_max_length

    folder = tmp_path / "experts"
    shutil.rmtree(folder / "source")
    shutil.move(folder / "run", tmp_path / "moved")
    again = export_checkpoint(tmp_path / "moved", folder / "again")
    assert files_in(again) == files_in(folder / "exported"), "the run holds what it needs"
    tensors = tensors_in(folder / "exported")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in tensors_in(again).items())
    with pytest.raises(InputError, match=r"dtype is 'int8', but must be one of source, float64, float32"):
        export_checkpoint(tmp_path / "moved", folder / "never", dtype="int8")


CODE = {
    "configuration_mine.py": "from transformers import LlamaConfig\n\n\nclass MineConfig(LlamaConfig):\n"
    '    model_type = "mine"\n',
    "beside_mine.py": "NAME = 1  # \u00fc\r\n",
    "modeling_mine.py": "from transformers import LlamaForCausalLM\n\nfrom .beside_mine import NAME\n"
    "from .configuration_mine import MineConfig\n\n\nclass MineForCausalLM(LlamaForCausalLM):\n"
    "    config_class = MineConfig\n",
}


def with_code(folder: Path) -> None:
    random_weights(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16)).save_pretrained(folder)
    places = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    edit(folder / "config.json", model_type="mine", architectures=["MineForCausalLM"], auto_map=places)
    for name, text in CODE.items():
        (folder / name).write_bytes(text.encode())
    with_tokenizer(folder)


def of_several_models(folder: Path) -> None:
    """A config with a model of text in it, which transformers builds alone."""
    text = Qwen3_5TextConfig(**SMALL, head_dim=4, layer_types=["full_attention"] * 4)
    random_weights(AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16)).save_pretrained(folder)
    Qwen3_5Config(text_config=text.to_dict(), dtype="bfloat16").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    with_tokenizer(folder)


def test_code_configs_of_several_models_and_other_tokenizers(tmp_path: Path) -> None:
    """Models that are not written as a copy of their source, or not only."""
    makers = {"code": with_code, "several": of_several_models, "plain": bf16_llama, "gpt2": fp16_gpt2}
    for name, make in makers.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "source")
    code = run_of(tmp_path / "code", f"{tmp_path}/code/source", model={"trust_remote_code": True})
    several = run_of(tmp_path / "several", f"{tmp_path}/several/source")
    tokenizer = {"source": f"{tmp_path}/gpt2/source", "end_of_text": "\u0100"}
    plain = run_of(tmp_path / "plain", f"{tmp_path}/plain/source", tokenizer=tokenizer)
    shape = {"source": f"{tmp_path}/plain/source", "fresh_weights": True, "self_check": False}
    (tmp_path / "fresh").mkdir()
    fresh = run_of(tmp_path / "fresh", None, model=shape, tokenizer={"vocabulary_size": 280})
    trained(code, several, plain, fresh)

    with pytest.raises(InputError, match=r"model_type 'mine' is not one of .* model\.trust_remote_code = true"):
        export_checkpoint(code.run_folder, tmp_path / "code" / "never")
    out = export_checkpoint(code.run_folder, tmp_path / "code" / "exported", trust_remote_code=True)
    assert_form(out, tmp_path / "code" / "source")
    assert type(AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)).__name__ == "MineForCausalLM"
    assert export_checkpoint(code.run_folder, out, trust_remote_code=True), "an export that an export may replace"

    out = export_checkpoint(several.run_folder, tmp_path / "several" / "exported")
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert config["dtype"] == "bfloat16" and {tensor.dtype for tensor in tensors_in(out).values()} == {torch.bfloat16}
    source, exported = files_in(tmp_path / "several" / "source"), files_in(out)
    assert source.keys() - exported.keys() == {"preprocessor_config.json"}
    assert {name for name in exported if exported[name] != source[name]} == {"config.json"}
    AutoModelForCausalLM.from_pretrained(out)

    out = export_checkpoint(plain.run_folder, tmp_path / "plain" / "exported")
    assert files_in(out)["config.json"] == files_in(tmp_path / "plain" / "source")["config.json"]
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings == {"model_max_length": 1024, "tokenizer_class": "GPT2Tokenizer", "eos_token": "\u0100"}
    assert (out / "merges.txt").read_bytes() == (tmp_path / "gpt2" / "source" / "merges.txt").read_bytes()
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (tmp_path / "gpt2" / "source", out)]
    assert tokenizers[1].eos_token == "\u0100"
    assert tokenizers[0](TEXT[:60])["input_ids"] == tokenizers[1](TEXT[:60])["input_ids"]

    out = export_checkpoint(fresh.run_folder, tmp_path / "fresh" / "exported")
    assert {tensor.dtype for tensor in tensors_in(out).values()} == {torch.float32}
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & settings.keys()
    assert settings["model_max_length"] == AutoTokenizer.from_pretrained(out).model_max_length > 1e29
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "as transformers")
    assert files_in(tmp_path / "as transformers").items() <= files_in(out).items()
    assert "null" not in (out / "generation_config.json").read_text()


def own_loop(folder: Path) -> None:
    """Of a folder, and of a live model: the loss, one step, and what is written then."""
    source = folder / "source"
    live = AutoModelForCausalLM.from_pretrained(source)
    live.config.of_the_user = 3
    live.generation_config.do_sample, live.generation_config.top_k = True, 7
    live.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    live.save_pretrained(folder / f"live before {torch.distributed.get_rank()}")
    for kind, model in (("folder", str(source)), ("live", live)):
        options = {"microbatches": 2, "compute_dtype": torch.float32, "self_check": False}
        pipeline = Pipeline(model, vocabulary="first-last" if kind == "live" else "vocab-2", **options)
        optimizer = torch.optim.AdamW([one for one in pipeline.parameters() if one.requires_grad], lr=1e-2)
        pipeline.step(IDS)
        optimizer.step()
        pipeline.save_pretrained(folder / f"{kind} saved")
        pipeline.save_pretrained(folder / f"{kind} exact", dtype=torch.float32)
        pipeline.save_checkpoint(folder / f"{kind} checkpoints", 1, optimizer)
        with pytest.raises(InputError, match=r"dtype = torch\.int8, but must be one of torch\.float64"):
            pipeline.save_pretrained(folder / "never", dtype=torch.int8)
        if kind == "live":
            for parameter in pipeline.parameters():
                parameter.data.fill_(1e6)
            with pytest.raises(RunError, match="has values that float16 cannot hold"):
                pipeline.save_pretrained(folder / "never", dtype=torch.float16)
        loss = pipeline.evaluate(IDS).loss if kind == "folder" else None
        pipeline.close()
        if torch.distributed.get_rank() == 0 and loss is not None:
            written = AutoModelForCausalLM.from_pretrained(folder / f"{kind} exact", dtype=torch.float32)
            with torch.no_grad():
                assert written(input_ids=IDS, labels=IDS).loss.item() == pytest.approx(loss, rel=1e-5)


def test_own_loops_write_the_form_of_their_model(tmp_path: Path) -> None:
    bf16_llama(tmp_path / "source")
    for name in ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "source" / name).unlink()
    shutil.rmtree(tmp_path / "source" / "additional_chat_templates")
    run_processes(own_loop, 2, tmp_path)
    assert_form(tmp_path / "folder saved", tmp_path / "source")
    assert_form(tmp_path / "live saved", tmp_path / "live before 0")
    given, written = (tensors_in(tmp_path / name) for name in ("source", "live saved"))
    frozen = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(given[frozen], written[frozen])
    for kind in ("folder", "live"):
        assert_rounded(tmp_path / f"{kind} saved", tmp_path / f"{kind} exact")
        exported = export_checkpoint(tmp_path / f"{kind} checkpoints", tmp_path / f"{kind} exported")
        tensors = tensors_in(tmp_path / f"{kind} saved")
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in tensors_in(exported).items())
        assert files_in(exported) == files_in(tmp_path / f"{kind} saved")
