"""Fine-tuning on JSON lines: documents that share a row are trained as if each were alone, unless they are joined."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import run_processes
from small_families import USUAL
from test_training import StoppedError, curve, logged, train_config_until
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, GptOssConfig, LlamaConfig

from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.data import open_batches, open_data, prepare
from evenpipe.train.tokenizer import train_tokenizer

STEPS, TOKENS = 4, 32
WORDS = ("a pipeline", "one device", "the batch", "waits for", "holds", "sends", "every stage", "its rows", "ü")
MODELS = {
    "llama": lambda: LlamaConfig(**{**USUAL, "vocab_size": 300}),
    "gpt-oss": lambda: GptOssConfig(
        **{**USUAL, "vocab_size": 300},
        head_dim=4,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "bloom": lambda: BloomConfig(vocab_size=300, hidden_size=16, n_head=2, n_layer=2),
}
APART_BY = {"llama": "the model's attention", "gpt-oss": "evenpipe's attention"}


def texts() -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(WORDS, k=draw.choice((1, 1, 2, 12)))) for _ in range(300)]


def tables(folder: Path, family: str, **data: object) -> dict:
    """A configuration with everything that it names."""
    source, lines = folder / family, folder / "texts.jsonl"
    if not source.exists():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(MODELS[family](), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(source)
        train_tokenizer(texts(), 300, "<|end|>").save_pretrained(source)
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return {
        "model": {"source": str(source)},
        "data": {"files": [str(lines)], "sequence_length": TOKENS, "validation_fraction": 0.1, **data},
        "pipeline": {"processes": 2, "microbatches": 2, "microbatch_size": 2},
        "optimizer": {"warmup_steps": 1, "learning_rate": 1e-2},
        "training": {"steps": STEPS, "evaluate_every_steps": 2},
        "checkpoint": {"every_steps": 1},
        "output": {"folder": str(folder / "run"), "tensorboard": False, "export": False},
    }


def prepared(folder: Path, family: str, **data: object) -> Config:
    folder.mkdir(exist_ok=True)
    config = config_from_dict(tables(folder, family, **data))
    prepare(config, say=lambda text: None)
    return config


def train(config: Config, until: int | None) -> None:
    train_config_until(config, until)


def first_loss(config: Config) -> float:
    """Of the first step, in transformers: of all documents alone, or of whole rows."""
    ids, _, positions = open_batches(config, open_data(config)).batch(0)
    model = AutoModelForCausalLM.from_pretrained(config.model.source, dtype=torch.float32)
    parts = list(ids)
    if positions is not None:
        starts = [torch.nonzero(row == 0).flatten().tolist() for row in positions]
        assert sum(map(len, starts)) > len(ids), "some rows have several documents"
        parts = [part for row, begins in zip(ids, starts, strict=True) for part in row.tensor_split(begins[1:])]
    with torch.no_grad():
        logits = [model(input_ids=part[None], use_cache=False).logits[0, :-1] for part in parts]
    labels = torch.cat([part[1:] for part in parts])
    return functional.cross_entropy(torch.cat(logits).double(), labels).item()


@pytest.mark.parametrize("family", APART_BY)
@pytest.mark.parametrize("documents", [None, "joined"])
def test_a_run_on_json_lines_has_the_loss_of_documents_and_resumes(
    tmp_path: Path, family: str, documents: str | None
) -> None:
    given = {} if documents is None else {"documents": documents}
    whole, parts = (prepared(tmp_path / name, family, **given) for name in "ab")
    assert whole.documents == (documents or "separate")
    run_processes(train, 2, whole, None)
    with pytest.raises(StoppedError):
        run_processes(train, 2, parts, 3)
    run_processes(train, 2, parts, None)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    first, *others = logged(tmp_path / "a")
    assert first["loss"] == pytest.approx(first_loss(whole), rel=1e-5)
    assert first["tokens"] == 4 * TOKENS
    (*_, validation) = [line for line in others if "validation_loss" in line]
    rows = open_batches(whole, open_data(whole)).validation_rows
    assert (validation["validation_tokens"] == len(rows) * (TOKENS - 1)) == (documents == "joined")


def evenpipe_train(folder: Path, family: str, *changes: str) -> tuple[int, str]:
    """The command on a configuration file; its exit status and what it says."""
    path = folder / "config.toml"
    lines = []
    for name, table in tables(folder, family).items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""]
    path.write_text("\n".join(lines))
    command = [sys.executable, "-m", "evenpipe", "train", str(path), *changes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("family", APART_BY)
def test_a_run_says_what_it_does_with_documents(tmp_path: Path, family: str) -> None:
    status, said = evenpipe_train(tmp_path, family)
    assert f"documents that share a row are separate, kept apart by {APART_BY[family]}\n" in said
    assert status == 0
    status, said = evenpipe_train(tmp_path, family, "data.documents=joined", f"training.steps={STEPS + 1}")
    assert "documents that share a row are joined, one stream of text\n" in said
    assert "data.documents is now joined, was separate: losses do not compare with earlier ones\n" in said
    assert status == 0


def test_a_model_that_cannot_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    status, said = evenpipe_train(tmp_path, "bloom")
    assert 'BloomForCausalLM cannot be trained with documents = "separate", only with "joined" (data.documents' in said
    assert status != 0
    assert evenpipe_train(tmp_path, "bloom", "data.documents=joined")[0] == 0
