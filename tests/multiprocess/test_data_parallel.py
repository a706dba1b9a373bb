"""Several pipelines side by side train as transformers does in one process on all their batches together.

Two replicas of two devices: replicated and sharded (FSDP2) x five schedules x two vocabulary modes x tied and untied x
checkpointing; loss, every gradient, their norm, and the weights after three steps of AdamW with clipping.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Callable
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
from test_gradients import described, llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from evenpipe import Pipeline
from evenpipe.checkpoints import find_latest, load, prepare_folder, save
from evenpipe.checkpoints.agreement import Team
from evenpipe.checkpoints.state import tensors_to_save
from evenpipe.communication.communicator import Communicator
from evenpipe.errors import InputError
from evenpipe.interop.torch_csv import from_torch, to_torch
from evenpipe.schedule import Kind, Pass, Program, generate
from evenpipe.schedule.passes import GATHERING_KINDS
from evenpipe.schedule.sharding import part_of

FP64 = torch.float64
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half")
MODES = ("first-last", "vocab-2")
KINDS = ("replicate", "shard")
RESHARD = ({}, {"reshard": True, "prefetch": 0}, {"reshard": True}, {"prefetch": 1})
"""When parameters are gathered and freed, if they are sharded."""
CHECKPOINTING = ("none", "full", "selective")
VOCABULARY, TOKENS, STEPS, MAX_NORM = 97, 6, 3, 0.5

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    kind: str
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    tied: bool = False
    checkpointing: str = "none"
    microbatches: int = 3
    gathering: tuple[tuple[str, Any], ...] = ()
    processes: int = 4


def make(case: Case, *, dtype: torch.dtype = FP64, vocabulary: int = VOCABULARY, **options: Any) -> Pipeline:
    usual = {"schedule": case.schedule, "parameter_dtype": dtype, "self_check": False, "replicas": 2}
    return Pipeline(
        described(vocabulary, case.tied, dtype),
        vocabulary=case.mode,
        microbatches=case.microbatches,
        checkpointing=case.checkpointing,
        data_parallel=case.kind,
        **usual | dict(case.gathering) | options,
    )


def step(pipeline: Pipeline, batches: list[Batch]) -> Any:
    """Each pipeline takes the batch of its number."""
    ids, labels = batches[pipeline.replica] if pipeline.device == 0 else (None, None)
    return pipeline.step(ids, labels)


def split(data: list[Batch], replicas: int = 2) -> list[list[Batch]]:
    """[step][replica]: an equal part of each batch."""
    parts = [(ids.chunk(replicas), labels.chunk(replicas)) for ids, labels in data]
    return [list(zip(ids, labels, strict=True)) for ids, labels in parts]


def is_first(pipeline: Pipeline) -> bool:
    return pipeline.device == pipeline.replica == 0


# --- the matrix ------------------------------------------------------------------------------------------


@cache
def expected(tied: bool, sequences: int) -> tuple[list[Batch], reference.Reference]:
    """transformers on the whole batch, clipped, three steps."""
    data = reference.batches(VOCABULARY, sequences, TOKENS, STEPS)
    return data, reference.train(copy.deepcopy(described(VOCABULARY, tied, FP64).model), data, MAX_NORM)


def run_case(case: Case, number: int) -> list[str]:
    """What is wrong with a case, on the first process; every process checks that loss and norm are the same for all."""
    data, wanted = expected(case.tied, 4 * case.microbatches)
    ways: list[Callable[[], dict[str, Any]]] = [
        lambda: {"replicas": 2},
        lambda: {"replicas": None, "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))},
        lambda: {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))},
        lambda: {"mesh": DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "pp"))},
    ]
    pipeline = make(case, **ways[number % len(ways)]())
    optimizer = reference.adamw(list(pipeline.parameters()))
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for batches in split(data):
        first = not losses
        pipeline.zero_grad()
        result = step(pipeline, batches)
        assert result.tokens == sum(int((labels[:, 1:] != reference.IGNORE).sum()) for _, labels in batches)
        losses.append(result.loss)
        if first:
            gradients = pipeline.full_gradients()
        norms.append(pipeline.clip_gradients(MAX_NORM))
        optimizer.step()
    weights = pipeline.full_state_dict()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (losses, norms))
    assert all(one == seen[0] for one in seen), seen
    pipeline.close()
    if not is_first(pipeline):
        assert not gradients and not weights
        return []
    errors = {
        "losses": (max(abs(a / b - 1) for a, b in zip(losses, wanted.losses, strict=True)), 1e-8),
        "loss": (abs(losses[0] / wanted.losses[0] - 1), 1e-10),
        "norm": (abs(norms[0] / wanted.norms[0] - 1), 1e-10),
        "gradient": (reference.worst(gradients, wanted.gradients)[0], 1e-10),
        "weights": (reference.worst(weights, wanted.weights)[0], 1e-8),
    }
    return [f"{case}: {name} {error:.1e}" for name, (error, limit) in errors.items() if not error <= limit]


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for number, case in enumerate(cases) for fault in run_case(case, number)]


MATRIX = [
    Case(kind, schedule, mode, tied, checkpointing, gathering=tuple(gathering.items()))
    for kind, schedule, mode, tied, checkpointing in itertools.product(
        KINDS, SCHEDULES, MODES, (False, True), CHECKPOINTING
    )
    for gathering in (RESHARD if kind == "shard" else RESHARD[:1])
]


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_train_as_one_process_on_both_batches(kind: str, sample) -> None:
    check_cases(run_cases, sample([case for case in MATRIX if case.kind == kind], 8))


def test_tied_matrices_in_shards_meet_row_by_row_whatever_the_ranks_of_the_mesh() -> None:
    """In the last of the meshes the replicas are in another order on the first device than on the last one."""
    faults = run_processes(run_case, 4, Case("shard", mode="first-last", tied=True), 3)
    assert not faults[0], "\n".join(faults[0])


# --- when parameters are gathered ------------------------------------------------------------------------


def gathered(schedule: str, mode: str, tied: bool) -> None:
    """However often they are gathered, results are the same bits, and so many bytes travel as the program says."""
    data, _ = expected(tied, 12)
    results = []
    sizes: Counter[str] = Counter()
    for options in RESHARD:
        sent: Counter[str] = Counter()
        real = Communicator.all_gather

        def counting(self: Any, output: Tensor, tensor: Tensor, what: str, sent: Counter[str] = sent) -> Any:
            sent[what] += tensor.numel() * tensor.element_size()
            return real(self, output, tensor, what)

        case = Case("shard", schedule, mode, tied, gathering=tuple(options.items()))
        pipeline = make(case, dtype=torch.float32)
        with mock.patch.object(Communicator, "all_gather", counting):
            result = step(pipeline, split(data)[0])
        parameters = {name: one.grad for name, one in pipeline.named_parameters()}
        results.append((result.loss, parameters))
        items = [item for item in pipeline.layout.program.rows[pipeline.device] if isinstance(item, Pass)]
        often = Counter(part_of(item) for item in items if item.kind in GATHERING_KINDS)
        found = {what: size for what, size in sent.items() if what.startswith("parameters of ")}
        if not options:
            assert set(often.values()) == {1}
            sizes.update(found)
        placement = pipeline.layout.program.placement
        embedding = next((part for part in (Kind.E, Kind.S) if part in often), placement.first_stage)
        head = Kind.S if Kind.S in often else placement.last_stage
        for what, size in sizes.items():
            name = what.removeprefix("parameters of ")
            whole = embedding if name == pipeline.description.embedding_name else head
            part = int(name.removeprefix("stage ")) if name.startswith("stage ") else whole
            assert found[what] == often[part] * size, what
        if options == {"reshard": True, "prefetch": 0} and len(often) > 1:
            assert max(often.values()) > 1, "some part is freed and gathered again"
        pipeline.close()
    first_loss, first = results[0]
    for loss, gradients in results[1:]:
        assert loss == first_loss
        assert gradients.keys() == first.keys()
        assert all(torch.equal(gradients[name], first[name]) for name in first)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("schedule", "mode"), [("1f1b", "vocab-2"), ("interleaved", "vocab-1"), ("v-half", "first-last")]
)
def test_gathering_again_gives_the_same_bits_and_sends_what_the_program_says(
    schedule: str, mode: str, tied: bool
) -> None:
    run_processes(gathered, 4, schedule, mode, tied)


def lowered_by_torch(schedule: str) -> Program:
    """As torch's runtime reads it: three stages of a device are gathered at a time."""
    program = from_torch(to_torch(generate(schedule, 2, 3), lowered=True))
    assert isinstance(program, Program)
    return program


def as_torch_gathers(schedule: str, tied: bool) -> list[str]:
    """What a program has is kept, and what it lacks is added: torch gathers whole vocabulary layers with their
    stages."""
    program = lowered_by_torch(schedule)
    case = Case("shard", mode="first-last", tied=tied)
    pipeline = make(case, schedule=program)
    found = pipeline.layout.program
    added = [item for row in found.rows for item in row if item and item.kind.value.endswith("_S")]
    kept = tuple(tuple(item for item in row if item not in added) for row in found.rows)
    assert kept == tuple(tuple(item for item in row if item) for row in program.rows)
    both_ends = found.placement.first_device == found.placement.last_device
    assert bool(added) == (tied and both_ends)
    data, wanted = expected(tied, 12)
    result = step(pipeline, split(data)[0])
    gradients = pipeline.full_gradients()
    pipeline.close()
    if not is_first(pipeline):
        return []
    error = max(abs(result.loss / wanted.losses[0] - 1), reference.worst(gradients, wanted.gradients)[0])
    return [] if error <= 1e-10 else [f"{schedule}, tied {tied}: {error:.1e}"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gis", "zbv", "dualpipe-v"])
@pytest.mark.sampled(2)
def test_a_program_of_torch_gathers_and_sums_where_it_says(schedule: str, tied: bool) -> None:
    faults = run_processes(as_torch_gathers, 4, schedule, tied)
    assert not faults[0], "\n".join(faults[0])


# --- batches that differ ---------------------------------------------------------------------------------


def reference_of(tied: bool, batches: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of transformers for (ids, labels, weights) of all replicas, whatever their shapes."""
    model = copy.deepcopy(described(VOCABULARY, tied, FP64).model)
    total = sum(float(weights[:, 1:][labels[:, 1:] != reference.IGNORE].sum()) for _, labels, weights in batches)
    losses = []
    for ids, labels, weights in batches:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        per_token = functional.cross_entropy(
            logits, labels[:, 1:].flatten(), ignore_index=reference.IGNORE, reduction="none"
        )
        losses.append((per_token * weights[:, 1:].flatten()).sum() / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients(pipeline: Pipeline, wanted: dict[str, Tensor], what: str = "") -> None:
    found = pipeline.full_gradients()
    if is_first(pipeline):
        error, name = reference.worst(found, wanted)
        assert error <= 1e-10, f"{what} {name}: {error:.1e}"


def ragged(replicas: int, *, silent: int | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A batch per replica, each of other size and length; none of the labels of replica `silent` counts."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for replica in range(replicas):
        ids = torch.randint(0, VOCABULARY, (2 * (replica + 1), 5 + 3 * replica), generator=generator)
        labels = ids.clone()
        labels[torch.rand(ids.shape, generator=generator) < 0.2 + 0.2 * replica] = reference.IGNORE
        if replica == silent:
            labels[:] = reference.IGNORE
        batches.append((ids, labels, torch.rand(ids.shape, generator=generator, dtype=FP64)))
    return batches


def batches_that_differ(replicas: int) -> None:
    modes = MODES if dist.get_world_size() > replicas else MODES[:1]
    for kind, mode, (silent, weighted) in itertools.product(KINDS, modes, ((None, True), (0, False))):
        batches = ragged(replicas, silent=silent)
        if not weighted:
            batches = [(ids, labels, torch.ones_like(weights)) for ids, labels, weights in batches]
        wanted, gradients = reference_of(True, batches)
        pipeline = make(Case(kind, mode=mode, tied=True, microbatches=2), replicas=replicas)
        ids, labels, weights = batches[pipeline.replica]
        result = pipeline.step(ids, labels, token_weights=weights if weighted else None)
        assert result.loss == pytest.approx(wanted, rel=1e-10)
        assert result.tokens == sum(int((labels[:, 1:] != reference.IGNORE).sum()) for _, labels, _ in batches)
        assert_gradients(pipeline, gradients, f"{kind} {mode}")
        before = pipeline.full_state_dict()
        evaluated = pipeline.evaluate(ids, labels, token_weights=weights if weighted else None)
        assert evaluated.loss == pytest.approx(wanted, rel=1e-10)
        assert evaluated.log_probabilities.shape == ids.shape
        assert_gradients(pipeline, gradients, "after evaluation")
        after = pipeline.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        pipeline.close()


@pytest.mark.parametrize(("processes", "replicas"), [(4, 2), (2, 2), (3, 3)])
@pytest.mark.sampled(1)
def test_replicas_may_have_batches_of_any_size_length_and_number_of_labels(processes: int, replicas: int) -> None:
    run_processes(batches_that_differ, processes, replicas)


def no_label_at_all(kind: str) -> None:
    pipeline = make(Case(kind))
    ids = torch.zeros(3, 4, dtype=torch.int64)
    result = pipeline.step(ids, torch.full_like(ids, reference.IGNORE))
    assert (result.loss, result.tokens) == (0, 0)
    assert pipeline.clip_gradients(1.0) == 0
    pipeline.close()


def gradients_of_several_steps(kind: str) -> None:
    """Sums over steps: those of earlier steps are sums over replicas already, and enter the next one once."""
    data = reference.batches(VOCABULARY, 8, TOKENS, 3)
    for mode, tied, schedule in (("first-last", True, "1f1b"), ("first-last", False, "zbv"), ("vocab-2", True, "zbv")):
        model = copy.deepcopy(described(VOCABULARY, tied, FP64).model)
        pipeline = make(Case(kind, schedule, mode, tied, microbatches=4))
        for (ids, labels), batches in zip(data, split(data), strict=True):
            reference.loss_of(model, ids, labels).backward()
            step(pipeline, batches)
            assert_gradients(pipeline, {name: p.grad for name, p in model.named_parameters()}, f"{mode} {schedule}")
        pipeline.zero_grad()
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        model.zero_grad()
        reference.loss_of(model, *data[0]).backward()
        step(pipeline, split(data)[0])
        assert_gradients(pipeline, {name: p.grad for name, p in model.named_parameters()}, "after zero_grad")
        pipeline.close()
    no_label_at_all(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_gradients_add_up_over_steps(kind: str) -> None:
    run_processes(gradients_of_several_steps, 4, kind)


# --- bf16 ------------------------------------------------------------------------------------------------


def in_bf16(kind: str) -> None:
    """bf16 against fp32 in one process, measured by the error of bf16 in one process."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(0, VOCABULARY, (8, 8, 16), generator=generator).unbind()
    for schedule, mode in zip(("1f1b", "zbv"), MODES, strict=True):
        errors = reference.Bf16Errors(llama(VOCABULARY, False, torch.float32))
        case = Case(kind, schedule, mode, microbatches=2)
        pipeline = make(case, dtype=torch.float32, compute_dtype=torch.bfloat16)
        for ids in batches:
            pipeline.zero_grad()
            loss = step(pipeline, [(part, part) for part in ids.chunk(2)]).loss
            for parameter in pipeline.parameters():
                assert parameter.dtype == parameter.grad.dtype == torch.float32
            found = pipeline.full_gradients()
            if is_first(pipeline):
                errors.add(found, loss, ids)
        errors.check(str(case))
        pipeline.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_bf16_errs_no_more_than_bf16_in_one_process(kind: str) -> None:
    run_processes(in_bf16, 4, kind)


# --- what is held where ----------------------------------------------------------------------------------


def held_between_steps() -> list[int]:
    """Elements of parameters and optimizer state; nothing whole is left of what is in shards."""
    counts = []
    for mode in MODES:
        pipeline = make(Case("shard", mode=mode))
        optimizer = reference.adamw(list(pipeline.parameters()))
        ids = torch.arange(15).reshape(3, 5)
        for run in (pipeline.step, pipeline.evaluate):
            run(ids)
            optimizer.step()
            whole = [one for part in pipeline._held.parts for one in part.parameters._parameters]
            assert whole and all(one.whole.untyped_storage().size() == 0 for one in whole)
            assert all(one.whole.grad is None and one.summed.value is None for one in whole)
        counts.append(sum(parameter.numel() for parameter in pipeline.parameters()))
        states = [state for parameter in pipeline.parameters() for state in optimizer.state[parameter].values()]
        assert sum(state.numel() for state in states if state.dim()) == 2 * counts[-1]
        assert all(type(parameter) is torch.nn.Parameter for parameter in pipeline.parameters())
        pipeline.close()
    return counts


def test_shards_are_all_that_is_held_between_steps() -> None:
    first_last, spread = zip(*run_processes(held_between_steps, 4), strict=True)
    whole = sum(parameter.numel() for parameter in described(VOCABULARY, False, FP64).model.parameters())
    assert sum(first_last) == sum(spread) == whole
    assert max(spread) <= 1.05 * whole / 4


def places_of_the_sums() -> list[tuple[str, str, list[str]]]:
    """For each schedule and mode, the row of device 0 and, for each sum, after which pass it was issued."""
    found = []
    for schedule, mode in itertools.product(("1f1b", "zbv"), MODES):
        pipeline = make(Case("replicate", schedule, mode, tied=False))
        issued = []
        replicas = pipeline._groups.replicas
        plain = replicas.all_reduce

        def noted(tensor, what, plain=plain, issued=issued):
            issued.append((what, time.perf_counter()))
            return plain(tensor, what)

        replicas.all_reduce = noted
        passes = pipeline.step(torch.arange(15).reshape(3, 5), record_passes=True).record.passes
        places = [
            f"{what} after {[entry.item for entry in passes if entry.end <= moment][-1]}" for what, moment in issued
        ]
        row = " ".join(map(str, (item for item in pipeline.order.rows[0] if item is not None)))
        found.append((mode, row, places) if pipeline.device == 0 else (mode, "", places))
        pipeline.close()
    return found


def test_sums_are_issued_after_the_last_gradient_of_each_part() -> None:
    results = run_processes(places_of_the_sums, 4)
    assert results[0] == results[1] and results[2] == results[3], "replicas issue sums in different orders"
    for mode, row, places in results[0]:
        passes = row.split()
        for stage in {text[0] for text in passes if text[0].isdigit()}:
            last = [text for text in passes if text[0] == stage and text[1] in "BW"][-1]
            assert f"gradients of stage {stage} after {last}" in places, (row, places)
        if mode == "vocab-2":
            ends = {kind: [text for text in passes if text[0] == kind][-1] for kind in "TG"}
            assert f"gradients of output layer after {ends['T']}" in places, (row, places)
            assert f"gradients of embedding after {ends['G']}" in places, (row, places)


# --- weights that differ, parameters without gradients ---------------------------------------------------


class Odd(nn.Module):
    """A layer with parameters to stumble over: used twice, of one row, frozen, without a gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.rand(1))
        self.frozen = nn.Parameter(torch.rand(size), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(3, size))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(torch.tanh(self.linear(hidden))) * self.scale * self.frozen


def odd_modules(kind: str) -> None:
    ids = torch.arange(24).reshape(4, 6)
    for mode, schedule in itertools.product(MODES, ("1f1b", "zb-h1")):
        torch.manual_seed(dist.get_rank())  # every process has drawn other weights
        embedding, head = nn.Embedding(VOCABULARY, 8, dtype=FP64), nn.Linear(8, VOCABULARY, dtype=FP64)
        layers = [Odd(8).double() for _ in range(4)]
        norm = nn.LayerNorm(8, dtype=FP64)
        pipeline = Pipeline.from_modules(
            embedding,
            layers,
            norm,
            head,
            schedule=schedule,
            vocabulary=mode,
            microbatches=2,
            parameter_dtype=FP64,
            replicas=2,
            data_parallel=kind,
        )
        weights = pipeline.full_state_dict()
        loss = pipeline.step(ids[:2] if pipeline.replica == 0 else ids[2:]).loss
        found = pipeline.full_gradients()
        assert pipeline.clip_gradients(1e9) > 0
        for name, parameter in pipeline.named_parameters():
            assert (parameter.grad is None) == ("frozen" in name or "unused" in name), name
        if is_first(pipeline):
            whole = nn.ModuleDict({"embedding": embedding, "layers": nn.ModuleList(layers), "norm": norm, "head": head})
            whole.load_state_dict(weights, strict=False)
            hidden = embedding(ids)
            for layer in layers:
                hidden = layer(hidden)
            logits = head(norm(hidden))[:, :-1].flatten(0, 1)
            wanted = functional.cross_entropy(logits, ids[:, 1:].flatten())
            wanted.backward()
            assert loss == pytest.approx(wanted.item(), rel=1e-12)
            expected_gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
            error, name = reference.worst({name: found[name] for name in expected_gradients}, expected_gradients)
            assert error < 1e-10, f"{mode} {name}: {error:.1e}"
        pipeline.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_replicas_start_from_one_set_of_weights_and_odd_parameters_are_served(kind: str) -> None:
    run_processes(odd_modules, 4, kind)


# --- checkpoints -----------------------------------------------------------------------------------------

LAYOUTS = [
    {"replicas": 2, "data_parallel": "shard", "vocabulary": "vocab-2", "schedule": "zbv"},
    {"replicas": 1, "vocabulary": "vocab-1"},
    {"replicas": 4, "data_parallel": "shard", "vocabulary": "vocab-2"},
    {"replicas": 2, "data_parallel": "replicate", "vocabulary": "vocab-2", "schedule": "interleaved"},
    {"replicas": 2, "data_parallel": "shard", "vocabulary": "first-last", "schedule": "zb-h1"},
    {"replicas": 4, "data_parallel": "replicate", "vocabulary": "first-last"},
]
"""Of four processes; each goes on from the checkpoint of the one before, with the same batch for all replicas."""


def through_layouts(folder: Path, tied: bool) -> None:
    data = reference.batches(VOCABULARY, 16, TOKENS, len(LAYOUTS))
    wanted = reference.train(copy.deepcopy(described(VOCABULARY, tied, FP64).model), data)
    for number, options in enumerate(LAYOUTS):
        case = Case("", tied=tied, schedule=options.get("schedule", "1f1b"), microbatches=2)
        made = {"data_parallel": "replicate", "vocabulary": "vocab-2"} | options
        pipeline = Pipeline(
            described(VOCABULARY, tied, FP64),
            microbatches=case.microbatches,
            parameter_dtype=FP64,
            self_check=False,
            **made,
        )
        optimizer = reference.adamw(list(pipeline.parameters()))
        group = pipeline.process_group
        prepare_folder(folder, group)
        found = find_latest(folder, group)
        assert (found.checkpoint is None) == (number == 0)
        if found.checkpoint is not None:
            load(found.checkpoint, pipeline.parameter_shards(), optimizer, group)
        loss = step(pipeline, split([data[number]], pipeline.replicas)[0]).loss
        assert loss == pytest.approx(wanted.losses[number], rel=1e-8), (number, options)
        optimizer.step()
        assert_saved_once(pipeline, optimizer)
        save(folder, number + 1, pipeline.parameter_shards(), optimizer, {}, group, keep=1)
        if number + 1 == len(LAYOUTS):
            weights = pipeline.full_state_dict()
            if is_first(pipeline):
                assert reference.worst(weights, wanted.weights)[0] <= 1e-8
        pipeline.close()


def assert_saved_once(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Parameters and two moments, and a number of steps for each parameter."""
    team = Team(pipeline.process_group)
    state = tensors_to_save(pipeline.parameter_shards(), optimizer)
    whole = dict(described(VOCABULARY, pipeline.description.tied, FP64).model.named_parameters())
    saved = sum(team.gather(sum(held.tensor.numel() for held in state.values())))
    assert saved == 3 * sum(parameter.numel() for parameter in whole.values()) + len(whole)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled(1)
def test_a_checkpoint_goes_on_with_other_replicas_and_shards(tmp_path: Path, tied: bool) -> None:
    run_processes(through_layouts, 4, tmp_path, tied)


def saved_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    for kind in KINDS:
        pipeline = make(Case(kind))
        pipeline.save_pretrained(folder / kind)
        if is_first(pipeline):
            loaded = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=FP64).state_dict()
            for name, tensor in described(VOCABULARY, False, FP64).model.state_dict().items():
                assert torch.equal(loaded[name], tensor), name
        again = Pipeline(
            str(folder / kind), microbatches=1, replicas=2, data_parallel=kind, parameter_dtype=FP64, self_check=False
        )
        ids = torch.arange(6).reshape(1, 6)
        assert again.evaluate(ids).loss == pytest.approx(pipeline.evaluate(ids.expand(3, 6)).loss, rel=1e-12)
        pipeline.close()
        again.close()


def test_a_saved_model_loads_in_transformers_and_here(tmp_path: Path) -> None:
    run_processes(saved_folder, 4, tmp_path)


def first_on_a_later_rank(folder: Path) -> None:
    """Two pipelines of one device; the first of them is process 1."""
    from transformers import AutoModelForCausalLM

    mesh = DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("dp", "pp"))
    pipeline = make(Case("shard", microbatches=1), mesh=mesh)
    step(pipeline, split(reference.batches(VOCABULARY, 2, TOKENS, 1))[0])
    assert is_first(pipeline) == (dist.get_rank() == 1)
    assert bool(pipeline.full_gradients()) == is_first(pipeline)
    assert [row[0] for row in pipeline.gather_numbers([dist.get_rank()])] == [1.0, 0.0]
    pipeline.save_pretrained(folder / "model")
    if is_first(pipeline):
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=FP64)
    pipeline.close()


def test_whole_tensors_come_out_on_the_first_process_of_any_mesh(tmp_path: Path) -> None:
    run_processes(first_on_a_later_rank, 2, tmp_path)


# --- bad input -------------------------------------------------------------------------------------------


class WithNumber(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.number = nn.Parameter(torch.tensor(1.0))


def bad_input() -> None:
    def mesh(shape: tuple[int, ...], *names: str) -> DeviceMesh:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    for text, options in {
        'one named "pp"': {"mesh": mesh((2, 2), "dp", "tp"), "replicas": None},
        "axes {'sp': 2} beside": {"mesh": mesh((2, 2), "sp", "pp"), "replicas": None},
        "tensor_parallel: 3, expected a divisor of 2": {"tensor_parallel": 3, "replicas": 2},
        "tensor_parallel: 0, expected a whole number": {"tensor_parallel": 0},
        "tensor_parallel: 4, expected 2": {"mesh": mesh((2, 2), "tp", "pp"), "tensor_parallel": 4, "replicas": None},
        "context_parallel: 4, expected 2": {"mesh": mesh((2, 2), "cp", "pp"), "context_parallel": 4, "replicas": None},
        "expert_parallel: 4, expected 1, since LlamaForCausalLM": {"mesh": mesh((4, 1), "ep", "pp"), "replicas": None},
        "1 x 2 processes (dp x pp, ranks": {"mesh": mesh((2, 2), "dp", "pp")["pp"], "replicas": None},
        "replicas: 3, expected a divisor of 4": {"replicas": 3},
        "replicas: 0, expected a whole number": {"replicas": 0},
        "replicas: 4, expected 2": {"mesh": mesh((2, 2), "dp", "pp"), "replicas": 4},
        "data_parallel: 'sharded', expected 'replicate' or 'shard'": {"data_parallel": "sharded"},
    }.items():
        with pytest.raises(InputError) as caught:
            Pipeline(described(VOCABULARY, False, FP64), microbatches=1, **options)
        assert text in str(caught.value)
    layers = [WithNumber() for _ in range(2)]
    with pytest.raises(InputError, match=r"layers\.0\.number of .* is a single number"):
        Pipeline.from_modules(
            nn.Embedding(9, 8), layers, None, nn.Linear(8, 9), microbatches=1, replicas=2, data_parallel="shard"
        )
    with pytest.raises(InputError, match="1 x 3 processes"):
        Pipeline(described(VOCABULARY, False, FP64), mesh=DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("pp",)))
    one_refuses()


def one_refuses() -> None:
    """A batch that one first process refuses is refused by all, and nothing is lost."""
    pipeline = make(Case("replicate", microbatches=2))
    good, bad = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64)
    for refusing in range(2):
        with pytest.raises(InputError) as caught:
            pipeline.step(bad if pipeline.replica == refusing else good)
        said = "3 sequences" if pipeline.replica == refusing else "of another pipeline"
        assert (said if pipeline.device == 0 else "the first process of the pipeline") in str(caught.value)
    assert pipeline.step(good).loss > 0
    pipeline.close()


def test_bad_input_is_one_sentence_on_every_process() -> None:
    run_processes(bad_input, 4)
