"""What the allocator of a GPU does while a step is recorded, with a stand-in for the GPU."""

from __future__ import annotations

import pytest
import torch

from evenpipe.communication.clock import Conversion, Reading
from evenpipe.runtime.recording import Recording, StepRecord
from evenpipe.runtime.trace import gather_trace
from evenpipe.schedule import Pass, add_communication, generate
from evenpipe.schedule.trace import Allocations

GPU = torch.device("cuda", 1)


class Gpu:
    """Its clock and the counters of its allocator move when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.milliseconds = 0.0
        self.counters = {
            "allocation.all.allocated": 1000,
            "allocation.all.freed": 900,
            "num_device_alloc": 40,
            "num_device_free": 30,
            "num_alloc_retries": 5,
            "num_ooms": 1,
        }
        monkeypatch.setattr(torch.cuda, "memory_stats", self.memory_stats)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == GPU
        return dict(self.counters)

    def runs(self, *, requests: int = 0, allocations: int = 0, frees: int = 0, retries: int = 0) -> None:
        """A millisecond passes, in which tensors are asked for."""
        self.milliseconds += 1.0
        self.counters["allocation.all.allocated"] += requests
        self.counters["num_device_alloc"] += allocations
        self.counters["num_device_free"] += frees
        self.counters["num_alloc_retries"] += retries


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self, stream: None) -> None:
        self.at = self.gpu.milliseconds

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def recorded(gpu: Gpu, **of_the_backward: int) -> StepRecord:
    """A forward with 7 requests, and a backward."""
    recording = Recording(GPU)
    for text, did in (("0F0", {"requests": 7}), ("0B0", of_the_backward)):
        start = recording.stamp()
        gpu.runs(**did)
        recording.passes.append((Pass.parse(text), start, recording.stamp(), 0.0))
    record = StepRecord()
    recording.finish(record)
    gpu.runs(requests=100, allocations=100)  # after the step
    return record


def test_a_step_counts_its_own_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    assert recorded(gpu, requests=3, allocations=4, frees=2, retries=1).allocations == Allocations(10, 4, 2, 1)
    assert recorded(gpu, requests=5).allocations == Allocations(12, 0, 0, 0)  # all from what is kept


def test_they_are_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded(Gpu(monkeypatch), requests=3, allocations=4)
    assert record.end - record.start == pytest.approx(2e-3)
    record.clock = Conversion(Reading(record.start, 0.0, 0.0), Reading(record.end, 0.0, 0.0))
    program = add_communication(generate("1f1b", 1, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    trace = gather_trace(record, program, None, GPU)
    assert trace is not None
    assert trace.devices[0].allocations == Allocations(10, 4, 0, 0)


def test_a_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: pytest.fail("asked"))
    recording, record = Recording(torch.device("cpu")), StepRecord()
    recording.finish(record)
    assert record.allocations is None and record.end >= record.start > 0
