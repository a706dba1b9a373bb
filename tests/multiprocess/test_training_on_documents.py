"""Fine-tuning on JSON lines: documents that share a row are trained as if each were alone, unless they are joined."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from small_families import USUAL
from torch.nn import functional
from training_runs import WORDS, curve, logged, start, train, write_tables
from transformers import AutoModelForCausalLM, BloomConfig, GptOssConfig, LlamaConfig

from evenpipe.errors import InputError
from evenpipe.train.config import Config
from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data, prepare
from evenpipe.train.tokenizer import train_tokenizer

STEPS, TOKENS = 4, 32
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


def prepared(folder: Path, family: str) -> Path:
    """Write a model, a tokenizer, texts as JSON lines, and the configuration that trains on them."""
    draw = random.Random(5)
    texts = [" ".join(draw.choices((*WORDS, "ü"), k=draw.choice((1, 1, 2, 12)))) for _ in range(300)]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(MODELS[family](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "source")
    train_tokenizer(texts, 300, "<|end|>").save_pretrained(folder / "source")
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = folder / "config.toml"
    tables = {
        "model": {"source": str(folder / "source")},
        "data": {"files": [str(lines)], "sequence_length": TOKENS, "validation_fraction": 0.1},
        "pipeline": {"processes": 2, "microbatches": 2, "microbatch_size": 2},
        "optimizer": {"warmup_steps": 1, "learning_rate": 1e-2},
        "training": {"steps": STEPS, "evaluate_every_steps": 2},
        "checkpoint": {"every_steps": 1},
        "output": {"folder": str(folder / "run"), "tensorboard": False, "export": False},
    }
    write_tables(path, tables)
    prepare(load_config(path), say=lambda text: None)
    return path


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
@pytest.mark.slow
def test_a_run_on_json_lines_has_the_loss_of_documents_and_says_what_it_does_with_them(
    tmp_path: Path, family: str
) -> None:
    """Apart first, without and with an interruption; then a new run begins with joined documents, and the finished one
    goes on with them."""
    path = prepared(tmp_path, family)
    joined, elsewhere = "data.documents=joined", f"output.folder={tmp_path / 'joined' / 'run'}"
    assert load_config(path).documents == "separate"
    said = train(path)
    assert f"documents that share a row are separate, kept apart by {APART_BY[family]}\n" in said
    parts = f"output.folder={tmp_path / 'parts' / 'run'}"
    prepare(load_config(path, [parts]), say=lambda text: None)
    train(path, parts, until=3)
    train(path, parts)
    assert curve(tmp_path / "parts") == curve(tmp_path)
    prepare(load_config(path, [joined, elsewhere]), say=lambda text: None)
    said = train(path, joined, elsewhere)
    assert "documents that share a row are joined, one stream of text\n" in said
    for folder, overrides in ((tmp_path, ()), (tmp_path / "joined", (joined, elsewhere))):
        config = load_config(path, overrides)
        first, *others = logged(folder)
        assert first["loss"] == pytest.approx(first_loss(config), rel=1e-5)
        assert first["tokens"] == 4 * TOKENS
        (*_, validation) = [line for line in others if "validation_loss" in line]
        rows = open_batches(config, open_data(config)).validation_rows
        assert (validation["validation_tokens"] == len(rows) * (TOKENS - 1)) == bool(overrides)
    prepare(load_config(path, [joined]), say=lambda text: None)
    said = train(path, joined, f"training.steps={STEPS + 1}")
    assert "data.documents is now joined, was separate: losses do not compare with earlier ones\n" in said


def test_a_model_that_cannot_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    path = prepared(tmp_path, "bloom")
    failure = start(path).exception
    assert isinstance(failure, InputError)
    words = 'BloomForCausalLM cannot be trained with documents = "separate", only with "joined" (data.documents'
    assert words in str(failure)
    joined = "data.documents=joined"
    prepare(load_config(path, [joined]), say=lambda text: None)
    train(path, joined)
