"""What tells the watch how far a GPU has come: numbers that its streams write into host memory. A stand-in for the GPU
does what it has been given only when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evenpipe.communication import arrivals
from evenpipe.communication.arrivals import STREAMS, Arrivals
from evenpipe.communication.communicator import Communicator, Handle

DEVICE = torch.device("cuda", 2)


class Place:
    """One number in memory of the GPU, or of the host as the GPU sees it."""

    def __init__(self, gpu: Gpu, value: Tensor) -> None:
        self.gpu, self.value = gpu, value

    def fill_(self, number: int) -> None:
        self.gpu.queue(lambda: self.value.fill_(number))


class HostPlace:
    """One number in pinned memory, which this GPU reaches by copies alone."""

    def __init__(self, gpu: Gpu, value: Tensor) -> None:
        self.gpu, self.value = gpu, value

    def copy_(self, place: Place, non_blocking: bool) -> None:
        assert non_blocking
        self.gpu.queue(lambda: self.value.copy_(place.value))


class Gpu:
    """Streams by handle, each with what it has been given and not yet done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, pinned_elsewhere: bool) -> None:
        self.current, self.streams, self.allocations, self.operations = 0, {0: []}, 0, 0
        self.failed = False
        self.pinned_elsewhere = pinned_elsewhere
        monkeypatch.setattr(arrivals, "_pinned", self.pinned)
        monkeypatch.setattr(arrivals, "_mapped", self.mapped)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)

    @property
    def each(self) -> int:
        """Operations of one mark."""
        return 2 if self.pinned_elsewhere else 1

    def pinned(self, count: int) -> Any:
        self.allocations += 1
        host = torch.zeros(count, dtype=torch.int64)
        places = tuple(HostPlace(self, value) for value in host.unbind())
        return SimpleNamespace(data_ptr=host.data_ptr, numpy=host.numpy, unbind=lambda: places, host=host)

    def mapped(self, pinned: Any, torch_device: torch.device) -> Any:
        assert torch_device == DEVICE
        self.allocations += 1
        memory = pinned.host.clone() if self.pinned_elsewhere else pinned.host
        places = tuple(Place(self, value) for value in memory.unbind())
        return SimpleNamespace(data_ptr=memory.data_ptr, unbind=lambda: places)

    def current_stream(self, torch_device: torch.device) -> SimpleNamespace:
        assert torch_device == DEVICE
        return SimpleNamespace(cuda_stream=self.current)

    def queue(self, work: Callable[[], Any]) -> None:
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.operations += 1
        self.streams.setdefault(self.current, []).append(work)

    def run(self, stream: int, operations: int) -> None:
        for _ in range(operations):
            self.streams[stream].pop(0)()


@pytest.fixture(params=[False, True], ids=["mapped", "copied"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch, pinned_elsewhere=request.param)


def test_marks_of_a_stream_are_passed_in_their_order_and_say_nothing_of_another(gpu: Gpu) -> None:
    """Whatever order they come in, and however often they take turns."""
    arrived, each = Arrivals(DEVICE), gpu.each
    assert len(gpu.streams[0]) == STREAMS * each, "every place, so that no kernel is loaded later"
    allocations, marks = gpu.allocations, []
    for stream in (7, 0, 7, 0):
        gpu.current = stream
        marks.append(arrived.mark())
    assert gpu.allocations == allocations
    for stream, operations, passed in (
        (0, STREAMS * each, [False, False, False, False]),
        (0, each, [False, True, False, False]),
        (0, each, [False, True, False, True]),
        (7, each, [True, True, False, True]),
        (7, each, [True, True, True, True]),
    ):
        gpu.run(stream, operations)
        assert [mark() for mark in marks] == passed


def test_the_thread_that_asks_calls_nothing_of_cuda(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = Arrivals(DEVICE).mark()
    for name in ("current_stream", "Event", "synchronize", "set_device", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a call of CUDA"))
    gpu.failed = True  # and of the tensors
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(mark).result() is False


def test_more_streams_than_places_are_not_watched(gpu: Gpu) -> None:
    arrived = Arrivals(DEVICE)
    for stream in range(STREAMS):
        gpu.current = stream
        assert not arrived.mark()()
    before = gpu.operations
    gpu.current = STREAMS
    assert arrived.mark()() and gpu.operations == before
    gpu.current = 3
    assert not arrived.mark()()


# --- where a wait is announced ------------------------------------------------------------------------------------


class Watched:
    """In place of the watch: what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def awaiting(self, what: str, *_: object) -> None:
        self.told.append(f"awaiting {what}")

    def arrived(self) -> None:
        self.told.append("arrived")

    def arrives_when(self, is_done: Callable[[], bool], limit_seconds: float) -> None:
        self.told += [is_done, limit_seconds]


def waited(watch: Watched, found: Arrivals | None) -> None:
    """One wait, in which the host does not wait."""
    communicator = Communicator("X", (0, 1), 0, None, timeout_seconds=9.0, staging=None, watch=watch, arrivals=found)  # type: ignore[arg-type]
    work = SimpleNamespace(wait=lambda: watch.told.append("wait"))
    Handle(communicator, "0RECV_F1", (1,), [work]).wait("0F1")  # type: ignore[list-item]


def test_a_wait_on_a_gpu_is_marked_behind_itself(gpu: Gpu) -> None:
    """Who uses a failed GPU is the one to say so, as itself and at once: not as a connection that a peer has broken."""
    watch = Watched()
    waited(watch, Arrivals(DEVICE))
    assert watch.told[:2] == ["awaiting 0RECV_F1", "wait"]
    is_done, limit_seconds = watch.told[2:]
    assert limit_seconds == 9.0 and not is_done()
    gpu.run(0, len(gpu.streams[0]))
    assert is_done()
    watch, arrived = Watched(), Arrivals(DEVICE)
    gpu.failed = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        waited(watch, arrived)
    assert watch.told == ["awaiting 0RECV_F1", "wait"]
    watch = Watched()  # the host itself waits
    waited(watch, None)
    assert watch.told == ["awaiting 0RECV_F1", "wait", "arrived"]
