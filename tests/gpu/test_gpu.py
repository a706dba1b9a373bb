"""The cases of `make gpu-test`, where there is a GPU; elsewhere a stand-in for each mechanism on the CPU."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.forkserver
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_cases import CASES, ON_A_CPU_TOO
from gpu_here import no_gpu

from evenpipe import Pipeline
from evenpipe.communication import staging
from evenpipe.errors import InputError
from evenpipe.processes import worker
from evenpipe.processes.watch import Watch
from evenpipe.runtime import pipeline


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """One for this module, that finds its cases; one that was started before knows other modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
        multiprocessing.forkserver._forkserver._stop()
        yield
    multiprocessing.forkserver._forkserver._stop()


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    CASES[name]("cuda")


@pytest.mark.parametrize("name", ["one process", "4 processes, zbv, vocab-2, fp32", "4 processes, 1f1b, vocab-2, bf16"])
def test_the_cases_themselves_on_a_cpu(name: str, monkeypatch) -> None:
    assert name in ON_A_CPU_TOO
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    figures = CASES[name]("cpu")
    assert figures["gradient_error"] > 0 or name == "one process"


def test_a_deterministic_run_goes_on_with_the_same_bits(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(CASES["a run, continued"]("cpu")["losses"]) == 4


def test_a_cpu_has_no_allocations_to_count(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert CASES["allocations of a settled step"]("cpu") == {}


@pytest.mark.skipif(no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    program = [sys.executable, str(Path(__file__).with_name("run_gpu.py")), "--output", str(output)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"The GPU tests were skipped: {no_gpu()}.\n"
    assert not output.exists()


# -- which device, which library -------------------------------------------------------------------


def gpus(monkeypatch, count: int, *, current: int = 0, bound: str | None = None, **environment: int) -> list[str]:
    """A machine with so many; returns what is done to them.

    environment: which process of its machine this one is, in the words of who started it.
    """
    done: list[str] = []
    for name in worker.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, number in environment.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.setattr(worker, "bound_device", lambda: None if bound is None else torch.device(bound))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"{device} is the current one"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"{device} is ready"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    return done


@pytest.mark.parametrize(
    ("wanted", "local_rank", "count", "expected"),
    [
        (None, 0, 0, "cpu"),
        (None, 0, 4, "cuda:0"),
        (None, 3, 4, "cuda:3"),
        (None, 3, 1, "cuda:0"),  # several processes share it
        (None, 5, 4, "cuda:1"),
        ("cuda", 2, 4, "cuda:2"),
        ("cuda:1", 2, 4, "cuda:1"),
        ("cpu", 2, 4, "cpu"),
        ("cuda", 0, 0, "torch_device: 'cuda', but this process sees 0 GPUs"),
        ("cuda:4", 0, 4, "torch_device: 'cuda:4', but this process sees 4 GPUs"),
    ],
)
def test_the_device_of_a_process(wanted, local_rank, count, expected, monkeypatch) -> None:
    done = gpus(monkeypatch, count, LOCAL_RANK=local_rank)
    if expected.startswith("torch_device"):
        with pytest.raises(ValueError, match=expected):
            worker._own_device(wanted)
        return
    device, identity = worker._own_device(wanted)
    assert str(device) == expected
    assert done == ([f"{device} is the current one", f"{device} is ready"] if device.type == "cuda" else [])
    assert identity == (f"GPU-{device.index}" if device.type == "cuda" else "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"bound": "cuda:3", "LOCAL_RANK": 1, "current": 2}, "cuda:3"),
        ({"LOCAL_RANK": 1, "SLURM_LOCALID": 0, "current": 2}, "cuda:1"),  # torchrun below srun
        ({"SLURM_LOCALID": 3, "current": 2}, "cuda:3"),
        ({"SLURM_LOCALID": 3, "OMPI_COMM_WORLD_LOCAL_RANK": 1}, "cuda:3"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": 1, "current": 2}, "cuda:1"),
        ({"current": 2}, "cuda:2"),
        ({}, "cuda:0"),
    ],
)
def test_which_gpu_where_the_caller_names_none(given, expected, monkeypatch) -> None:
    for wanted in (None, "cuda", torch.device("cuda")):
        gpus(monkeypatch, 4, **given)
        assert str(worker._own_device(wanted)[0]) == expected


@pytest.mark.parametrize("wanted", ["cuda:0", "cpu"])
def test_the_default_group_has_chosen_already(wanted, monkeypatch) -> None:
    done = gpus(monkeypatch, 4, bound="cuda:1")
    message = (
        f"torch_device: '{wanted}', but the default process group is bound to cuda:1 "
        "(device_id of init_process_group), expected 'cuda:1'"
    )
    with pytest.raises(InputError) as error:
        worker._own_device(wanted)
    assert (str(error.value), done) == (message, [])
    assert worker._own_device("cuda:1")[0] == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("own", "bound", "wanted", "expected"),
    [
        ("cuda:1", "cuda:1", None, "cuda:1"),
        ("cuda:1", "cuda:1", "cuda", "cuda:1"),
        ("cuda:1", "cuda:1", "cuda:1", "cuda:1"),
        ("cuda:1", "cuda:1", "cuda:0", None),
        ("cuda:1", "cuda:1", "cpu", None),  # torch would wait for ever: groups of gloo beside splits of NCCL
        ("cuda:1", None, "cuda:0", None),
        ("cuda:1", None, "cpu", "cpu"),  # processes that share a GPU, or one alone
        ("cpu", None, "cpu", "cpu"),
        ("cpu", None, "cpu:0", "cpu"),
        ("cpu", None, "cuda:2", "cuda:2"),
        ("cpu", None, "cuda", "cuda:3"),
    ],
)
def test_the_device_of_a_pipeline(own, bound, wanted, expected, monkeypatch) -> None:
    done = gpus(monkeypatch, 4, bound=bound, LOCAL_RANK=3)
    this = worker.Worker(0, 1, torch.device(own), 1.0, Watch(None), None, owned=True)
    given = None if wanted is None else torch.device(wanted)
    if expected is None:
        with pytest.raises(InputError) as error:
            worker.device_of_pipeline(this, given)
        assert str(error.value) == (
            f"torch_device: '{wanted}', but this process computes on {own} since its first call of "
            f"initialise_worker or Pipeline, expected '{own}'; choose another one in that call"
        )
        assert done == []
        return
    found = worker.device_of_pipeline(this, given)
    assert str(found) == expected
    assert (f"{found} is the current one" in done) == (own == "cpu" and found.type == "cuda")


class SeenError(Exception):
    """What was to be seen has been seen."""


@pytest.mark.parametrize("wanted", [None, "cuda:1", "cuda"])
def test_a_first_pipeline_chooses_for_the_process(wanted, monkeypatch) -> None:
    gpus(monkeypatch, 4)

    def seen(torch_device) -> None:
        assert torch_device == (None if wanted is None else torch.device(wanted))
        raise SeenError

    monkeypatch.setattr(pipeline, "borrow_worker", seen)
    with pytest.raises(SeenError):
        Pipeline("a model", torch_device=wanted)


@pytest.mark.parametrize(
    ("identities", "expected"),
    [(["GPU-a"], True), (["GPU-a", "GPU-b"], True), (["GPU-a", "GPU-a"], False), (["GPU-a", "GPU-b", "GPU-a"], False)],
)
def test_nccl_only_where_no_two_processes_share_a_gpu(identities, expected) -> None:
    values: dict[str, bytes] = {}
    store = SimpleNamespace(set=lambda key, value: values.update({key: value.encode()}), get=values.__getitem__)
    for rank in reversed(range(1, len(identities))):
        with contextlib.suppress(KeyError):  # the first process has not spoken yet; a real store would wait
            worker._each_its_own(identities[rank], store, rank, len(identities))
    found = [worker._each_its_own(identities[rank], store, rank, len(identities)) for rank in range(len(identities))]
    assert found == [expected] * len(identities)


# -- a GPU that computes late: streams in which nothing runs before somebody waits --------------------


class Stream:
    """Work that is queued, and done when the host synchronises or another stream that was told to wait is."""

    def __init__(self, *_) -> None:
        self.queued: list = []

    def wait_stream(self, other: Stream) -> None:
        work = list(other.queued)
        self.queued.append(lambda: [run() for run in work])

    def synchronize(self) -> None:
        while self.queued:
            self.queued.pop(0)()


class LateTensor:
    """A tensor on a GPU: copies to and from it are queued in the current stream."""

    def __init__(self, gpu: Gpu, value: torch.Tensor) -> None:
        self.gpu, self.value = gpu, value
        self.shape, self.dtype = value.shape, value.dtype

    def copy_(self, host: HostTensor, non_blocking: bool) -> None:
        assert non_blocking and host.pinned
        self.gpu.stream.queued.append(lambda: self.value.copy_(host.value))


class HostTensor:
    def __init__(self, gpu: Gpu, value: torch.Tensor, pinned: bool) -> None:
        self.gpu, self.value, self.pinned = gpu, value, pinned

    def copy_(self, late: LateTensor, non_blocking: bool) -> None:
        assert non_blocking and self.pinned
        self.gpu.stream.queued.append(lambda: self.value.copy_(late.value))


class Gpu:
    def __init__(self, monkeypatch) -> None:
        self.default = self.stream = Stream()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "stream", self.using)
        monkeypatch.setattr(
            staging.torch,
            "empty",
            lambda shape, dtype, pin_memory: HostTensor(self, torch.full(shape, -1.0), pin_memory),
        )

    @contextlib.contextmanager
    def using(self, stream: Stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before


def test_what_is_sent_is_what_the_gpu_has_been_asked_to_compute(monkeypatch) -> None:
    zeros = [torch.zeros(4) for _ in range(3)]
    gpu = Gpu(monkeypatch)
    copies = staging.Staging(torch.device("cuda", 0))
    reads, writes, both = (LateTensor(gpu, value) for value in zeros)
    gpu.stream.queued.append(lambda: [reads.value.fill_(5.0), both.value.fill_(7.0)])  # not yet done
    hosts, finish = copies.to_host(reads, writes, both)
    assert [host.value.tolist() for host in hosts] == [[5.0] * 4, [-1.0] * 4, [7.0] * 4]
    hosts[1].value.fill_(8.0)  # what arrives
    hosts[2].value.fill_(9.0)
    finish()
    gpu.default.synchronize()
    assert [tensor.value.tolist() for tensor in (reads, writes, both)] == [[5.0] * 4, [8.0] * 4, [9.0] * 4]


def test_a_plain_receive_does_not_wait_for_the_gpu(monkeypatch) -> None:
    zero = torch.zeros(4)
    gpu = Gpu(monkeypatch)
    copies = staging.Staging(torch.device("cuda", 0))
    gpu.stream.queued.append(lambda: pytest.fail("the host waited"))
    hosts, finish = copies.to_host(None, LateTensor(gpu, zero), None)
    assert len(hosts) == 1 and finish is not None
    reads_only = copies.to_host(None, None, None)
    assert reads_only == ([], None)


NOT_RUN_YET = {"a run, continued"}
"""Cases that are newer than the last run of all on a GPU (docs/status.md)."""


def test_figures_of_the_last_run_on_a_gpu() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_test.json"
    cases = json.loads(file.read_text())["cases"]
    assert cases.keys() == CASES.keys() - NOT_RUN_YET
    assert all(figures["passed"] for figures in cases.values())
