"""With tensor ranks, every layout gives the loss, the gradients and the trained weights of transformers in one process.

Families x sizes of the axes x schedules x vocabulary modes x checkpointing x activations on the host x tied and untied
x vocabularies x padded and packed rows; three clipped steps of AdamW.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
from harness import check_cases, run_processes
from small_families import CONFIGS, WHOLE
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from evenpipe import OffloadOptions, Pipeline, newest_checkpoint
from evenpipe.errors import InputError
from evenpipe.host.offload import Activations
from evenpipe.model import describe
from evenpipe.model.fp64 import InFp64
from evenpipe.runtime import tensor_cut
from evenpipe.tensor.check import cut_of_model

TOKENS, STEPS, CLIP = 8, 3, 0.5
FP64_THROUGHOUT = {"gpt-neox", "starcoder2", "gpt2", "bloom"}
"""Families that cast nothing to fp32. All others do, at least in norms; here they do not (`InFp64`): tensor ranks add
in another order than one process, so two numbers may differ in their last bit, and now and then fp32 makes of that a
difference of 1e-7."""


@dataclass(frozen=True)
class Case:
    family: str
    replicas: int
    devices: int
    ranks: int
    data_parallel: str = "replicate"
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    checkpointing: str = "none"
    offload: str = "none"
    tied: bool = False
    vocabulary: int = 61
    """No multiple of the shards, or fewer rows than shards."""
    rows: str = "whole"
    """"padded" on the right, or two sequences "packed" in each."""
    size: int = 1
    """Sequences of a microbatch."""
    microbatches: int = 4
    overlap: str = "auto"

    @property
    def processes(self) -> int:
        return self.replicas * self.devices * self.ranks

    @property
    def sequences(self) -> int:
        return self.replicas * self.microbatches * self.size

    @property
    def model(self) -> tuple[str, bool, int]:
        return self.family, self.tied, self.vocabulary

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.family in FP64_THROUGHOUT else InFp64()


def noisy(family: str, dtype: torch.dtype, **settings: Any) -> PreTrainedModel:
    """The same model in every process, with noise, since norms of ones hide errors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((CONFIGS | WHOLE)[family](**settings), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@cache
def described(family: str, tied: bool = False, vocabulary: int = 61):
    return describe(noisy(family, torch.float64, tie_word_embeddings=tied, vocab_size=vocabulary))


@cache
def cut(family: str, tied: bool, vocabulary: int, ranks: int):
    """Found once for all cases."""
    return cut_of_model(described(family, tied, vocabulary), ranks, check=False)


@cache
def batches(vocabulary: int, sequences: int, rows: str) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """(ids, labels, mask or positions) of every step."""
    found = []
    for ids, labels in reference.batches(vocabulary, sequences, TOKENS, STEPS):
        given = {}
        if rows == "padded":
            lengths = TOKENS - torch.arange(sequences) % 4
            mask = (torch.arange(TOKENS) < lengths[:, None]).long()
            given, labels = {"attention_mask": mask}, labels.masked_fill(mask == 0, reference.IGNORE)
        elif rows == "packed":
            ends = 2 + torch.arange(sequences) % 5  # of the first sequence
            place = torch.arange(TOKENS).expand(sequences, -1)
            given = {"position_ids": torch.where(place < ends[:, None], place, place - ends[:, None])}
        found.append((ids, labels, given))
    return found


@cache
def expected(family: str, tied: bool, vocabulary: int, sequences: int, rows: str) -> reference.Reference:
    model = copy.deepcopy(described(family, tied, vocabulary).model)
    return reference.train(model, batches(vocabulary, sequences, rows), CLIP)


def run_case(case: Case) -> str:
    """Return what is wrong, on the first process."""
    pipeline = Pipeline(
        described(*case.model),
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=case.microbatches,
        checkpointing=case.checkpointing,
        replicas=case.replicas,
        tensor_parallel=case.ranks,
        data_parallel=case.data_parallel,
        offload=None if case.offload == "none" else OffloadOptions(activations=case.offload),
        tensor_overlap=case.overlap,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    count = case.sequences // case.replicas
    own = slice(pipeline.replica * count, (pipeline.replica + 1) * count)
    optimizer = reference.adamw(list(pipeline.parameters()))
    losses, norms, gradients = [], [], {}
    for ids, labels, given in batches(case.vocabulary, case.sequences, case.rows):
        pipeline.zero_grad()
        losses.append(pipeline.step(ids[own], labels[own], **{name: one[own] for name, one in given.items()}).loss)
        if len(losses) == 1:
            gradients = pipeline.full_gradients()
        norms.append(pipeline.clip_gradients(CLIP))
        optimizer.step()
    state = pipeline.full_state_dict()
    faults = differences_between_ranks(pipeline, losses, norms)
    pipeline.close()
    if dist.get_rank():
        return ""
    wanted = expected(*case.model, case.sequences, case.rows)
    trained = {name: weight for name, weight in state.items() if name in wanted.weights}
    errors = {
        "loss": (max(abs(one / other - 1) for one, other in zip(losses, wanted.losses, strict=True)), ""),
        "norm": (max(abs(one / other - 1) for one, other in zip(norms, wanted.norms, strict=True)), ""),
        "gradient": reference.worst(gradients, wanted.gradients),
        "weight": reference.worst(trained, wanted.weights),
    }
    for what, (error, name) in errors.items():
        if not error <= (1e-8 if what == "weight" else 1e-10):
            faults.append(f"{what} {name} {error:.1e}")
    return f"{case}: {', '.join(faults)}" if faults else ""


def differences_between_ranks(pipeline: Pipeline, losses: list[float], norms: list[float]) -> list[str]:
    """Losses and norms are the same bits on all processes, and so is what several tensor ranks of a device hold."""
    held = {}
    for number, one in enumerate(pipeline._held.shared):
        part = tuple(str(box.whole) for box in one.placement.boxes())  # not all of it: heads of keys and values
        held[pipeline.replica, pipeline.device, number, part] = one.tensor.detach().tolist()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (losses, norms, held))
    faults = [f"loss or norm of process {rank}" for rank, one in enumerate(seen) if one[:2] != seen[0][:2]]
    values = {key: value for one in seen for key, value in one[2].items()}
    return faults + [
        f"{key} of process {rank}" for rank, one in enumerate(seen) for key in one[2] if one[2][key] != values[key]
    ]


def run_cases(cases: list[Case]) -> list[str]:
    return list(faults_of(cases))


def faults_of(cases: list[Case]) -> Iterator[str]:
    Activations.smallest_bytes = 1  # the tensors of these models are too small to be worth a copy
    for case in cases:
        found = mock.patch.object(tensor_cut, "cut_of_model", lambda *_, case=case, **__: cut(*case.model, case.ranks))
        try:
            with case.arithmetic(), found:
                fault = run_case(case)
        except Exception as error:
            raise AssertionError(f"{case} raises {type(error).__name__}: {error}") from error
        if fault:
            yield fault


GRIDS = ((1, 1, 2), (1, 2, 2), (1, 1, 4), (2, 1, 2), (2, 1, 2, "shard"))
"""Replicas, devices, tensor ranks, and how data parallelism holds parameters."""
MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "v-half", "dualpipe-v", "po-h")
CHECKPOINTING = ("none", "full", "selective")
OTHERS = {
    "offload": ("none", "all"),
    "tied": (False, True),
    "vocabulary": (61, 3),
    "rows": ("whole", "padded", "packed"),
    "size": (1, 2),
}


def of_families() -> list[Case]:
    """Every family on every grid in every mode; everything else drawn."""
    dice, cases = random.Random(0), []
    for family, grid, mode in itertools.product(CONFIGS | WHOLE, GRIDS, MODES):
        others: dict[str, Any] = {name: dice.choice(values) for name, values in OTHERS.items()}
        if family in WHOLE:  # it takes no positions
            others["rows"] = "padded"
        schedule, checkpointing = dice.choice(SCHEDULES), dice.choice(CHECKPOINTING)
        cases.append(Case(family, *grid, schedule=schedule, mode=mode, checkpointing=checkpointing, **others))
    return cases


def of_layouts() -> list[Case]:
    """One family in every layout: on several devices in every schedule, on one in two that are drawn."""
    dice, cases = random.Random(1), []
    for grid, mode, checkpointing in itertools.product(GRIDS, MODES, CHECKPOINTING):
        for schedule in SCHEDULES if grid[1] > 1 else dice.sample(SCHEDULES, 2):
            others: dict[str, Any] = {name: dice.choice(values) for name, values in OTHERS.items()}
            cases.append(Case("llama", *grid, schedule=schedule, mode=mode, checkpointing=checkpointing, **others))
    return cases


def test_every_family_trains_as_in_one_process(sample) -> None:
    check_cases(run_cases, sample(of_families(), 5))


def test_every_layout_trains_as_in_one_process(sample) -> None:
    check_cases(run_cases, sample(of_layouts(), 4))


# --- checkpoints and export ---------------------------------------------------------------------------------------

LAYOUTS = (
    Case("", 1, 2, 2),
    Case("", 1, 4, 1, mode="first-last"),
    Case("", 2, 1, 2, data_parallel="shard"),
    Case("", 1, 2, 1, schedule="zb-h1", mode="redistribute"),
)
"""Layouts that train one step each, one after the other, on what the one before has saved."""
RESUMED = (("llama", True), ("phi3", False), ("gpt2", True), ("gpt-neox", False), ("starcoder2", False))
"""Families, and whether they are tied."""
SEQUENCES = 4


def step_of_layout(folder: Path, family: str, tied: bool, number: int) -> float:
    """Train one step on the checkpoint of the layout before, save it, and return the loss; the last one exports."""
    case, description = LAYOUTS[number], described(family, tied)
    data = reference.batches(description.vocabulary_size, SEQUENCES, TOKENS, len(LAYOUTS))
    with contextlib.closing(
        Pipeline(
            description,
            schedule=case.schedule,
            vocabulary=case.mode,
            microbatches=SEQUENCES // case.replicas,
            replicas=case.replicas,
            tensor_parallel=case.ranks,
            data_parallel=case.data_parallel,
            parameter_dtype=torch.float64,
            seed=number,
            self_check=False,
        )
    ) as pipeline:
        optimizer = reference.adamw(list(pipeline.parameters()))
        if number:
            pipeline.load_checkpoint(newest_checkpoint(folder, pipeline.process_group), optimizer)
        own = slice(
            pipeline.replica * (SEQUENCES // case.replicas), (pipeline.replica + 1) * (SEQUENCES // case.replicas)
        )
        ids, labels = data[number]
        pipeline.zero_grad()
        loss = pipeline.step(ids[own], labels[own]).loss
        optimizer.step()
        pipeline.save_checkpoint(folder, number + 1, optimizer)
        pipeline.save_pretrained(folder / f"export-{number}")
    return loss


@pytest.mark.parametrize(("family", "tied"), RESUMED)
@pytest.mark.sampled(1)
def test_a_checkpoint_continues_in_any_layout(family: str, tied: bool, tmp_path: Path) -> None:
    model = copy.deepcopy(described(family, tied).model)
    data = reference.batches(described(family).vocabulary_size, SEQUENCES, TOKENS, len(LAYOUTS))
    wanted = reference.train(model, data)
    losses = [
        run_processes(step_of_layout, case.processes, tmp_path, family, tied, number)[0]
        for number, case in enumerate(LAYOUTS)
    ]
    assert losses == pytest.approx(wanted.losses, rel=1e-10)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"export-{len(LAYOUTS) - 1}", dtype=torch.float64)
    found = {name: one.detach() for name, one in exported.named_parameters()}
    error, name = reference.worst(found, wanted.weights)
    assert error < 1e-8, name


# --- what else a run may ask for ------------------------------------------------------------------------------------

ROUTER = 0.5  # coefficient of the routers' loss: far above what transformers takes, so that a wrong one is seen


def steps_without_zero_grad(schedule: str) -> tuple[float, str]:
    """Two batches whose gradients add up, with some parameters frozen; and equal bits on the ranks."""
    model = noisy("qwen3", torch.float64)
    frozen = ("model.layers.1.self_attn.q_norm.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    data = reference.batches(61, 4, TOKENS, 2)
    pipeline = Pipeline(
        model, schedule=schedule, microbatches=2, tensor_parallel=2, parameter_dtype=torch.float64, self_check=False
    )
    for ids, labels in data:
        pipeline.step(ids, labels)
        reference.loss_of(model, ids, labels).backward()
    found = pipeline.full_gradients()
    shared = [one.tensor.grad for one in pipeline._held.shared if one.tensor.grad is not None]
    table = pipeline.gather_numbers([sum(number * float(one.sum()) for number, one in enumerate(shared, 1))])
    pipeline.close()
    ranks = 2
    for device in range(len(table) // ranks):
        assert table[ranks * device] == table[ranks * device + 1]
    if not found:
        return 0.0, ""
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return reference.worst(found, wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_several_steps_add_up(schedule: str) -> None:
    error, name = run_processes(steps_without_zero_grad, 4, schedule)[0]
    assert error < 1e-10, name


def router_loss(replicas: int) -> tuple[float, float, str]:
    with InFp64():  # routers and norms are in fp32 otherwise
        return _router_loss(replicas)


def _router_loss(replicas: int) -> tuple[float, float, str]:
    model = noisy("mixtral", torch.float64, output_router_logits=True, router_aux_loss_coef=ROUTER)
    ((ids, labels),) = reference.batches(61, 4, TOKENS, 1)
    labels = ids.clone()  # every microbatch counts alike
    pipeline = Pipeline(
        model,
        schedule="1f1b",
        microbatches=4 // replicas,
        tensor_parallel=2,
        replicas=replicas,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    own = slice(pipeline.replica * 4 // replicas, (pipeline.replica + 1) * 4 // replicas)
    result = pipeline.step(ids[own], labels[own])
    found, value = pipeline.full_gradients(), result.router_loss
    pipeline.close()
    if not found:
        return 0.0, 0.0, ""
    losses = []
    for one in ids.split(1):
        output = model(input_ids=one, use_cache=False)
        losses.append(torch.stack([reference.loss_of(model, one, one), ROUTER * output.aux_loss]))
    mean = torch.stack(losses).mean(0)
    mean.sum().backward()
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return abs(value / float(mean[1]) - 1), *reference.worst(found, wanted)


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_rank_has_its_share_of_the_routers_gradient(replicas: int) -> None:
    value_error, error, name = run_processes(router_loss, 4, replicas)[0]
    assert value_error < 1e-10 and error < 1e-10, name


def in_another_precision(compute_dtype: torch.dtype, compiled: bool, ranks: int) -> list[dict]:
    """Gradients of eight batches, and their losses."""
    model = noisy("llama", torch.float32)
    pipeline = Pipeline(
        model,
        schedule="zb-h1",
        microbatches=2,
        tensor_parallel=ranks,
        compute_dtype=compute_dtype,
        compile_layers=compiled,
        self_check=False,
    )
    found = []
    for ids, _ in reference.batches(61, 2, TOKENS, 8 if compute_dtype == torch.bfloat16 else 2):
        pipeline.zero_grad()
        loss = pipeline.step(ids).loss
        found.append({"loss": loss, "gradients": pipeline.full_gradients()})
    pipeline.close()
    return found


def test_bf16_is_as_exact_as_in_one_process() -> None:
    errors = reference.Bf16Errors(noisy("llama", torch.float32))
    found = run_processes(in_another_precision, 4, torch.bfloat16, False, 2)[0]
    for one, (ids, _) in zip(found, reference.batches(61, 2, TOKENS, 8), strict=True):
        errors.add(one["gradients"], one["loss"], ids)
    errors.check("tensor ranks")


def test_compiled_layers_give_the_same_gradients() -> None:
    model = noisy("llama", torch.float32)
    found = run_processes(in_another_precision, 2, torch.float32, True, 2)[0]
    for one, (ids, _) in zip(found, reference.batches(61, 2, TOKENS, 2), strict=True):
        model.zero_grad()
        reference.loss_of(model, ids, ids).backward()
        error, name = reference.worst(one["gradients"], {key: value.grad for key, value in model.named_parameters()})
        assert error < 1e-5, name


def bad_input() -> None:
    pipeline = Pipeline(noisy("llama", torch.float32), microbatches=1, tensor_parallel=2, self_check=False)
    with pytest.raises(
        InputError, match=r"7 tokens per sequence, expected a multiple of 2 \(2 tensor ranks\)|refused by"
    ):
        pipeline.step(torch.ones(1, 7, dtype=torch.int64))
    assert pipeline.step(torch.ones(1, 8, dtype=torch.int64)).loss > 0
    pipeline.close()
    layers = [torch.nn.Linear(8, 8)]
    with pytest.raises(InputError, match="tensor_parallel: plain modules do not say how they could be cut"):
        Pipeline.from_modules(
            torch.nn.Embedding(9, 8), layers, None, torch.nn.Linear(8, 9), microbatches=1, tensor_parallel=2
        )


def test_bad_input_is_refused() -> None:
    run_processes(bad_input, 2)
