"""Rows of several documents that are kept apart: which labels count, who keeps them apart, and what is refused.

Their gradients are compared with each document alone by tests/fuzz; families whose own attention looks at other
documents of a row, which the fuzz has not, are compared here.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_stand_ins
import pytest
import reference
import torch
import torch.distributed as dist
from families import whole_model
from harness import check_cases, run_processes
from small_families import WHOLE
from small_runs import FAMILIES, TOKENS, Case, described, opened
from torch import Tensor
from torch.nn import functional
from training_runs import WORDS, curve, logged, prepared, start, train
from transformers import AutoModelForCausalLM

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model.comparison import gradient_errors
from evenpipe.model.fp64 import InFp64
from evenpipe.train.config import Config
from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data, prepare
from evenpipe.train.tokenizer import train_tokenizer

LENGTHS = ((16,), (5, 11), (1, 3, 12), (7, 1, 1, 7))
"""Of the documents of each row."""
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
OURS = ("opt", "biogpt", "afmoe", "gpt-oss")
"""Families whose own attention looks at other documents of a row."""
CASES = [
    replace(case, family=family)
    for family in (*OURS, "llama")
    for case in (
        Case("", devices=2, schedule="zbv", checkpointing="full"),
        Case("", devices=2, schedule="interleaved", mode="first-last"),
        Case("", context_ranks=2),
        Case("", context_ranks=2, exchange="heads", slices=2),
        Case("", devices=2, schedule="zb-h1", slices=3),
    )
]


def loss_of_each_alone(model, ids: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels of all documents, none of which knows another."""
    losses, valid = [], 0
    for row, lengths in enumerate(LENGTHS):
        for tokens, targets in zip(ids[row].split(lengths), labels[row].split(lengths), strict=True):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            losses.append(functional.cross_entropy(logits, targets[1:], ignore_index=-100, reduction="sum"))
            valid += int((targets[1:] != -100).sum())
    return torch.stack(losses).sum() / valid


def run_cases(cases: list[Case]) -> list[str]:
    faults = []
    ((ids, labels),) = reference.batches(61, len(LENGTHS), TOKENS, 1)
    for case in cases:
        with InFp64(), contextlib.closing(opened(case, documents="separate")) as pipeline:
            in_pieces = case.context_ranks * case.slices > 1
            apart_by = "evenpipe's attention" if case.family in OURS or in_pieces else "the model's attention"
            assert pipeline.keeps_documents_apart == apart_by, case
            loss = pipeline.step(ids, labels, position_ids=POSITIONS).loss
            gradients = pipeline.full_gradients()
            if dist.get_rank():
                continue
            model = copy.deepcopy(described(case.family).model).train()
            expected = loss_of_each_alone(model, ids, labels)
            expected.backward()
        wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        assert gradients.keys() == wanted.keys()
        errors = gradient_errors(gradients, wanted)  # that of a bias of keys is zero but for rounding
        errors["the loss"] = abs(loss / expected.item() - 1)
        faults += [f"{case}: {name} is off by {error:.1e}" for name, error in errors.items() if not error <= 1e-10]
    return faults


def test_gradients_are_those_of_documents_alone(sample) -> None:
    check_cases(run_cases, sample(CASES, 5))


def run_on_kernels_of_gpus(cases: list[Case]) -> list[str]:
    with kernel_stand_ins.on_cpu() as calls:
        faults = run_cases(cases)
    return faults if any(sequences > 1 for sequences in calls) else [*faults, "no documents in one call"]


def test_kernels_of_gpus_give_the_gradients_of_documents_alone(sample) -> None:
    """Also of windows (afmoe)."""
    cases = [case for case in CASES if case.family in {"llama", "afmoe"} and case.context_ranks * case.slices > 1]
    check_cases(run_on_kernels_of_gpus, sample(cases, 3))


def other_labels_and_refusals() -> None:
    model = described("llama")
    ids, _ = reference.batches(61, 4, TOKENS, 1)[0]
    options = {"microbatches": 2, "parameter_dtype": torch.float64, "self_check": False}
    pipeline = Pipeline(model, documents="separate", **options)
    first = pipeline.step(ids, position_ids=POSITIONS)
    assert first.tokens == 4 * TOKENS - sum(map(len, LENGTHS))  # one less for each document: its first token
    assert pipeline.step(ids).tokens == 4 * (TOKENS - 1)  # rows of one document
    labels = ids.clone()
    again = pipeline.step(ids, labels, position_ids=POSITIONS)
    assert (again.tokens, again.loss) == (first.tokens, first.loss)
    assert torch.equal(labels, ids)
    with pytest.raises(InputError, match=r"^attention_mask: given; expected None with separate documents: padding is"):
        pipeline.step(ids, attention_mask=torch.ones_like(ids), position_ids=POSITIONS)
    pipeline.close()
    joined = Pipeline(model, **options)
    assert joined.keeps_documents_apart is None
    assert joined.step(ids, position_ids=POSITIONS).tokens == 4 * (TOKENS - 1)
    joined.close()
    with pytest.raises(InputError, match=r'^documents is "apart"; it must be one of joined, separate'):
        Pipeline(model, documents="apart")
    embedding, head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)
    with pytest.raises(InputError, match=r'^documents: plain modules do not say .*; expected "joined" with them'):
        Pipeline.from_modules(embedding, [torch.nn.Linear(4, 4)], None, head, documents="separate")


def a_model_that_cannot() -> None:
    says = '^BloomForCausalLM cannot be trained with documents = "separate", only with "joined"'
    with pytest.raises(InputError, match=says):
        Pipeline(WHOLE["bloom"](), documents="separate", self_check=False)


def test_first_tokens_are_not_predicted_and_what_cannot_be_kept_apart_is_refused() -> None:
    run_processes(other_labels_and_refusals, 1)
    run_processes(a_model_that_cannot, 2)


# --- runs on JSON lines -----------------------------------------------------------------------------------------------

STEPS, ROW = 4, 32
APART_BY = {"llama": "the model's attention", "gpt-oss": "evenpipe's attention"}


def documents(folder: Path, family: str) -> Path:
    """Write a model, a tokenizer, texts as JSON lines, and the configuration that trains on them."""
    draw = random.Random(5)
    texts = [" ".join(draw.choices((*WORDS, "ü"), k=draw.choice((1, 1, 2, 12)))) for _ in range(300)]
    config = (FAMILIES | WHOLE)[family](vocab_size=300)
    whole_model(config, torch.float32).save_pretrained(folder / "source")
    train_tokenizer(texts, 300, "<|end|>").save_pretrained(folder / "source")
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes: dict[str, Any] = {
        "model.architecture": None,
        "model.config": None,
        "model.source": str(folder / "source"),
        "data.files": [str(lines)],
        "data.validation_fraction": 0.1,
        "tokenizer.vocabulary_size": None,
        "pipeline.microbatches": 2,
        "pipeline.microbatch_size": 2,
        "optimizer.warmup_steps": 1,
        "training.steps": STEPS,
        "training.evaluate_every_steps": 2,
        "checkpoint.every_steps": 1,
    }
    return prepared(folder, changes)


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
    path = documents(tmp_path, family)
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
        assert first["tokens"] == 4 * ROW
        (*_, validation) = [line for line in others if "validation_loss" in line]
        rows = open_batches(config, open_data(config)).validation_rows
        assert (validation["validation_tokens"] == len(rows) * (ROW - 1)) == bool(overrides)
    prepare(load_config(path, [joined]), say=lambda text: None)
    said = train(path, joined, f"training.steps={STEPS + 1}")
    assert "data.documents is now joined, was separate: losses do not compare with earlier ones\n" in said


def test_a_run_with_a_model_that_cannot_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    path = documents(tmp_path, "bloom")
    failure = start(path).exception
    assert isinstance(failure, InputError)
    words = 'BloomForCausalLM cannot be trained with documents = "separate", only with "joined" (data.documents'
    assert words in str(failure)
    joined = "data.documents=joined"
    prepare(load_config(path, [joined]), say=lambda text: None)
    train(path, joined)
