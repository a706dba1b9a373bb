"""A plan that is written with data runs as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from training_runs import train
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from evenpipe.cli.main import main
from evenpipe.costs.hardware import KNOWN, hardware_from_dict, write_hardware
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare
from evenpipe.train.export import export_checkpoint
from evenpipe.train.tokenizer import train_tokenizer

TEXT = "The committee met on a rainy day, and said little about what it had found in the old harbour.\n"
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 256, "num_key_value_heads": 4}
CASES: dict[str, tuple[Callable[[], PreTrainedConfig], int, list[str]]] = {
    # model, processes, options of the plan
    "a tokenizer is trained": (
        lambda: LlamaConfig(**SHAPE, vocab_size=1000),
        2,
        ["--data", "texts", "--batch", "8"],
    ),
    "a tokenizer is given": (
        lambda: Qwen3Config(**SHAPE, vocab_size=512, head_dim=16, tie_word_embeddings=True),
        4,
        ["--data", "lines.jsonl", "--tokenizer", "tokenizer", "--batch", "16", "--pp", "2", "--zero", "3"],
    ),
    "the batch follows from the data": (
        lambda: LlamaConfig(**SHAPE, vocab_size=300),
        3,
        ["--data", "texts", "--pp", "3"],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_it_trains_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, processes, options = CASES[name]
    monkeypatch.chdir(tmp_path)
    make().save_pretrained("model")
    host = KNOWN["A100-80G"].to_dict() | {"name": "host", "torch_device": "cpu", "devices_per_node": 4}
    write_hardware(hardware_from_dict(host), "host.toml")
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(TEXT * 200)
    Path("lines.jsonl").write_text("\n".join(json.dumps({"body": TEXT * 20}) for _ in range(40)))
    train_tokenizer([TEXT], 300, "<|endoftext|>").save_pretrained("tokenizer")
    plan = ["plan", "--model", "model", "--gpus", str(processes), "--hardware", "host.toml", "--sequence", "64"]
    assert main([*plan, *options, "--schedule", "1f1b", "--workers", "1", "--no-cache", "-o", "run.toml"]) == 0
    config = load_config("run.toml", ["training.steps=2"])
    assert config.pipeline.processes == processes
    prepare(config, say=lambda text: None)
    train(tmp_path / "run.toml", "training.steps=2")
    assert json.loads((config.run_folder / "report.json").read_text())["steps"] == 2
    exported = json.loads((export_checkpoint(config.run_folder, "exported") / "config.json").read_text())
    assert exported["vocab_size"] == make().vocab_size, "as planned"
