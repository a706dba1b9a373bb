"""All that `Pipeline(schedule=...)` takes, on real processes: loss and gradients are those of one process.

torch's own schedules as classes, instances and files, lowered and not; programs of ours, walked unchanged; functions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_processes
from small_llama import llama
from torch.distributed.pipelining import schedules as torch_schedules
from torch_orders import Size, file_of_torch, mock_stages

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.interop import from_torch
from evenpipe.model import describe
from evenpipe.schedule import Costs, Order, Program, add_communication, generate, plan_program

CLASSES = {
    # class -> stages per device in the cases below
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
LOWERED = [name for name, stages in CLASSES.items() if stages == 2]  # those of one stage per rank write no files
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


def check(case: Callable[..., None], processes: int, *arguments: Any) -> None:
    run_processes(case, processes, *arguments)


# --- torch's schedules ------------------------------------------------------------------------------------------------


def run_torch_classes(microbatches: int, names: list[str]) -> None:
    devices = dist.get_world_size()
    for name in names:
        stages_per_device = CLASSES[name]
        schedule = torch_schedules.get_schedule_class(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            instance = schedule(
                *([mock_stages(Size(devices, 1, microbatches))[0]] if stages_per_device == 1 else []),
                *([mock_stages(Size(devices, stages_per_device, microbatches))] if stages_per_device > 1 else []),
                microbatches,
                loss_fn=torch.nn.MSELoss(),
            )
            for mode in ("first-last", "vocab-2"):
                pipeline = trained(schedule, mode, microbatches)
                assert pipeline.order.placement.stages == devices * stages_per_device
            assert trained(instance, "vocab-2").program == pipeline.program  # its size is known


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("processes", "microbatches"), [(2, 4), (3, 6)])
def test_schedules_of_torch_as_classes_and_as_instances(processes: int, microbatches: int, sample) -> None:
    check(run_torch_classes, processes, microbatches, sample(CLASSES, 1))


def run_torch_files(folder: Path, names: list[str]) -> None:
    devices, own = dist.get_world_size(), folder / str(dist.get_rank())
    own.mkdir()
    for name in names:
        size = Size(devices, CLASSES[name], 4)
        for file_format in ("compute_only", "compute_comms"):
            text = file_of_torch(name, size, own, file_format)
            file = own / f"{name}-{file_format}.csv"
            file.write_text(text)
            whole, sharded = trained(file, "first-last"), trained(str(file), "vocab-2")
            assert whole.predict("vocab-2").busy == sharded.predict().busy
            if file_format == "compute_comms":  # as torch lowered it, UNSHARD and REDUCE_GRAD included
                assert whole.program == from_torch(text)
                assert any("UNSHARD" in str(item) for item in whole.program.rows[0])
            else:
                assert whole.order == Order(**_without_idle(from_torch(text)))
            assert whole.order.placement == sharded.order.placement


def _without_idle(order: Order) -> dict[str, Any]:
    rows = tuple(tuple(item for item in row if item is not None) for row in order.rows)
    return {"placement": order.placement, "microbatches": order.microbatches, "rows": rows}


def test_files_of_torch_run_lowered_and_not(tmp_path: Path, sample) -> None:
    check(run_torch_files, 2, tmp_path, sample(LOWERED, 1))


# --- ours -------------------------------------------------------------------------------------------------------------


def one_at_a_time(devices: int, microbatches: int) -> Order:
    rows = [",".join(f"{device}F{i},{device}B{i}" for i in range(microbatches)) for device in range(devices)]
    return Order.from_csv("\n".join(rows))


def run_ours(folder: Path) -> None:
    devices, file = dist.get_world_size(), folder / f"{dist.get_rank()}.csv"

    assert trained(one_at_a_time, "vocab-2", 3).order.barriers == 1
    assert trained(one_at_a_time(devices, 3), "first-last").microbatches == 3
    assert trained("zbv", "vocab-1").microbatches == 4 * devices
    assert trained("interleaved", "vocab-2", 3, schedule_options={"stages_per_device": 3}).order.placement.stages == 6

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
    assert trained(uneven, "vocab-2").order.barriers == 1  # here its passes count

    for mode, schedule, words in (
        ("vocab-1", program, "the order has 1 barrier, but vocabulary mode vocab-1 has 2"),
        ("first-last", damaged(uneven), "1RECV_F0"),
        ("vocab-2", 7, "schedule: int, expected a name"),
        ("vocab-2", lambda devices, microbatches: "0F0", "returned str, expected an Order"),
    ):
        with pytest.raises(InputError, match=words):
            trained(schedule, mode)


def damaged(program: Program) -> Program:
    rows = [[item for item in row if str(item) != "1RECV_F0"] for row in program.rows]
    return Program(program.placement, program.microbatches, tuple(map(tuple, rows)))


def test_orders_programs_files_and_functions_of_ours(tmp_path: Path) -> None:
    check(run_ours, 2, tmp_path)
