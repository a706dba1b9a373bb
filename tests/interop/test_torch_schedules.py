"""torch's schedules in ours and ours in torch's: read, checked, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules
from torch_orders import Size, file_of_torch, load_into_torch

from evenpipe.interop import from_torch, to_torch
from evenpipe.schedule import (
    EQUAL_COSTS,
    SCHEDULES,
    Costs,
    Order,
    Program,
    check_order,
    check_program,
    generate,
    without_offload,
)
from evenpipe.schedule import time_order as timed

THEIRS = [
    *(("Interleaved1F1B", Size(*size)) for size in [(1, 2, 4), (2, 2, 4), (3, 2, 12), (4, 3, 8)]),
    *(("LoopedBFS", Size(*size)) for size in [(1, 2, 4), (2, 2, 3), (4, 3, 8)]),
    *(("InterleavedZeroBubble", Size(*size)) for size in [(2, 1, 4), (2, 2, 4), (4, 4, 8)]),
    *(("ZBVZeroBubble", Size(*size)) for size in [(1, 2, 4), (2, 2, 2), (3, 2, 7), (4, 2, 8)]),
    *(("DualPipeV", Size(*size)) for size in [(1, 2, 4), (2, 2, 5), (3, 2, 6), (4, 2, 10)]),
]


@pytest.mark.parametrize(("name", "size"), THEIRS, ids=str)
def test_theirs_are_read_and_found_sound(name: str, size: Size, tmp_path: Path) -> None:
    text = file_of_torch(name, size, tmp_path, "compute_only")
    order = from_torch(text)
    assert isinstance(order, Order)
    assert check_order(order).ok
    assert order.microbatches == size.microbatches
    assert to_torch(order).splitlines() == text.splitlines()

    text = file_of_torch(name, size, tmp_path, "compute_comms")
    program = from_torch(text)
    assert isinstance(program, Program)
    assert check_program(program).ok
    assert to_torch(program).splitlines() == text.splitlines()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 2), (2, 3), (4, 9)])
def test_ours_are_read_by_torch_and_run_in_its_simulator(
    schedule: str, devices: int, microbatches: int, tmp_path: Path
) -> None:
    order = without_offload(generate(schedule, devices, microbatches))  # torch has no copies to the host
    size = Size(devices, order.placement.stages // devices, microbatches)

    runtime = load_into_torch(to_torch(order), size, tmp_path, "compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(order.placement.stage_device))
    runs_in_its_simulator(runtime, order)
    runs_in_its_simulator(load_into_torch(to_torch(order, lowered=True), size, tmp_path, "compute_comms"), order)


def runs_in_its_simulator(runtime: Any, order: Order) -> None:
    """The simulator raises where devices would wait for ever. It knows neither sharding nor passes run as one."""
    rows = {
        rank: [
            part
            for action in row
            if action.computation_type not in {schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD}
            for part in action.sub_actions or (action,)
        ]
        for rank, row in runtime.pipeline_order_with_comms.items()
    }
    schedules._simulate_comms_compute(rows, order.placement.device_of, order.placement.stages)


def test_dualpipe_v_is_the_same_as_theirs(tmp_path: Path) -> None:
    for devices in (1, 2, 3, 4, 6):
        for microbatches in (2 * devices, 2 * devices + 3):
            theirs = file_of_torch("DualPipeV", Size(devices, 2, microbatches), tmp_path, "compute_only")
            assert generate("dualpipe-v", devices, microbatches) == from_torch(theirs)


@pytest.mark.parametrize(("schedule", "name"), [("zbv", "ZBVZeroBubble"), ("dualpipe-v", "DualPipeV")])
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (1, 1, 0.5)])
def test_ours_are_no_longer_and_hold_no_more(
    schedule: str, name: str, devices: int, times: tuple[float, float, float], tmp_path: Path
) -> None:
    costs = Costs(**dict(zip("FIW", times, strict=True)))
    for microbatches in (2 * devices, 3 * devices + 1):
        text = file_of_torch(name, Size(devices, 2, microbatches), tmp_path, "compute_only")
        theirs, ours = timed(from_torch(text), costs), timed(generate(schedule, devices, microbatches), costs)
        assert ours.span <= theirs.span
        assert ours.makespan <= theirs.makespan
        assert max(ours.peak_in_flight) <= max(theirs.peak_in_flight)


def test_dualpipe_v_one_by_one_is_shorter_than_theirs(tmp_path: Path) -> None:
    theirs = timed(from_torch(file_of_torch("DualPipeV", Size(8, 2, 32), tmp_path, "compute_only")), EQUAL_COSTS)
    ours = timed(generate("dualpipe-v", 8, 32, overlap=False), EQUAL_COSTS)
    assert (ours.bubble, theirs.bubble) == (7, 14)
    assert (ours.makespan, theirs.makespan) == (199, 206)
    assert ours.peak_in_flight == theirs.peak_in_flight
