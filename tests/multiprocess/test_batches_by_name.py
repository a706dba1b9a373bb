"""A step and an evaluation take a batch as loaders and collators of transformers make it: tensors by name."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_processes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from evenpipe import InputError, Pipeline

IDS = torch.arange(12).view(2, 6)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
ROWS = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6, 7, 8]}]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(16)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w15", padding_side="right")


def collated(kind: Any, **options: Any) -> Any:
    rows = [{**row, "labels": row["input_ids"]} for row in ROWS] if kind is DataCollatorForTokenClassification else ROWS
    return kind(tokenizer(), **options)(rows)


BATCHES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"input_ids": IDS, "labels": IDS.flip(0)},
    "ids alone": lambda: UserDict(input_ids=IDS),
    "none values": lambda: {"labels": None, "input_ids": IDS, "attention_mask": None},
    "BatchEncoding": lambda: BatchEncoding({"input_ids": IDS, "attention_mask": (IDS % 6 < 4).long(), "labels": IDS}),
    "tokenizer": lambda: tokenizer()(["w1 w2 w3", "w4 w5 w6"], return_tensors="pt", return_token_type_ids=False),
    "language modelling": lambda: collated(DataCollatorForLanguageModeling, mlm=False),
    "padded labels": lambda: collated(DataCollatorForTokenClassification),
}


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    # the batch, further arguments, the sentence on the first process
    "another name": (
        {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)},
        {},
        "batch: it has 'token_type_ids', which a step does not take, expected only input_ids, labels, position_ids,"
        " attention_mask and token_weights",
    ),
    "a typing error": ({"input_ids": IDS, "label": IDS}, {}, "batch: it has 'label', which a step does not take"),
    "a number as name": ({0: IDS}, {}, "batch: it has 0, which a step does not take"),
    "given twice": (
        {"input_ids": IDS, "labels": IDS},
        {"labels": IDS},
        "labels: given in the batch and as an argument too, expected one of both",
    ),
    "positions given twice": (
        {"input_ids": IDS, "position_ids": POSITIONS},
        {"position_ids": POSITIONS},
        "position_ids: given in the batch and as an argument too, expected one of both",
    ),
    "no ids": ({"labels": IDS}, {}, "batch: it has labels, expected at least input_ids"),
    "nothing": ({}, {}, "batch: it has nothing, expected at least input_ids"),
    "lists": (
        {"input_ids": IDS.tolist()},
        {},
        "input_ids: list, expected a torch.Tensor or a mapping of tensors by name",
    ),
    "other labels": ({"input_ids": IDS, "labels": IDS[:1]}, {}, "labels: [1, 6] torch.int64, expected [2, 6]"),
}


Losses = tuple[float, float, float]
"""Of a step, of an evaluation, and of transformers."""


def losses(pipeline: Pipeline, whole: Any, batch: Any) -> Losses:
    passed = batch if pipeline.feeds else {"ignored": "on other processes"}
    step, evaluation = pipeline.step(passed), pipeline.evaluate(passed)
    tensors = {key: value for key, value in batch.items() if value is not None}
    mask = tensors.get("attention_mask", torch.ones_like(batch["input_ids"]))
    labels = tensors.pop("labels", batch["input_ids"].masked_fill(mask == 0, -100))
    with torch.no_grad():
        logits = whole(**tensors).logits  # its own loss is fp32
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return step.loss, evaluation.loss, float(expected)


def losses_and_refusals() -> tuple[list[Losses], list[str]]:
    """Of all batches; a step and an evaluation refuse those that are wrong, and then still accept a good one."""
    whole = model()
    pipeline = Pipeline(whole, microbatches=2, parameter_dtype=torch.float64, self_check=False)
    said = []
    for batch, options, _ in REFUSED.values():
        for method in (pipeline.step, pipeline.evaluate):
            with pytest.raises(InputError) as caught:
                method(batch, **options)
            said.append(str(caught.value))
    return [losses(pipeline, whole, make()) for make in BATCHES.values()], said


@pytest.mark.parametrize("processes", [1, 2])
def test_batches_of_transformers_give_its_loss_and_others_are_refused_on_all_processes(processes: int) -> None:
    results = run_processes(losses_and_refusals, processes)
    for of_process, _ in results:
        for name, (step, evaluation, expected) in zip(BATCHES, of_process, strict=True):
            assert step == pytest.approx(expected, rel=1e-12), name
            assert evaluation == pytest.approx(expected, rel=1e-12), name
    first, *others = (said for _, said in results)
    for (name, (_, _, says)), step, evaluation in zip(REFUSED.items(), first[::2], first[1::2], strict=True):
        assert step.startswith(says) and evaluation == step, name
    assert all("refused by the first process of the pipeline" in text for said in others for text in said)
