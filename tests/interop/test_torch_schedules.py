"""torch's schedules in ours and ours in torch's: read, checked, compared."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

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


def test_theirs_are_read_and_found_sound(tmp_path: Path) -> None:
    for name, size in THEIRS:
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


def test_ours_are_read_by_torch_and_run_in_its_simulator(sample, tmp_path: Path) -> None:
    for schedule, (devices, microbatches) in sample(itertools.product(SCHEDULES, [(1, 2), (2, 3), (4, 9)]), 12):
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


def test_ours_are_no_longer_and_hold_no_more(sample, tmp_path: Path) -> None:
    names, times = {"zbv": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}, ((1, 1, 1), (3, 4, 2), (1, 1, 0.5))
    for schedule, devices, of_passes, extra in sample(itertools.product(names, (2, 3, 4, 8), times, (False, True)), 6):
        costs, microbatches = Costs(**dict(zip("FIW", of_passes, strict=True))), (2 + extra) * devices + extra
        text = file_of_torch(names[schedule], Size(devices, 2, microbatches), tmp_path, "compute_only")
        theirs, ours = timed(from_torch(text), costs), timed(generate(schedule, devices, microbatches), costs)
        assert ours.span <= theirs.span, (schedule, devices, of_passes)
        assert ours.makespan <= theirs.makespan, (schedule, devices, of_passes)
        assert max(ours.peak_in_flight) <= max(theirs.peak_in_flight), (schedule, devices, of_passes)


def test_dualpipe_v_one_by_one_is_shorter_than_theirs(tmp_path: Path) -> None:
    theirs = timed(from_torch(file_of_torch("DualPipeV", Size(8, 2, 32), tmp_path, "compute_only")), EQUAL_COSTS)
    ours = timed(generate("dualpipe-v", 8, 32, overlap=False), EQUAL_COSTS)
    assert (ours.bubble, theirs.bubble) == (7, 14)
    assert (ours.makespan, theirs.makespan) == (199, 206)
    assert ours.peak_in_flight == theirs.peak_in_flight
