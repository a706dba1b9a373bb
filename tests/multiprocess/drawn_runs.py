"""Runs of small models in drawn layouts, which give the loss, every gradient, the trained weights and the
log-probabilities of transformers in one process.

Families x sizes of the axes x slices and where they are cut x orders of tokens x schedules x vocabulary modes x
checkpointing x forwards that run again x activations on the host x tied and untied x rows of one document, packed and
padded ones; three clipped steps of AdamW, and an evaluation.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from small_families import CONFIGS, USUAL
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, GptOssConfig, MistralConfig, PreTrainedModel

from evenpipe import OffloadOptions, Pipeline, newest_checkpoint
from evenpipe.errors import InputError
from evenpipe.host.offload import Activations
from evenpipe.model import describe
from evenpipe.model.fp64 import InFp64
from evenpipe.recipe.parallelism import divisor_of
from evenpipe.runtime import pieces, tensor_cut
from evenpipe.schedule import Order, add_recompute, plan_order
from evenpipe.tensor.check import cut_of_model

STEPS, CLIP = 3, 0.5
ALL = {
    **CONFIGS,
    "mistral": partial(MistralConfig, **USUAL, sliding_window=5),
    "gpt-oss": partial(  # sinks, windows
        GptOssConfig,
        **USUAL,
        head_dim=4,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "deepseek-v3": partial(CONFIGS["deepseek-v3"], v_head_dim=6),  # keys and values of two sizes
    "mixtral of 5 experts": partial(CONFIGS["mixtral"], num_local_experts=5),
    "mixtral, router loss": partial(
        CONFIGS["mixtral"],
        output_router_logits=True,
        router_aux_loss_coef=0.5,  # far above what is usual, so that a wrong one is seen
    ),
}
WINDOWS = {"gemma2", "gemma3", "cohere2", "mistral", "gpt-oss"}
"""Families in which a token beyond the end of a sequence may see nothing: transformers makes that NaN in some."""
FP64_THROUGHOUT = {"gpt-neox", "starcoder2", "gpt2"}
"""Families that cast nothing to fp32, as in the tests of tensor parallelism."""


@dataclass(frozen=True)
class Case:
    family: str
    replicas: int = 1
    devices: int = 1
    pieces: int = 1
    """Context ranks."""
    ranks: int = 1
    """Tensor ranks."""
    members: int = 1
    """Replicas that share experts."""
    data_parallel: str = "replicate"
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    checkpointing: str = "none"
    repeats: bool = False
    """With R."""
    offload: str = "none"
    tied: bool = False
    exchange: str = "keys"
    slices: int = 1
    cuts: str = "of equal time"
    order: str = "balanced"
    """Of tokens on context ranks."""
    rows: str = "whole"
    size: int = 1
    """Sequences of a microbatch."""
    microbatches: int = 4

    @property
    def processes(self) -> int:
        return self.replicas * self.devices * self.pieces * self.ranks

    @property
    def tokens(self) -> int:
        return 24 if self.pieces == 3 else 32

    @property
    def sequences(self) -> int:
        return self.replicas * self.microbatches * self.size

    @property
    def model(self) -> tuple[str, bool]:
        return self.family, self.tied

    @property
    def runs(self) -> bool:
        """Whether there is such a run."""
        jointly = self.slices > 1 and self.schedule == "dualpipe-v"
        twice = self.repeats and self.schedule in ("dualpipe-v", "po-h")  # which have R, or O, of their own
        heads = 4 // self.ranks
        uneven = self.exchange == "heads" and (self.pieces == 1 or heads % self.pieces)
        unseen = self.rows == "hardly any" and self.family in WINDOWS
        too_short = self.slices * divisor_of(self.pieces, self.ranks) > self.tokens
        too_long = self.slices == 8 and self.microbatches > 2
        nothing_cut = self.slices == 1 and (self.pieces == self.members == 1 or self.cuts != "of equal time")
        return not (jointly or twice or uneven or unseen or too_short or too_long or nothing_cut)

    def ends(self) -> tuple[int, ...] | None:
        """Of slices; None: as evenpipe cuts them."""
        if self.cuts == "of equal time":
            return None
        multiple = divisor_of(self.pieces, self.ranks)
        parts = self.tokens // multiple
        if self.cuts == "of equal length":
            bounds = [parts * number // self.slices for number in range(1, self.slices)]
        else:
            bounds = sorted(random.Random(repr(self)).sample(range(1, parts), self.slices - 1))
        return *(multiple * bound for bound in bounds), self.tokens

    def plan(self) -> str | Order:
        """Return the schedule as a pipeline is given it."""
        if not self.repeats:
            return self.schedule
        order = plan_order(self.schedule, self.devices, self.microbatches, "first-last", slices=self.slices)
        return add_recompute(order)

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.family in FP64_THROUGHOUT else InFp64()


@cache
def described(family: str, tied: bool):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ALL[family](tie_word_embeddings=tied), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of ones hide errors
    return describe(model)


@cache
def cut(family: str, tied: bool, ranks: int):
    """Found once for all cases."""
    return cut_of_model(described(family, tied), ranks, check=False)


@cache
def batches(rows: str, sequences: int, tokens: int) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """(ids, labels, mask or positions) of every step."""
    place, number = torch.arange(tokens), torch.arange(sequences)[:, None]
    restarts = (place - (3 + 5 * number) % tokens) % (7 + 6 * (number % 3))  # some documents end in their middle
    lengths = 1 + 3 * number % 5 if rows == "hardly any" else tokens - number % 4
    given = {}
    if rows in ("packed", "packed and padded"):
        given["position_ids"] = restarts
    if rows in ("padded", "packed and padded", "hardly any"):
        given["attention_mask"] = (place < lengths).long()
    found = []
    for ids, labels in reference.batches(61, sequences, tokens, STEPS):
        mask = given.get("attention_mask")
        found.append((ids, labels if mask is None else labels.masked_fill(mask == 0, reference.IGNORE), given))
    return found


def logits_and_loss(
    model: PreTrainedModel, ids: Tensor, labels: Tensor, size: int, **given: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean over valid tokens, and over microbatches of what their routers add."""
    parts = [
        model(input_ids=ids[one], use_cache=False, **{name: value[one] for name, value in given.items()})
        for one in torch.arange(len(ids)).split(size)
    ]
    logits = torch.cat([part.logits for part in parts])[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=reference.IGNORE)
    if getattr(model.config, "output_router_logits", False):
        loss = loss + model.config.router_aux_loss_coef * sum(part.aux_loss for part in parts) / len(parts)
    return logits, loss


@dataclass(frozen=True)
class Expected:
    trained: reference.Reference
    loss: float
    """Of the trained model on the first batch."""
    log_probabilities: Tensor


@cache
def expected(model_of: tuple[str, bool], rows: str, tokens: int, sequences: int, size: int) -> Expected:
    model = copy.deepcopy(described(*model_of).model)
    data = batches(rows, sequences, tokens)

    def loss_of(*arguments: Any, **given: Tensor) -> Tensor:
        return logits_and_loss(*arguments, size, **given)[1]

    trained = reference.train(model, data, CLIP, loss_of)
    ids, labels, given = data[0]
    with torch.no_grad():
        logits, loss = logits_and_loss(model.eval(), ids, labels, size, **given)
    logarithms = logits.log_softmax(-1).gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    return Expected(trained, loss.item(), logarithms.masked_fill(labels[:, 1:] == reference.IGNORE, 0.0))


def run_case(case: Case) -> str:
    """Return what is wrong, on the first process."""
    pipeline = Pipeline(
        described(*case.model),
        schedule=case.plan(),
        vocabulary=case.mode,
        microbatches=case.microbatches,
        checkpointing=case.checkpointing,
        replicas=case.replicas,
        context_parallel=case.pieces,
        tensor_parallel=case.ranks,
        expert_parallel=case.members,
        data_parallel=case.data_parallel,
        context_exchange=case.exchange,
        slices=case.slices,
        offload=None if case.offload == "none" else OffloadOptions(activations=case.offload),
        parameter_dtype=torch.float64,
        self_check=False,
    )
    if (ends := case.ends()) is not None:
        pipeline._pieces.ends[case.tokens] = ends
    count = case.sequences // case.replicas
    own = slice(pipeline.replica * count, (pipeline.replica + 1) * count)
    data = [
        (ids[own], labels[own], {name: one[own] for name, one in given.items()})
        for ids, labels, given in batches(case.rows, case.sequences, case.tokens)
    ]
    optimizer = reference.adamw(list(pipeline.parameters()))
    losses, norms, gradients = [], [], {}
    for ids, labels, given in data:
        pipeline.zero_grad()
        losses.append(pipeline.step(ids, labels, **given).loss)
        if len(losses) == 1:
            gradients = pipeline.full_gradients()
        norms.append(pipeline.clip_gradients(CLIP))
        optimizer.step()
    ids, labels, given = data[0]
    result = pipeline.evaluate(ids, labels, **given)
    state = pipeline.full_state_dict()
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (losses, norms, result.loss, pipeline.replica, result.log_probabilities))
    pipeline.close()
    if dist.get_rank():
        return ""
    faults = [f"losses or norms of process {rank}" for rank, one in enumerate(said) if one[:3] != said[0][:3]]
    of_replicas = {replica: found for *_, replica, found in said}
    faults += [
        f"log-probabilities of process {rank}"
        for rank, (*_, replica, found) in enumerate(said)
        if not torch.equal(found, of_replicas[replica])
    ]
    logarithms = torch.cat([of_replicas[replica] for replica in range(case.replicas)])[:, :-1]
    wanted = expected(case.model, case.rows, case.tokens, case.sequences, case.size)
    trained = {name: weight for name, weight in state.items() if name in wanted.trained.weights}
    errors = {
        "loss": (max(abs(one / other - 1) for one, other in zip(losses, wanted.trained.losses, strict=True)), ""),
        "norm": (max(abs(one / other - 1) for one, other in zip(norms, wanted.trained.norms, strict=True)), ""),
        "gradient": reference.worst(gradients, wanted.trained.gradients),
        "weight": reference.worst(trained, wanted.trained.weights),
        "evaluation": (abs(result.loss / wanted.loss - 1), ""),
        "log-probability": (float((logarithms - wanted.log_probabilities).abs().max()), ""),
    }
    for what, (error, name) in errors.items():
        if not error <= (1e-10 if what in ("loss", "norm", "gradient") else 1e-8):
            faults.append(f"{what} {name} {error:.1e}")
    return f"{case}: {', '.join(faults)}" if faults else ""


def in_any_order(start: int, end: int, ranks: int, positions: Tensor | None) -> list[Tensor]:
    """In place of `places_of_ranks`: the same on all processes."""
    generator = torch.Generator().manual_seed(1000 * start + end)
    return list((start + torch.randperm(end - start, generator=generator)).chunk(ranks))


def run_cases(cases: list[Case]) -> list[str]:
    return list(faults_of(cases))


def faults_of(cases: list[Case]) -> Iterator[str]:
    Activations.smallest_bytes = 1  # the tensors of these models are too small to be worth a copy
    for case in cases:
        with contextlib.ExitStack() as stack:
            found = lambda *_, case=case, **__: cut(*case.model, case.ranks)  # noqa: E731
            stack.enter_context(mock.patch.object(tensor_cut, "cut_of_model", found))
            if case.order == "random":
                stack.enter_context(mock.patch.object(pieces, "places_of_ranks", in_any_order))
            stack.enter_context(case.arithmetic())
            try:
                fault = run_case(case)
            except Exception as error:
                raise AssertionError(f"{case} raises {type(error).__name__}: {error}") from error
        if fault:
            yield fault


MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "v-half", "dualpipe-v", "po-h")
CHECKPOINTING = ("none", "full", "selective")
OTHERS = {
    "data_parallel": ("replicate", "shard"),
    "repeats": (False, False, True),
    "offload": ("none", "all"),
    "tied": (False, True),
    "exchange": ("keys", "heads"),
    "slices": (1, 2, 3, 8),
    "cuts": ("of equal time", "of equal length", "drawn"),
    "order": ("balanced", "balanced", "random"),
    "rows": ("whole", "packed", "padded", "packed and padded", "hardly any"),
    "size": (1, 2),
    "microbatches": (2, 4),
}


def drawn(dice: random.Random, family: str, grid: tuple[int, ...], **given: Any) -> Case:
    """The given choices, and all others drawn."""
    while True:
        others: dict[str, Any] = {name: dice.choice(values) for name, values in OTHERS.items()}
        case = Case(family, *grid, **others | given)
        if case.runs:
            return case


def of_families(seed: int, families: Iterable[str], grids: Sequence[tuple[int, ...]]) -> list[Case]:
    """Every family on all of these grids; everything else drawn."""
    dice = random.Random(seed)
    return [
        drawn(
            dice,
            *(family, grid),
            schedule=dice.choice([name for name in SCHEDULES if name != "dualpipe-v" or grid[2] > 1]),
            mode=dice.choice(MODES),
            checkpointing=dice.choice(CHECKPOINTING),
        )
        for family, grid in itertools.product(families, grids)
    ]


# --- one step after the other ---

TOKENS, SEQUENCES = 16, 4


def opened(case: Case, microbatches: int, seed: int = 0, **options: Any) -> Pipeline:
    return Pipeline(
        described(*case.model),
        schedule=case.plan(),
        vocabulary=case.mode,
        microbatches=microbatches,
        replicas=case.replicas,
        context_parallel=case.pieces,
        tensor_parallel=case.ranks,
        expert_parallel=case.members,
        context_exchange=case.exchange,
        slices=case.slices,
        data_parallel=case.data_parallel,
        seed=seed,
        self_check=False,
        **{"parameter_dtype": torch.float64} | options,
    )


def step_of_layout(folder: Path, case: Case, number: int, steps: int) -> float:
    """Train one step on the checkpoint of the layout before, save it, and return the loss; all of them export."""
    data = reference.batches(61, SEQUENCES, TOKENS, steps)
    count = SEQUENCES // case.replicas
    with case.arithmetic(), contextlib.closing(opened(case, count, seed=number)) as pipeline:
        optimizer = reference.adamw(list(pipeline.parameters()))
        if number:
            pipeline.load_checkpoint(newest_checkpoint(folder, pipeline.process_group), optimizer)
        own = slice(pipeline.replica * count, (pipeline.replica + 1) * count)
        ids, labels = data[number]
        pipeline.zero_grad()
        loss = pipeline.step(ids[own], labels[own]).loss
        optimizer.step()
        pipeline.save_checkpoint(folder, number + 1, optimizer)
        pipeline.save_pretrained(folder / f"export-{number}")
    return loss


def continue_in_all(cases: list[Case], folder: Path) -> None:
    """Let layouts train one step each on what the one before has saved, and compare with one process, and so the last
    export."""
    with cases[0].arithmetic():
        model = copy.deepcopy(described(*cases[0].model).model)
        wanted = reference.train(model, reference.batches(61, SEQUENCES, TOKENS, len(cases)))
    losses = [
        run_processes(step_of_layout, case.processes, folder, case, number, len(cases))[0]
        for number, case in enumerate(cases)
    ]
    assert losses == pytest.approx(wanted.losses, rel=1e-10)
    exported = AutoModelForCausalLM.from_pretrained(folder / f"export-{len(cases) - 1}", dtype=torch.float64)
    error, name = reference.worst({key: one.detach() for key, one in exported.named_parameters()}, wanted.weights)
    assert error < 1e-8, name


FROZEN = ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight")


def steps_of_several_lengths(case: Case) -> tuple[float, str]:
    """Batches of three lengths whose gradients add up, two of them as one update, with some parameters frozen; between
    them one that is refused, and an evaluation."""
    with InFp64(), contextlib.closing(opened(case, 2)) as pipeline:
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(name not in FROZEN)
        model = copy.deepcopy(described(*case.model).model)
        for name in FROZEN:
            model.get_parameter(name).requires_grad_(False)
        for tokens, accumulate in ((16, 1), (32, 2), (8, 2)):
            ((ids, labels),) = reference.batches(61, 2, tokens, 1)
            with pytest.raises(InputError, match=r"1 token per sequence, expected|refused by"):
                pipeline.step(torch.ones(2, 1, dtype=torch.int64))
            pipeline.step(ids, labels, accumulate=accumulate)
            (reference.loss_of(model, ids, labels) / accumulate).backward()
            pipeline.evaluate(ids[:1])
        found = pipeline.full_gradients()
    if not found:
        return 0.0, ""
    return reference.worst(found, {name: one.grad for name, one in model.named_parameters() if one.grad is not None})
