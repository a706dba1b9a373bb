"""Documents that share rows have the loss, gradients and trained weights of each of them alone in transformers.

Families whose own attention keeps documents apart, and others; x sizes of the axes x slices x schedules x vocabulary
modes x checkpointing x activations on the host x data parallelism. Three clipped steps of AdamW, evaluation, and
log-probabilities in the order of the rows.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import reference
import torch
from harness import check_cases, run_processes
from small_families import CONFIGS, USUAL
from torch import Tensor
from torch.nn import functional
from transformers import AfmoeConfig, AutoModelForCausalLM, BioGptConfig, GptOssConfig, OPTConfig

from evenpipe import OffloadOptions, Pipeline
from evenpipe.errors import InputError
from evenpipe.model import describe
from evenpipe.model.comparison import gradient_errors

TOKENS, STEPS, CLIP = 16, 3, 0.5
LENGTHS = ((16,), (5, 11), (1, 3, 12), (7, 1, 1, 7))
"""Of the documents of one row, then the next."""
ALL = {
    **{name: CONFIGS[name] for name in ("llama", "gemma2", "gpt-neox", "deepseek-v3")},
    "gpt-oss": lambda: GptOssConfig(  # sinks, windows
        **USUAL,
        head_dim=4,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "opt": lambda: OPTConfig(**_without("intermediate_size"), ffn_dim=24, word_embed_proj_dim=16, dropout=0.0),
    "biogpt": lambda: BioGptConfig(
        **USUAL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, activation_dropout=0.0, layerdrop=0.0
    ),
    "afmoe": lambda: AfmoeConfig(
        **USUAL,
        head_dim=4,
        sliding_window=5,
        num_experts=4,
        num_experts_per_tok=2,
        num_dense_layers=1,
        moe_intermediate_size=8,
        experts_implementation="eager",
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
ROUNDS = ("gemma2", "deepseek-v3", "gpt-oss", "afmoe")
"""Families that compute parts in fp32."""
OURS = ("gpt-oss", "opt", "biogpt", "afmoe")
"""Families whose own attention looks at other documents of a row."""


def _without(*names: str) -> dict:
    return {name: value for name, value in USUAL.items() if name not in names}


@dataclass(frozen=True)
class Case:
    family: str
    replicas: int = 1
    devices: int = 1
    pieces: int = 1
    ranks: int = 1
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    checkpointing: str = "none"
    data_parallel: str = "replicate"
    exchange: str = "keys"
    slices: int = 1
    activations: str = "scheduled"
    compiled: bool = False
    microbatches: int = 4

    @property
    def processes(self) -> int:
        return self.replicas * self.devices * self.pieces * self.ranks

    @property
    def sequences(self) -> int:
        return self.replicas * self.microbatches


@cache
def described(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ALL[family](), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of ones hide errors
    return describe(model)


def lengths_of(row: int) -> tuple[int, ...]:
    return LENGTHS[row % len(LENGTHS)]


def positions(sequences: int) -> Tensor:
    return torch.stack([torch.cat([torch.arange(one) for one in lengths_of(row)]) for row in range(sequences)])


def documents(ids: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for row in range(len(ids)):
        yield from zip(ids[row].split(lengths_of(row)), labels[row].split(lengths_of(row)), strict=True)


def loss_of_each_alone(model, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the labels of all documents, none of which knows another; and the log-probability of each label in
    the order of the rows, 0 for others."""
    losses, logarithms = [], torch.zeros(ids.shape, dtype=torch.float64)
    flat = logarithms.view(-1)
    start = valid = 0
    for tokens, targets in documents(ids, labels):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        wanted = targets[1:]
        losses.append(functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum"))
        of_labels = logits.detach().log_softmax(-1).gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        flat[start : start + len(wanted)] = of_labels.masked_fill(wanted == -100, 0.0)
        valid += int((wanted != -100).sum())
        start += len(tokens)
    return torch.stack(losses).sum() / valid, logarithms


@cache
def expected(family: str, sequences: int):
    model = copy.deepcopy(described(family).model).train()
    data = reference.batches(model.config.vocab_size, sequences, TOKENS, STEPS)
    optimizer = reference.adamw(model.parameters())
    losses, norms, gradients = [], [], {}
    for ids, labels in data:
        optimizer.zero_grad()
        loss, _ = loss_of_each_alone(model, ids, labels)
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        loss, logarithms = loss_of_each_alone(model.eval(), *data[0])
    return data, losses, norms, gradients, weights, logarithms, loss.item()


def run_case(case: Case) -> str:
    """Return what is wrong."""
    data, losses, norms, gradients, weights, logarithms, evaluated = expected(case.family, case.sequences)
    pipeline = Pipeline(
        described(case.family),
        documents="separate",
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=case.microbatches,
        checkpointing=case.checkpointing,
        replicas=case.replicas,
        context_parallel=case.pieces,
        tensor_parallel=case.ranks,
        data_parallel=case.data_parallel,
        context_exchange=case.exchange,
        slices=case.slices,
        offload=OffloadOptions(activations=case.activations),
        compile_layers=case.compiled,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    whole = case.pieces == case.slices == 1
    apart_by = "evenpipe's attention" if case.family in OURS or not whole else "the model's attention"
    own = slice(pipeline.replica * case.microbatches, (pipeline.replica + 1) * case.microbatches)
    given = {"position_ids": positions(case.sequences)[own]}
    optimizer = reference.adamw(list(pipeline.parameters()))
    found_losses, found_norms, found = [], [], {}
    for number, (ids, labels) in enumerate(data):
        pipeline.zero_grad()
        found_losses.append(pipeline.step(ids[own], labels[own], **given).loss)
        if number == 0:
            found = pipeline.full_gradients()
        found_norms.append(pipeline.clip_gradients(CLIP))
        optimizer.step()
    ids, labels = data[0]
    result = pipeline.evaluate(ids[own], labels[own], **given)
    tolerance = 1e-6 if case.family in ROUNDS else 1e-10
    errors = {
        "loss": max(abs(one / other - 1) for one, other in zip(found_losses, losses, strict=True)),
        "norm": max(abs(one / other - 1) for one, other in zip(found_norms, norms, strict=True)),
        "evaluation": abs(result.loss / evaluated - 1),
        "log-probabilities": float((result.log_probabilities - logarithms[own]).abs().max()),
        "kept apart by": 0.0 if pipeline.keeps_documents_apart == apart_by else 1.0,
    }
    state, name = pipeline.full_state_dict(), ""
    pipeline.close()
    if state:
        assert found.keys() == gradients.keys()
        of_each = gradient_errors(found, gradients)  # that of a bias of keys is zero but for rounding
        name = max(of_each, key=of_each.__getitem__)
        errors["gradient"] = of_each[name]
        errors["weights"], _ = reference.worst({name: one for name, one in state.items() if name in weights}, weights)
    steps = ("weights", "evaluation", "log-probabilities")
    wrong = {
        key: f"{error:.1e}" for key, error in errors.items() if not error <= tolerance * (100 if key in steps else 1)
    }
    return f"{case}: {wrong} ({name})" if wrong else ""


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases if (fault := run_case(case))]


MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "po-h")
CHECKPOINTING = ("none", "full", "selective")


def whole_rows() -> list[Case]:
    """Every family, on two devices, with every schedule and mode."""
    dice = random.Random(0)
    return [
        Case(
            family,
            devices=2,
            schedule=schedule,
            mode=mode,
            checkpointing=dice.choice(CHECKPOINTING),
            activations="scheduled" if schedule == "po-h" else dice.choice(("scheduled", "all")),
        )
        for family, schedule, mode in itertools.product(ALL, SCHEDULES, MODES)
    ]


def in_pieces() -> list[Case]:
    """Every family with every mode, over context ranks, in slices, and both."""
    dice = random.Random(1)
    return [
        Case(
            *(family, 1, 2, pieces, 1, dice.choice(SCHEDULES[:-1]), mode, dice.choice(CHECKPOINTING)),
            *("replicate", exchange, slices),
        )
        for family, mode, (pieces, exchange, slices) in itertools.product(
            ALL,
            MODES,
            ((2, "keys", 1), (2, "heads", 1), (1, "keys", 3), (2, "keys", 2), (2, "heads", 2)),
        )
    ]


def on_all_axes() -> list[Case]:
    """Families of both kinds that tensor ranks can share, on every grid."""
    dice = random.Random(2)
    return [
        Case(family, *grid, "1f1b", mode, dice.choice(CHECKPOINTING), data_parallel, slices=dice.choice((1, 2)))
        for family, grid, mode, data_parallel in itertools.product(
            ("llama", "gpt-oss"),
            ((2, 1, 1, 1), (2, 2, 1, 1), (1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 2, 1)),
            MODES,
            ("replicate", "shard"),
        )
    ]


def test_every_family_has_the_gradients_of_documents_alone(sample) -> None:
    check_cases(run_cases, sample(whole_rows(), 5))


def test_every_family_in_pieces_has_the_gradients_of_documents_alone(sample) -> None:
    check_cases(run_cases, sample(in_pieces(), 5))


def test_every_grid_has_the_gradients_of_documents_alone(sample) -> None:
    check_cases(run_cases, sample(on_all_axes(), 5))


@pytest.mark.slow
def test_compiled_layers_have_the_gradients_of_documents_alone() -> None:
    """By the model's own attention, and by ours. Compiled norms of fp32 sum in another order, so these compute none."""
    kinds = itertools.product(("gpt-neox", "opt"), CHECKPOINTING)
    check_cases(run_cases, [Case(family, checkpointing=kept, compiled=True) for family, kept in kinds])


def other_labels_and_refusals() -> None:
    model = described("llama")
    ids, _ = reference.batches(61, 4, TOKENS, 1)[0]
    counted = sum(len(lengths_of(row)) for row in range(4))
    pipeline = Pipeline(model, documents="separate", microbatches=2, parameter_dtype=torch.float64, self_check=False)
    first = pipeline.step(ids, position_ids=positions(4))
    assert first.tokens == 4 * TOKENS - counted  # one less for each document: its first token
    assert pipeline.step(ids).tokens == 4 * (TOKENS - 1)  # rows of one document
    labels = ids.clone()
    again = pipeline.step(ids, labels, position_ids=positions(4))
    assert (again.tokens, again.loss) == (first.tokens, first.loss)
    assert torch.equal(labels, ids)
    with pytest.raises(InputError, match=r"^attention_mask: given, expected None with separate documents: padding is"):
        pipeline.step(ids, attention_mask=torch.ones_like(ids), position_ids=positions(4))
    pipeline.close()
    joined = Pipeline(model, microbatches=2, parameter_dtype=torch.float64, self_check=False)
    assert joined.keeps_documents_apart is None
    assert joined.step(ids, position_ids=positions(4)).tokens == 4 * (TOKENS - 1)
    joined.close()
    with pytest.raises(InputError, match=r"^documents: 'apart', expected 'joined' or 'separate'"):
        Pipeline(model, documents="apart")
    embedding, head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)
    with pytest.raises(InputError, match=r'^documents: plain modules do not say .*, expected "joined" with them'):
        Pipeline.from_modules(embedding, [torch.nn.Linear(4, 4)], None, head, documents="separate")


def test_first_tokens_are_not_predicted_and_masks_are_refused() -> None:
    run_processes(other_labels_and_refusals, 1)


def refused() -> str:
    from transformers import BloomConfig

    config = BloomConfig(**_without("num_key_value_heads", "intermediate_size", "max_position_embeddings"))
    with pytest.raises(InputError) as caught:
        Pipeline(config, documents="separate", self_check=False)
    return str(caught.value)


def test_a_model_that_cannot_keep_documents_apart_is_refused_everywhere() -> None:
    (said,) = set(run_processes(refused, 2))
    assert said == (
        'BloomForCausalLM cannot be trained with documents = "separate", only with "joined" (data.documents of a'
        " configuration): it numbers positions in a way of its own, or takes none."
    )
