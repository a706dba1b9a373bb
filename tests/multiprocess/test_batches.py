"""Batches as they are given to steps and evaluations: of any size, by name, and as parts of an update.

Gradients and losses of steps, also of several for one update, are compared by tests/fuzz.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import reference
import torch
from families import tiny_config, whole_model
from harness import run_processes
from small_families import CONFIGS
from small_llama import described
from small_runs import described as family_described
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
)

from evenpipe import InputError, Pipeline
from evenpipe.model import describe
from evenpipe.schedule import MODES
from evenpipe.words import show

FP64 = torch.float64
VOCABULARY, MICROBATCHES = 97, 4
SIZES = {1: ((1,), (3,), (5,), (4,), (6,), (8,)), 2: ((1, 5), (6, 2), (4, 3))}
"""By the number of replicas, sequences of each: fewer than the microbatches, not a multiple of them, and multiples."""

LAYOUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, MODES),
    ({"schedule": "zbv"}, ("first-last", "vocab-2")),
    ({"schedule": "interleaved"}, ("first-last", "vocab-2")),
    ({"dp": 2}, ("first-last", "vocab-2")),
    ({"dp": 2, "data_parallel": "shard"}, ("first-last", "vocab-2")),
]
"""Options of a pipeline of two devices, and vocabulary modes."""


def padded(sequences: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, labels, mask): rows of several lengths, padded on the right; some labels count for nothing."""
    ((ids, labels),) = reference.batches(VOCABULARY, sequences, 7, 1, seed=seed)
    mask = torch.ones_like(ids)
    for row in range(1, sequences, 2):
        mask[row, 7 - row % 4 :] = 0
    return ids, labels.masked_fill(mask == 0, reference.IGNORE), mask


def log_probabilities_of(model, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """[sequences, tokens], at t that of the label at t + 1, 0 where none counts."""
    with torch.no_grad():
        every = torch.log_softmax(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, -1)
    targets = torch.full_like(labels, reference.IGNORE)
    targets[:, :-1] = labels[:, 1:]
    return torch.where(targets == reference.IGNORE, 0.0, every.gather(2, targets.clamp(min=0)[..., None]).squeeze(-1))


def any_size(options: dict[str, Any], modes: tuple[str, ...]) -> None:
    """Each replica evaluates a batch of its own; the loss is the mean over the labels of all of them."""
    options = {"microbatches": MICROBATCHES, "parameter_dtype": FP64, "self_check": False, **options}
    model = copy.deepcopy(described(VOCABULARY, True, FP64).model)
    for mode in modes:
        pipeline = Pipeline(described(VOCABULARY, True, FP64), vocabulary=mode, **options)
        for sizes in SIZES[pipeline.replicas]:
            batches = [padded(sequences, seed=10 * sequences + replica) for replica, sequences in enumerate(sizes)]
            ids, labels, mask = batches[pipeline.replica]
            result = pipeline.evaluate(*((ids, labels) if pipeline.device == 0 else (None, None)), attention_mask=mask)
            wanted = [log_probabilities_of(model, *batch) for batch in batches]
            valid = sum(int((labels[:, 1:] != reference.IGNORE).sum()) for _, labels, _ in batches)
            assert result.tokens == valid
            loss = -sum(float(one.sum()) for one in wanted) / max(valid, 1)
            assert result.loss == pytest.approx(loss, rel=1e-12), (mode, sizes)
            own = wanted[pipeline.replica]
            assert torch.allclose(result.log_probabilities, own, rtol=1e-12, atol=1e-12), (mode, sizes)
            if sizes == (5,):  # training in between
                pipeline.step(torch.zeros(MICROBATCHES, 3, dtype=torch.int64))
        pipeline.close()


@pytest.mark.parametrize(("options", "modes"), LAYOUTS)
@pytest.mark.sampled(1)
def test_a_batch_of_any_size_is_evaluated(options: dict[str, Any], modes: tuple[str, ...]) -> None:
    run_processes(any_size, 2 * options.get("dp", 1), options, modes)


def routers() -> None:
    """One sequence is one microbatch, whose routers' loss is that of transformers on it."""
    config = tiny_config("mixtral", num_hidden_layers=2, vocab_size=131)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    described_experts = describe(whole_model(config, FP64))
    model = copy.deepcopy(described_experts.model)
    pipeline = Pipeline(described_experts, microbatches=MICROBATCHES, parameter_dtype=FP64, self_check=False)
    ids = torch.randint(0, 131, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    result = pipeline.evaluate(ids)
    assert result.router_loss > 0
    assert result.loss == pytest.approx(wanted, rel=1e-8)  # routers count in fp32, as in test_experts
    pipeline.close()


def test_the_routers_of_a_single_sequence() -> None:
    run_processes(routers, 2)


# --- by name, as loaders and collators of transformers make them ------------------------------------------------------

IDS = torch.arange(12).view(2, 6)
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
    config = CONFIGS["llama"](vocab_size=16, num_hidden_layers=2)
    return AutoModelForCausalLM.from_config(config, dtype=FP64)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    # the batch, further arguments, the sentence on the first process
    "another name": (
        {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)},
        {},
        "batch: it has 'token_type_ids', which a step does not take; expected only input_ids, labels, position_ids,"
        " attention_mask and token_weights",
    ),
    "a typing error": ({"input_ids": IDS, "label": IDS}, {}, "batch: it has 'label', which a step does not take"),
    "a number as name": ({0: IDS}, {}, "batch: it has 0, which a step does not take"),
    "given twice": (
        {"input_ids": IDS, "labels": IDS},
        {"labels": IDS},
        "labels: given in the batch and as an argument too; expected one of both",
    ),
    "no ids": ({"labels": IDS}, {}, "batch: it has labels; expected at least input_ids"),
    "nothing": ({}, {}, "batch: it has nothing; expected at least input_ids"),
    "lists": (
        {"input_ids": IDS.tolist()},
        {},
        "input_ids is list; it must be a torch.Tensor or a mapping of tensors by name",
    ),
    "other labels": ({"input_ids": IDS, "labels": IDS[:1]}, {}, "labels is [1, 6] torch.int64; it must be [2, 6]"),
}


def loss_of(whole: Any, batch: Any) -> float:
    """That of transformers."""
    tensors = {key: value for key, value in batch.items() if value is not None}
    mask = tensors.get("attention_mask", torch.ones_like(batch["input_ids"]))
    labels = tensors.pop("labels", batch["input_ids"].masked_fill(mask == 0, -100))
    with torch.no_grad():
        logits = whole(**tensors).logits  # its own loss is fp32
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def check_batches() -> None:
    """A step and an evaluation refuse those that are wrong, and then still accept the good ones."""
    whole = model()
    pipeline = Pipeline(whole, microbatches=2, parameter_dtype=FP64, self_check=False)
    for name, (batch, options, says) in REFUSED.items():
        for method in (pipeline.step, pipeline.evaluate):
            with pytest.raises(InputError) as caught:
                method(batch, **options)
            said = str(caught.value)
            assert (
                said.startswith(says) if pipeline.feeds else "refused by the first process of the pipeline" in said
            ), name
    for name, make in BATCHES.items():
        batch = make()
        given = batch if pipeline.feeds else {"ignored": "on other processes"}
        expected = pytest.approx(loss_of(whole, batch), rel=1e-12)
        assert (pipeline.step(given).loss, pipeline.evaluate(given).loss) == (expected, expected), name


@pytest.mark.parametrize("processes", [1, 2])
def test_batches_of_transformers_give_its_loss_and_others_are_refused_on_all_processes(processes: int) -> None:
    run_processes(check_batches, processes)


# --- of an update: the labels that several steps count together -------------------------------------------------------

SEQUENCES, TOKENS = 4, 16


@cache
def update(data: str) -> list[dict[str, Tensor]]:
    """The batches of an update: with 1 label that counts, with 60, and with none; or of weights, padding, documents."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, VOCABULARY, (SEQUENCES, TOKENS), generator=generator) for _ in range(3)]
    labels = [torch.full_like(ids[0], reference.IGNORE), ids[1].clone(), torch.full_like(ids[2], reference.IGNORE)]
    labels[0][-1, 5] = ids[0][-1, 5]
    batches = [{"input_ids": rows, "labels": targets} for rows, targets in zip(ids, labels, strict=True)]
    if data == "weights":
        for number, batch in enumerate(batches):
            batch["labels"] = batch["input_ids"]
            batch["token_weights"] = torch.rand(SEQUENCES, TOKENS, generator=generator, dtype=FP64) * 10.0**-number
    elif data == "padding":  # labels by default: those of what is not padding
        for number, batch in enumerate(batches):
            del batch["labels"]
            lengths = torch.tensor([TOKENS, 3 + 2 * number, 2, TOKENS - 5 * number])
            batch["attention_mask"] = (torch.arange(TOKENS) < lengths[:, None]).long()
    elif data == "documents":  # a row of several, whose first tokens are not predicted
        for number, batch in enumerate(batches):
            batch["position_ids"] = (torch.arange(TOKENS) % (TOKENS // (number + 1))).expand(SEQUENCES, -1).contiguous()
    return batches


def counts(documents: str) -> list[float]:
    pipeline = Pipeline(
        described(VOCABULARY, False, FP64),
        microbatches=2,
        dp=2,
        documents=documents,
        parameter_dtype=FP64,
        self_check=False,
    )
    rows = slice(pipeline.replica, None, 2)
    counted = []
    for data in ("labels", "weights", "padding") if documents == "joined" else ("documents",):
        for batch in update(data):
            own = {name: tensor[rows] for name, tensor in batch.items()} if pipeline.feeds else {"input_ids": None}
            counted.append(pipeline.count_labels(**own))
    return counted


def test_labels_are_counted_as_steps_count_them() -> None:
    """On every process, over all replicas, whose batches may be smaller than a step's."""
    weights = [float(batch["token_weights"][:, 1:].sum()) for batch in update("weights")]
    padded = [float(batch["attention_mask"][:, 1:].sum()) for batch in update("padding")]
    for counted in run_processes(counts, 4, "joined"):
        assert counted == pytest.approx([1, 60, 0, *weights, *padded], rel=1e-12)
    for counted in run_processes(counts, 4, "separate"):
        assert counted == [1, 4 * 14, 0]


EXPECTED = "it must be the number of labels that all steps of the update count"
OF_ALL = "expected the number of all steps of the update, over all replicas"
NOTHING = (None, None)
REFUSED_TOTALS = [
    # with routers, total by replica, number of steps by replica, and what is said
    (False, ("60", 60), NOTHING, f'total_tokens is "60"; {EXPECTED}'),
    (False, (-1, -1), NOTHING, f"total_tokens is -1; {EXPECTED}"),
    (False, (True, True), NOTHING, f"total_tokens is true; {EXPECTED}"),
    (False, (float("nan"), 1), NOTHING, f"total_tokens is nan; {EXPECTED}"),
    (False, (torch.ones(2), 1), NOTHING, f"total_tokens is tensor([1., 1.]); {EXPECTED}"),
    (False, (59, 59), NOTHING, f"total_tokens: 59, but this step alone counts 60; {OF_ALL}"),
    (False, (0, torch.tensor(0)), NOTHING, f"total_tokens: 0, but this step alone counts 60; {OF_ALL}"),
    (False, (60, 61), NOTHING, "total_tokens: [60.0, 61.0] by replica; expected in all of them that of all replicas"),
    (False, (60, None), NOTHING, "total_tokens: [60.0, None] by replica"),
    (True, (60, 60), NOTHING, "total_tokens: 60 without accumulate, but the routers of MixtralForCausalLM add a loss"),
    *(
        (False, NOTHING, (steps, 2), f"accumulate is {show(steps)}; it must be a whole number of steps, 1 or more")
        for steps in (0, -1, 1.5, True, "2")
    ),
    (False, NOTHING, (4, 2), "accumulate: [4, 2] by replica; expected the same number of steps in all of them"),
]


def refusals() -> None:
    """The second replica repeats the sentence, or refers to the first one."""
    model = family_described("mixtral").model
    model.config.output_router_logits = True
    pipelines = [
        Pipeline(one, microbatches=1, dp=2, parameter_dtype=FP64, self_check=False)
        for one in (described(VOCABULARY, False, FP64), describe(model))
    ]
    elsewhere = "input_ids: refused by the first process of {} pipeline; see its error"
    for with_routers, totals, steps, words in REFUSED_TOTALS:
        pipeline = pipelines[with_routers]
        batch = update("labels")[1]["input_ids"][pipeline.replica :: 2] % 61
        with pytest.raises(InputError) as caught:
            pipeline.step(batch, total_tokens=totals[pipeline.replica], accumulate=steps[pipeline.replica])
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        said = str(caught.value)
        assert said.startswith(words) or (pipeline.replica and said == elsewhere.format("another")), words
    with pytest.raises(InputError) as caught:
        pipelines[0].count_labels(batch if pipelines[0].replica else batch.float())
    wrong = "input_ids is [2, 16] torch.float32; it must be [batch, sequence] torch.int64, not empty"
    assert str(caught.value) == (elsewhere.format("a") if pipelines[0].replica else wrong)


def test_totals_and_numbers_of_steps_that_cannot_be_are_refused_on_every_process() -> None:
    run_processes(refusals, 2)
