"""Schedules that a pipeline is given: torch's as instances and lowered files, and programs of ours, walked unchanged.

torch's classes, and orders, programs, files and functions of ours, are among the pipelines of tests/fuzz. And our
orders in torch's own runtime, from compute-only files and from lowered ones: gradients are those of one process.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from small_llama import llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules as torch_schedules
from torch_orders import Size, file_of_torch, mock_stages

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.interop import from_torch, to_torch
from evenpipe.model import describe
from evenpipe.schedule import (
    SCHEDULES,
    Costs,
    Order,
    Program,
    add_communication,
    generate,
    plan_program,
    without_offload,
)

SEVERAL = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Those of two stages per rank; torch writes no files of the others."""
LAYERS, VOCABULARY, TOKENS = 6, 1003, 6


@cache
def described():
    return describe(llama(VOCABULARY, False, torch.float64, LAYERS))


@cache
def expected(sequences: int):
    data = reference.batches(VOCABULARY, sequences, TOKENS, steps=1)
    return data[0], reference.train(copy.deepcopy(described().model), data)


def trained(schedule: Any, mode: str, microbatches: int | None = None, **options: Any) -> Pipeline:
    """A pipeline after one step, whose loss and gradients were compared with one process."""
    pipeline = Pipeline(
        described(),
        schedule=schedule,
        vocabulary=mode,
        microbatches=microbatches,
        parameter_dtype=torch.float64,
        self_check=False,
        **options,
    )
    (ids, labels), wanted = expected(2 * pipeline.microbatches)
    result = pipeline.step(ids, labels)
    assert abs(result.loss / wanted.losses[0] - 1) <= 1e-10, (schedule, mode)
    gradients = pipeline.full_gradients()
    if pipeline.device == 0:
        error, name = reference.worst(gradients, wanted.gradients)
        assert error <= 1e-10, f"{schedule}, {mode}: gradient of {name} is off by {error:.1e}"
    pipeline.close()
    return pipeline


# --- torch's schedules ------------------------------------------------------------------------------------------------


def run_torch(folder: Path, names: list[str]) -> None:
    """As an instance, whose size is known, and as the file that torch lowers, UNSHARD and REDUCE_GRAD included."""
    devices, own = dist.get_world_size(), folder / str(dist.get_rank())
    own.mkdir()
    for name in names:
        stages_per_device = 2 if name in SEVERAL else 1
        stages = mock_stages(Size(devices, stages_per_device, 2 * devices))
        schedule = torch_schedules.get_schedule_class(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            instance = schedule(stages if name in SEVERAL else stages[0], 2 * devices, loss_fn=torch.nn.MSELoss())
            assert trained(instance, "vocab-2").order.placement.stages == devices * stages_per_device
        for file_format in ("compute_only", "compute_comms") if name in SEVERAL else ():
            text = file_of_torch(name, Size(devices, 2, 2 * devices), own, file_format)
            file = own / f"{name}-{file_format}.csv"
            file.write_text(text)
            whole, spread = trained(file, "first-last"), trained(str(file), "vocab-2")
            assert whole.predict("vocab-2").busy == spread.predict().busy
            if file_format == "compute_comms":
                assert whole.program == from_torch(text)
                assert any("UNSHARD" in str(item) for item in whole.program.rows[0])
            else:
                assert whole.order == Order(**_without_idle(from_torch(text)))


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.sampled(1)
def test_schedules_of_torch_as_instances_and_as_files(processes: int, tmp_path: Path, sample) -> None:
    run_processes(run_torch, processes, tmp_path, sample(("GPipe", "1F1B", *SEVERAL), 2))


def _without_idle(order: Order) -> dict[str, Any]:
    rows = tuple(tuple(item for item in row if item is not None) for row in order.rows)
    return {"placement": order.placement, "microbatches": order.microbatches, "rows": rows}


# --- ours -------------------------------------------------------------------------------------------------------------


def run_ours(folder: Path) -> None:
    devices, file = dist.get_world_size(), folder / f"{dist.get_rank()}.csv"

    options = {"stages_per_device": 4}  # more stages than layers
    cut = {"layers_per_stage": [1, 1, 1, 1, 1, 1, 0, 0], "schedule_options": options}
    redistributed = trained("interleaved", "redistribute", 3, **cut)
    assert redistributed.predict("first-last").makespan == redistributed.predict().makespan

    # A program is walked as it stands: communication derived from other costs, or written by hand, stays.
    _, program = plan_program("v-half", devices, 3, "vocab-2")
    assert trained(program, "vocab-2").program is program
    file.write_text(program.to_csv())
    assert trained(file, "vocab-2").program == program
    uneven = add_communication(generate("interleaved", devices, 3), Costs(F=(9, 1, 1, 1), B=(1, 1, 9, 1)))
    assert trained(uneven.order, "first-last").program != uneven
    assert trained(uneven, "first-last").program is uneven
    assert trained(uneven, "vocab-2").order.vocabulary == "vocab-2"  # here its passes count

    for mode, schedule, words in (
        ("vocab-1", program, "passes of vocab-2, not those of mode vocab-1"),
        ("first-last", damaged(uneven), "1RECV_F0"),
        ("vocab-2", 7, "schedule is int; it must be a name"),
        ("vocab-2", lambda devices, microbatches: "0F0", "returned str; expected an Order"),
    ):
        with pytest.raises(InputError, match=words):
            trained(schedule, mode)


def damaged(program: Program) -> Program:
    rows = [[item for item in row if str(item) != "1RECV_F0"] for row in program.rows]
    return Program(program.placement, program.microbatches, tuple(map(tuple, rows)))


def test_programs_of_ours_are_walked_unchanged(tmp_path: Path) -> None:
    run_processes(run_ours, 2, tmp_path)


# --- our orders in torch's own runtime --------------------------------------------------------------------------------

HIDDEN = 8
BATCH_PER_MICROBATCH = 2


def stage_module(stage: int) -> nn.Module:
    """A transformer layer that is the same in every process."""
    torch.manual_seed(stage)
    return nn.TransformerEncoderLayer(HIDDEN, 2, 12, dropout=0.0, batch_first=True, norm_first=True).double()


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (microbatches * BATCH_PER_MICROBATCH, TOKENS, HIDDEN)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def in_one_process(stages: int, microbatches: int) -> tuple[list[nn.Module], float]:
    """The whole model after one step in one process, and its loss."""
    modules = [stage_module(stage) for stage in range(stages)]
    hidden, target = batch(microbatches)
    for module in modules:
        hidden = module(hidden)
    loss = loss_of(hidden, target)
    loss.backward()
    return modules, loss.item()


def run_in_torch(order: Order, text: str, file_format: str, folder: Path, replicas: int) -> None:
    """One step of this process in torch's runtime, compared with `in_one_process`.

    With several replicas parameters are sharded over them (FSDP2), and every replica has the same data.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    mesh = init_device_mesh("cpu", (order.devices, replicas), mesh_dim_names=("pp", "dp"))
    device, group, stages = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), order.placement.stages
    modules = {stage: stage_module(stage) for stage in order.placement.stages_of(device)}
    if replicas > 1:
        for module in modules.values():
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    held = [PipelineStage(module, stage, stages, torch.device("cpu"), group=group) for stage, module in modules.items()]
    runtime = _PipelineScheduleRuntime(held, order.microbatches, loss_fn=loss_of)
    file = folder / f"{file_format}-{dist.get_rank()}.csv"
    file.write_text(text, encoding="utf-8")
    runtime._load_csv(str(file), format=file_format)

    inputs, target = batch(order.microbatches)
    losses = []
    runtime.step(*([inputs] if 0 in modules else []), target=target if stages - 1 in modules else None, losses=losses)

    expected, loss = in_one_process(stages, order.microbatches)
    for stage, module in modules.items():
        for (name, found), wanted in zip(module.named_parameters(), expected[stage].parameters(), strict=True):
            gradient = found.grad.full_tensor() if replicas > 1 else found.grad
            error = (gradient - wanted.grad).norm() / wanted.grad.norm()
            assert error < 1e-10, f"{file_format}: gradient of stage {stage}, {name} is off by {error:.1e}"
    if stages - 1 in modules:
        assert abs(torch.stack(losses).mean().item() - loss) < 1e-10


def step_in_torch(order: Order, folder: Path, replicas: int = 1) -> None:
    for file_format, lowered in (("compute_only", False), ("compute_comms", True)):
        run_in_torch(order, to_torch(order, lowered=lowered), file_format, folder, replicas)


CASES = [
    *((schedule, 3, 5, {}) for schedule in SCHEDULES),
    ("gpipe", 2, 1, {}),
    ("1f1b", 1, 3, {}),
    ("interleaved", 2, 4, {"stages_per_device": 3}),
    ("gis", 2, 4, {"stages_per_device": 4, "group_size": 1}),
    ("zbv", 4, 8, {}),
    ("dualpipe-v", 2, 5, {"overlap": False}),
    ("dualpipe-v", 4, 9, {}),
]


@pytest.mark.parametrize(("schedule", "devices", "microbatches", "options"), CASES)
@pytest.mark.sampled(1)
def test_gradients_in_torch_are_those_of_one_process(schedule, devices, microbatches, options, tmp_path):
    order = without_offload(generate(schedule, devices, microbatches, **options))  # torch has no copies to the host
    run_processes(step_in_torch, devices, order, tmp_path)


def test_any_sound_order_runs_in_torch(tmp_path):
    text = "0F0,1F0,,,4F0,4B0,,,1B0,0B0,0F1,1F1,4F1,4I1,1B1,4W1,0B1\n,,2F0,3F0,,,3I0,2I0,3W0,2W0,2F1,3F1,3B1,2B1"
    run_processes(step_in_torch, 2, Order.from_csv(text), tmp_path)


@pytest.mark.slow
def test_sharded_parameters_are_gathered_where_the_lowered_file_says(tmp_path):
    """Eight stages on two devices, so that some are freed and gathered again; torch asserts that they are there."""
    order = generate("gis", 2, 3, stages_per_device=4)
    run_processes(step_in_torch, 4, order, tmp_path, 2)
