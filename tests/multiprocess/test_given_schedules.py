"""Schedules that a pipeline is given: torch's as instances and lowered files, and programs of ours, walked unchanged.

torch's classes, and orders, programs, files and functions of ours, are among the pipelines of tests/fuzz.
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
from torch.distributed.pipelining import schedules as torch_schedules
from torch_orders import Size, file_of_torch, mock_stages

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.interop import from_torch
from evenpipe.model import describe
from evenpipe.schedule import Costs, Order, Program, add_communication, generate, plan_program

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


def test_programs_of_ours_are_walked_unchanged(tmp_path: Path) -> None:
    run_processes(run_ours, 2, tmp_path)
