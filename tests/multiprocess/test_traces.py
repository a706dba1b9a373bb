"""Traces of real processes, whose clocks are seconds apart and drift: complete, ordered, and on one clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unit_needs
from harness import GROUP_TIMEOUT, run_processes
from small_llama import described

from evenpipe import Pipeline, initialise_worker
from evenpipe.communication import clock
from evenpipe.communication.communicators import Communicators
from evenpipe.compare.measured import compare
from evenpipe.costs import costs_of, with_backward
from evenpipe.errors import InputError
from evenpipe.schedule import Order, Pass, Rules, generate
from evenpipe.schedule.trace import Allocations, Trace
from evenpipe.schedule.trace_file import read_trace, trace_from_dict, trace_to_dict, write_trace

SECONDS_APART, DRIFT = 1000.0, 1e-3
"""Each process's clock is this far ahead of that of the one before it, and this part faster."""

PAIR = "(0F1;0B0)OVERLAP_F_B"


def recomputed() -> Order:
    return with_backward(generate("1f1b", 2, 3), "recomputed")


def joint() -> Order:
    return Order.from_csv(f"0F0,{PAIR},0B1\n1F0,1B0,1F1,1B1\n")


CASES: list[tuple[str | Callable[[], Order], str, int]] = [
    # schedule, vocabulary mode, microbatches
    ("1f1b", "first-last", 1),
    ("1f1b", "vocab-2", 4),
    ("gpipe", "vocab-1", 3),
    ("interleaved", "vocab-2", 4),
    ("zb-h1", "interlaced", 4),
    ("v-half", "vocab-2", 5),
    (recomputed, "first-last", 3),
    (joint, "first-last", 2),
]


def opened(schedule: str | Order, mode: str, microbatches: int, **options: Any) -> Pipeline:
    usual = {"parameter_dtype": torch.float64, "self_check": False, "vocabulary": mode, "microbatches": microbatches}
    return Pipeline(described(97, False, torch.float64), schedule=schedule, **usual, **options)


def shift_clock() -> Callable[[float], float]:
    """This process's clock from now on is far from the others' and a little faster. Returns what turns its times into
    those of the clock that all processes of this machine share."""
    own, rank = clock.now, dist.get_rank()
    begin, factor = own(), 1 + DRIFT * rank
    clock.now = lambda: begin + (own() - begin) * factor + SECONDS_APART * rank
    return lambda time: begin + (time - SECONDS_APART * rank - begin) / factor


def traces_of_cases() -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Per case, the trace as JSON has it, on the first process; and when each pass really started, of this process."""
    initialise_worker()
    really = shift_clock()
    found, starts = [], []
    for number, (schedule, mode, microbatches) in enumerate(CASES):
        pipeline = opened(schedule if isinstance(schedule, str) else schedule(), mode, microbatches)
        ids = torch.randint(1, 97, (microbatches, 8), generator=torch.Generator().manual_seed(0))
        plain = pipeline.step(ids)
        record = plain.record
        assert record.busy > 0 and not record.passes and not record.waits and not record.transfers
        with pytest.raises(InputError, match="trace: the step was not recorded"):
            pipeline.trace(plain)
        result = pipeline.step(ids, record_passes=True)
        assert result.loss == plain.loss
        assert result.record.allocations is None  # a CPU
        if number == len(CASES) - 1:
            result.record.allocations = Allocations(100, pipeline.device, 0, 0)
        trace = pipeline.trace(result, step=2)
        assert (trace is None) == (pipeline.device > 0)
        starts.append([really(entry.start) for entry in result.record.passes])
        if trace is not None:
            found.append(trace_to_dict(trace))
            assert trace.program == pipeline.layout.program
        pipeline.close()
    return found, starts


@pytest.fixture(scope="module")
def measured() -> list[Any]:
    return run_processes(traces_of_cases, 2)


@pytest.fixture(scope="module")
def traces(measured: list[Any]) -> list[Trace]:
    return [trace_from_dict(json.loads(json.dumps(values))) for values in measured[0][0]]


def test_every_pass_and_transfer_is_there_in_the_order_of_its_row(traces: list[Trace]) -> None:
    for case, trace in zip(CASES, traces, strict=True):
        for row, device in zip(trace.program.rows, trace.devices, strict=True):
            passes = [item for item in row if isinstance(item, Pass)]
            assert [entry.item for entry in device.passes] == passes, case
            transfers = [item for item in row if item is not None and not isinstance(item, Pass)]
            assert [entry.item for entry in device.transfers] == transfers, case
            assert all(entry.complete is not None for entry in device.transfers), case
            assert all(a.end <= b.start for a, b in pairwise(device.passes)), case
            assert all(a.returned <= b.issued for a, b in pairwise(device.transfers)), case
            for entry in device.passes:
                assert device.start <= entry.start <= entry.end <= device.end, case
                assert entry.processor > 0, case
        timeline = trace.timeline()
        for number, device in enumerate(trace.devices):
            assert [event.item for event in timeline.events[number]] == [entry.item for entry in device.passes], case
            assert {event.item for event in timeline.concurrent[number]} == {one.item for one in device.transfers}, case
            assert device.allocations == (Allocations(100, number, 0, 0) if case is CASES[-1] else None), case
        assert timeline.peak_in_flight == compare(trace).predicted.peak_in_flight, case
        assert costs_of([trace]).F is not None
        assert trace.about["vocabulary"] == case[1] and trace.about["step"] == 2


def test_each_pass_waited_for_what_it_needs_and_nothing_else(traces: list[Trace]) -> None:
    for case, trace in zip(CASES, traces, strict=True):
        rules = Rules.of(trace.program)
        for number, device in enumerate(trace.devices):
            waited = {(wait.needed_by, wait.transfer) for wait in device.waits if wait.needed_by is not None}
            needed = {
                (entry.item, transfer)
                for entry in device.passes
                for transfer in unit_needs.waits_for(rules, entry.item, number)
            }
            assert needed == waited, case  # what a device has made itself, it does not wait for
            sent = {wait.transfer for wait in device.waits if wait.needed_by is None}
            assert sent | {transfer for _, transfer in waited} == {entry.item for entry in device.transfers}, case


def test_clocks_that_are_far_apart_are_brought_together(measured: list[Any], traces: list[Trace]) -> None:
    """On one clock every pass started when it really did, though the clocks differ by a thousand seconds."""
    for number, (case, trace) in enumerate(zip(CASES, traces, strict=True)):
        real = [starts[number] for _, starts in measured]
        ours = [[entry.start for entry in device.passes] for device in trace.devices]
        begin = real[0][0] - ours[0][0]
        first, second = (device.clock for device in trace.devices)
        assert (first.offset, first.drift) == (0.0, 0.0)
        assert second.offset == pytest.approx(SECONDS_APART, rel=0.1)
        assert 0 < second.uncertainty < 1 and trace.seconds < 100, case
        slack = second.uncertainty + 1e-6
        for one, other in zip(ours, real, strict=True):
            assert one == pytest.approx([start - begin for start in other], abs=slack), case


def trace_of_tensor_ranks() -> tuple[dict[str, Any] | None, list[float]]:
    """The trace of a step on two devices of two ranks, on the first process; and when each pass really started here."""
    initialise_worker()
    really = shift_clock()
    pipeline = opened("1f1b", "vocab-2", 3, tp=2)
    result = pipeline.step(torch.randint(1, 97, (3, 8)), record_passes=True)
    trace = pipeline.trace(result, schedule="1f1b", step=5)
    starts = [really(entry.start) for entry in result.record.passes]
    pipeline.close()
    return None if trace is None else trace_to_dict(trace), starts


def test_every_tensor_rank_is_in_the_trace_with_its_own_passes(tmp_path: Path) -> None:
    found = run_processes(trace_of_tensor_ranks, 4)
    assert [values is not None for values, _ in found] == [True, False, False, False]
    trace = trace_from_dict(json.loads(json.dumps(found[0][0])))
    assert trace.about["tp"] == 2
    begin = found[0][1][0] - trace.devices[0].passes[0].start
    for rank, one in enumerate(trace.by_rank):
        for device, row in enumerate(one.devices):
            assert [entry.item for entry in row.passes] == [e for e in one.program.rows[device] if isinstance(e, Pass)]
            real = [start - begin for start in found[2 * device + rank][1]]
            assert [entry.start for entry in row.passes] == pytest.approx(real, abs=row.clock.uncertainty + 1e-6)
    write_trace(trace, tmp_path / "step.json")
    assert read_trace(tmp_path / "step.json").by_rank == trace.by_rank
    comparison = compare(trace)
    assert list(comparison.timelines) == ["measured, tensor rank 0", "measured, tensor rank 1", "predicted"]
    assert comparison.title == "1f1b + vocab-2, 2 devices of 2 tensor ranks, 3 microbatches, step 5"


def readings() -> tuple[float, float, float, float]:
    """The offset of the clock that processes share; and of one that is shifted offset, uncertainty, and how far off the
    converted clock is from the first process's, which is not shifted."""
    worker = initialise_worker()
    communicators = Communicators([("control", [(0, 1, 2)])], timeout_seconds=GROUP_TIMEOUT.total_seconds())
    shared = clock.read_clocks(communicators["control"], (0, 1, 2), worker.torch_device).offset
    really = shift_clock()
    before = clock.read_clocks(communicators["control"], (0, 1, 2), worker.torch_device)
    now = clock.now()
    after = clock.read_clocks(communicators["control"], (0, 1, 2), worker.torch_device)
    convert = clock.Conversion(before, after)
    return shared, before.offset, convert.uncertainty, convert(now) - really(now)


def test_offsets_are_known_to_half_a_round_trip_and_a_shared_clock_has_none() -> None:
    """Not even a microsecond: a message would else arrive before it left."""
    for rank, (shared, offset, uncertainty, error) in enumerate(run_processes(readings, 3)):
        assert shared == 0.0
        assert offset == pytest.approx(rank * SECONDS_APART, abs=1.0)
        assert (uncertainty > 0) == (rank > 0)
        assert abs(error) <= uncertainty + 1e-9


def test_without_others_there_is_no_offset_and_between_two_readings_drift_is_shared_out() -> None:
    reading = clock.read_clocks(None, (0,), torch.device("cpu"))
    assert (reading.offset, reading.uncertainty, clock.Conversion(reading, reading)(5.0)) == (0.0, 0.0, 5.0)
    convert = clock.Conversion(clock.Reading(100.0, 10.0, 0.1), clock.Reading(200.0, 12.0, 0.3))
    assert (convert.drift, convert.uncertainty) == (2.0, 0.3)
    assert [convert(time) for time in (100.0, 150.0, 200.0)] == [90.0, 139.0, 188.0]
