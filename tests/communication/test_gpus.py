"""What tells the watch how far a GPU has come, and NCCL's priority and channels; with stand-ins for what CPUs lack."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from evenpipe import NcclOptions, Pipeline
from evenpipe.communication import arrivals, communicators
from evenpipe.communication.arrivals import STREAMS, Arrivals
from evenpipe.communication.communicator import Communicator, Handle
from evenpipe.communication.communicators import NCCL_LATER_SECONDS, Communicators
from evenpipe.errors import InputError
from evenpipe.parallel import Grid, groups
from evenpipe.processes.worker import bound_device
from evenpipe.runtime import pipeline
from evenpipe.train import build
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.hardware_profile import pipelines_to_measure

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

    def begin_wait(self, what: str, *_: object) -> None:
        self.told.append(f"awaiting {what}")

    def end_wait(self) -> None:
        self.told.append("arrived")

    def end_wait_when(self, is_done: Callable[[], bool], limit_seconds: float) -> None:
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


# --- options of NCCL --------------------------------------------------------------------------------------------------

MODEL = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1
)
UNDEFINED = -(2**31)
"""What NCCL's own configuration says of a field that nobody has set."""


class Options:
    """As torch's ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=UNDEFINED, max_ctas=UNDEFINED, cga_cluster_size=UNDEFINED)
        self._timeout = timedelta(minutes=10)


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with NCCL."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


# --- one group --------------------------------------------------------------------------------------------------


def test_wrong_options() -> None:
    for options, sentence in (
        ({"high_priority": 1}, "nccl.high_priority is 1; it must be true or false"),
        ({"high_priority": None}, "nccl.high_priority is none; it must be true or false"),
        ({"channels": 0}, "nccl.channels is 0; it must be an integer from 1 to 64 or none"),
        ({"channels": 65}, "nccl.channels is 65; it must be an integer from 1 to 64 or none"),
        ({"channels": 4.0}, "nccl.channels is 4.0; it must be an integer from 1 to 64 or none"),
        ({"channels": True}, "nccl.channels is true; it must be an integer from 1 to 64 or none"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            NcclOptions(**options)
    with pytest.raises(InputError, match=r"nccl is \{'channels': 2\}; it must be a NcclOptions"):
        Pipeline(MODEL, nccl={"channels": 2})  # type: ignore[arg-type]


# --- all groups -------------------------------------------------------------------------------------------------


WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


def made(
    monkeypatch: pytest.MonkeyPatch, backends: str, before: list[Any] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """How process 0 of three asks torch for the groups of two communicators, of one of which it is no member: each as a
    group of its own, or, where the default group is bound to a GPU, as a split of it.

    before: gets the waits for all processes, and WARNING in the environment at each group.
    """
    before = [] if before is None else before
    asked: list[dict[str, Any]] = []

    def new_group(members: list[int], **given: Any) -> SimpleNamespace:
        before.append(os.environ.get(WARNING, ""))
        asked.append(given)
        return SimpleNamespace(backend=given["backend"])

    def split_group(split_ranks: list[list[int]], backend: str = "", **given: Any) -> SimpleNamespace:
        assert backend == ("cuda:nccl" if "gloo" in backends else "")
        return new_group(split_ranks[0], backend="nccl", device_id=None, **given)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: before.append(f"all on the {tensor.device}"))
    monkeypatch.setattr(dist, "barrier", lambda: before.append("all on their GPUs"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(communicators, "Staging", lambda device: SimpleNamespace())
    Communicators([("X", [(0, 1, 2)]), ("F:1>2", [(1, 2)])], timeout_seconds=30, torch_device="cuda:0", **options)
    assert [given["group_desc"] for given in asked] == ["X", "F:1>2"]
    return asked


def test_each_group_of_nccl_has_options_of_its_own_and_of_gloo_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for nccl, bound in product((None, NcclOptions(high_priority=False, channels=8)), (None, "cuda:0")):
        monkeypatch.setattr(communicators, "bound_device", lambda bound=bound: bound)
        asked = made(monkeypatch, "cpu:gloo,cuda:nccl", nccl=nccl)
        first, second = (group["pg_options"] for group in asked)
        assert first is not second and first.config is not second.config
        wanted = nccl or NcclOptions()
        for group in asked:
            options = group["pg_options"]
            assert group["backend"] == "nccl" and group["device_id"] == (None if bound else torch.device("cuda:0"))
            assert options._timeout == group["timeout"] == timedelta(seconds=30 + NCCL_LATER_SECONDS)
            assert options.is_high_priority_stream == wanted.high_priority
            assert options.config.max_ctas == (wanted.channels or {"X": 8, "F:1>2": 4}[group["group_desc"]])
    monkeypatch.delattr(dist, "ProcessGroupNCCL")  # a torch without NCCL
    for group in made(monkeypatch, "gloo", nccl=NcclOptions(channels=8)):
        assert group["backend"] == "gloo" and not {"pg_options", "device_id"} & {*group}
        assert group["timeout"] == timedelta(seconds=30)


@pytest.mark.parametrize(
    ("backends", "bound", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:0", ["all on the cpu", "false", "false"]),
        ("cuda:nccl", "cuda:0", ["all on their GPUs", "false", "false"]),
        ("cuda:nccl", None, ["false", "false"]),  # nothing is split
        ("cpu:gloo,cuda:gloo", None, ["", ""]),  # processes that share a GPU
    ],
)
def test_all_processes_are_there_before_nccl_needs_them(
    backends: str, bound: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bound_device() is None
    monkeypatch.delenv(WARNING, raising=False)
    monkeypatch.setattr(communicators, "bound_device", lambda: bound)
    made(monkeypatch, backends, before := [])
    assert before == expected
    monkeypatch.setenv(WARNING, "true")  # what the user says holds
    made(monkeypatch, backends, before := [])
    assert before[-2:] == ["true", "true"]


# --- from where a user says it ----------------------------------------------------------------------------------


class SeenError(Exception):
    """What was to be seen has been seen."""


def test_a_pipeline_hands_them_to_all_its_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def stop(listed: list[tuple[str, Any]], **given: Any) -> None:
        found.update(given, names=[name for name, _ in listed])
        raise SeenError

    monkeypatch.setattr(pipeline, "process_grid", lambda mesh, **sizes: Grid.from_sizes(0, dp=2, pp=2))
    monkeypatch.setattr(groups, "Communicators", stop)
    given = NcclOptions(high_priority=False, channels=2)
    with pytest.raises(SeenError):
        Pipeline(MODEL, nccl=given, torch_device="cpu", self_check=False)
    assert found["nccl"] is given
    assert found["names"] == ["B", "F", "LARGE", "SMALL", "dp", "everyone"]


def configured(**given: Any) -> Config:
    tables = {"model": {"architecture": "llama"}, "data": {"corpus": "python-standard-library"}}
    return config_from_dict({**tables, "pipeline": given})


def test_a_configuration_says_them_and_passes_are_measured_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[NcclOptions] = []
    monkeypatch.setattr(build, "Pipeline", lambda model, *, recipe, **_: built.append(recipe.nccl))
    monkeypatch.setattr(build, "pipeline_model", lambda *_: MODEL)
    for settings in ({}, {"nccl_high_priority": False, "nccl_channels": 64}, {"nccl_channels": "none"}):
        build.build_pipeline(configured(**settings), 32, 0, torch.device("cpu"))
    assert built == [NcclOptions(), NcclOptions(high_priority=False, channels=64), NcclOptions()]
    config = configured(nccl_high_priority=False, nccl_channels=4)
    config = replace(config, model=replace(config.model, config={"num_hidden_layers": 4, "vocab_size": 32}))
    for measured in chain.from_iterable(several.values() for several in pipelines_to_measure(config, 2, [1])):
        assert (measured.pipeline.nccl_high_priority, measured.pipeline.nccl_channels) == (False, 4)
