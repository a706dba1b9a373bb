"""Several pipelines side by side: when parameters are gathered, what is held between steps, when sums are issued, whole
tensors on any mesh, and what is refused.

Gradients, norms and trained weights of replicas and shards are compared with one process by tests/fuzz.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from small_llama import described, llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from evenpipe import Pipeline
from evenpipe.checkpoints.agreement import Team
from evenpipe.checkpoints.state import tensors_to_save
from evenpipe.communication.communicator import Communicator
from evenpipe.errors import InputError
from evenpipe.interop.torch_csv import from_torch, to_torch
from evenpipe.schedule import Kind, Pass, Program, generate
from evenpipe.schedule.passes import GATHERING_KINDS
from evenpipe.schedule.sharding import part_of

FP64, VOCABULARY, TOKENS = torch.float64, 97, 6
MODES = ("first-last", "vocab-2")
KINDS = ("replicate", "shard")
RESHARD: tuple[dict[str, Any], ...] = ({}, {"reshard": True, "prefetch": 0}, {"reshard": True}, {"prefetch": 1})
"""When parameters are gathered and freed, if they are sharded."""

Batch = tuple[Tensor, Tensor]


def make(
    kind: str, mode: str = "vocab-2", *, tied: bool = False, dtype: torch.dtype = FP64, **options: Any
) -> Pipeline:
    usual = {"microbatches": 3, "parameter_dtype": dtype, "self_check": False, "replicas": 2}
    return Pipeline(described(VOCABULARY, tied, dtype), vocabulary=mode, data_parallel=kind, **usual | options)


def batch_of(pipeline: Pipeline) -> Batch:
    """One of twelve rows, of which each replica takes its part."""
    ids, labels = data()
    return ids.chunk(pipeline.replicas)[pipeline.replica], labels.chunk(pipeline.replicas)[pipeline.replica]


def data() -> Batch:
    return reference.batches(VOCABULARY, 12, TOKENS, 1)[0]


def is_first(pipeline: Pipeline) -> bool:
    return pipeline.device == pipeline.replica == 0


# --- when parameters are gathered ------------------------------------------------------------------------


def gathered(schedule: str, mode: str, tied: bool) -> None:
    """However often they are gathered, results are the same bits, and so many bytes travel as the program says."""
    results = []
    sizes: Counter[str] = Counter()
    for options in RESHARD:
        sent: Counter[str] = Counter()
        real = Communicator.all_gather

        def counting(self: Any, output: Tensor, tensor: Tensor, what: str, sent: Counter[str] = sent) -> Any:
            sent[what] += tensor.numel() * tensor.element_size()
            return real(self, output, tensor, what)

        pipeline = make("shard", mode, tied=tied, dtype=torch.float32, schedule=schedule, **options)
        with mock.patch.object(Communicator, "all_gather", counting):
            result = pipeline.step(*batch_of(pipeline))
        gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        results.append((result.loss, gradients))
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


@pytest.mark.sampled(1)
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
    pipeline = make("shard", "first-last", tied=tied, schedule=program)
    found = pipeline.layout.program
    added = [item for row in found.rows for item in row if item and item.kind.value.endswith("_S")]
    kept = tuple(tuple(item for item in row if item not in added) for row in found.rows)
    assert kept == tuple(tuple(item for item in row if item) for row in program.rows)
    both_ends = found.placement.first_device == found.placement.last_device
    assert bool(added) == (tied and both_ends)
    loss = pipeline.step(*batch_of(pipeline)).loss
    gradients = pipeline.full_gradients()
    pipeline.close()
    if not is_first(pipeline):
        return []
    expected = reference.train(copy.deepcopy(described(VOCABULARY, tied, FP64).model), [data()])
    error = max(abs(loss / expected.losses[0] - 1), reference.worst(gradients, expected.gradients)[0])
    return [] if error <= 1e-10 else [f"{schedule}, tied {tied}: {error:.1e}"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gis", "zbv", "dualpipe-v"])
@pytest.mark.sampled(1)
def test_a_program_of_torch_gathers_and_sums_where_it_says(schedule: str, tied: bool) -> None:
    faults = run_processes(as_torch_gathers, 4, schedule, tied)
    assert not faults[0], "\n".join(faults[0])


# --- bf16 ------------------------------------------------------------------------------------------------


def in_bf16(kind: str) -> None:
    """bf16 against fp32 in one process, measured by the error of bf16 in one process."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(0, VOCABULARY, (8, 8, 16), generator=generator).unbind()
    for schedule, mode in zip(("1f1b", "zbv"), MODES, strict=True):
        errors = reference.Bf16Errors(llama(VOCABULARY, False, torch.float32))
        options = {"schedule": schedule, "microbatches": 2, "compute_dtype": torch.bfloat16}
        pipeline = make(kind, mode, dtype=torch.float32, **options)
        for ids in batches:
            pipeline.zero_grad()
            loss = pipeline.step(ids.chunk(2)[pipeline.replica]).loss
            for parameter in pipeline.parameters():
                assert parameter.dtype == parameter.grad.dtype == torch.float32
            gradients = pipeline.full_gradients()
            if is_first(pipeline):
                errors.add(gradients, loss, ids)
        errors.check(f"{kind}, {schedule}, {mode}")
        pipeline.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_bf16_errs_no_more_than_bf16_in_one_process(kind: str) -> None:
    run_processes(in_bf16, 4, kind)


# --- what is held where ----------------------------------------------------------------------------------


def held_between_steps() -> list[int]:
    """Elements of parameters and optimizer state; nothing whole is left of what is in shards."""
    counts = []
    for mode in MODES:
        pipeline = make("shard", mode)
        optimizer = reference.adamw(list(pipeline.parameters()))
        ids = torch.arange(15).reshape(3, 5)
        for run in (pipeline.step, pipeline.evaluate):
            run(ids)
            optimizer.step()
            assert_saved_once(pipeline, optimizer)
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


def assert_saved_once(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint has every parameter and its two moments once, and a number of steps for each parameter."""
    team = Team(pipeline.process_group)
    state = tensors_to_save(pipeline.parameter_shards(), optimizer)
    whole = dict(described(VOCABULARY, pipeline.description.tied, FP64).model.named_parameters())
    saved = sum(team.gather(sum(held.tensor.numel() for held in state.values())))
    assert saved == 3 * sum(parameter.numel() for parameter in whole.values()) + len(whole)


def places_of_the_sums() -> list[tuple[str, str, list[str]]]:
    """For each schedule and mode, the row of device 0 and, for each sum, after which pass it was issued."""
    found = []
    for schedule, mode in itertools.product(("1f1b", "zbv"), MODES):
        pipeline = make("replicate", mode, schedule=schedule)
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


# --- whole tensors -----------------------------------------------------------------------------------------


def first_on_a_later_rank(folder: Path) -> None:
    """Two pipelines of one device; the first of them is process 1."""
    mesh = DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("dp", "pp"))
    pipeline = make("shard", mesh=mesh)
    pipeline.step(*batch_of(pipeline))
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
        table = torch.arange(math.prod(shape)).view(shape)
        return DeviceMesh("cpu", table, mesh_dim_names=names, _init_backend=False)  # without groups, which take time

    for text, options in {
        'one named "pp"': {"mesh": mesh((2, 2), "dp", "tp"), "replicas": None},
        "axes {'sp': 2} beside": {"mesh": mesh((2, 2), "sp", "pp"), "replicas": None},
        "tensor_parallel: 3, expected a divisor of 2": {"tensor_parallel": 3, "replicas": 2},
        "tensor_parallel: 0, expected a whole number": {"tensor_parallel": 0},
        "tensor_parallel: 4, expected 2": {"mesh": mesh((2, 2), "tp", "pp"), "tensor_parallel": 4, "replicas": None},
        "context_parallel: 4, expected 2": {"mesh": mesh((2, 2), "cp", "pp"), "context_parallel": 4, "replicas": None},
        "expert_parallel: 4, expected 1, since LlamaForCausalLM": {"mesh": mesh((4, 1), "ep", "pp"), "replicas": None},
        "1 x 2 processes (dp x pp, ranks": {
            "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))["pp"],
            "replicas": None,
        },
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


def one_refuses(pipeline: Pipeline) -> None:
    """A batch that one first process refuses is refused by all, and nothing is lost."""
    good, bad = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64)
    for refusing in range(2):
        with pytest.raises(InputError) as caught:
            pipeline.step(bad if pipeline.replica == refusing else good)
        said = "3 sequences" if pipeline.replica == refusing else "of another pipeline"
        assert (said if pipeline.device == 0 else "the first process of the pipeline") in str(caught.value)
    assert pipeline.step(good).loss > 0


def wrong_input() -> None:
    with contextlib.closing(make("replicate", microbatches=2)) as pipeline:  # or each refusal would end the watch
        bad_input()
        one_refuses(pipeline)


def test_bad_input_is_one_sentence_on_every_process() -> None:
    run_processes(wrong_input, 4)
