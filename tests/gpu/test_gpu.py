"""The cases of `make gpu-test`, where there is a GPU, elsewhere a few of them; which device a process takes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_cases import CASES, ON_A_CPU_TOO
from run_gpu import no_gpu

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.processes import worker
from evenpipe.processes.watch import Watch
from evenpipe.runtime import pipeline


@pytest.fixture(scope="module", autouse=True)
def fork_server(own_fork_server):
    """One for this module, that finds its cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
        yield


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    CASES[name]("cuda")


WITHOUT_A_GPU: dict[str, Callable[[dict[str, Any]], bool]] = {
    "one process": lambda figures: figures["gradient_error"] >= 0,
    "4 processes, zbv, vocab-2, fp32": lambda figures: figures["gradient_error"] > 0,
    "4 processes, 1f1b, vocab-2, bf16": lambda figures: figures["gradient_error"] > 0,
    "a run, continued": lambda figures: len(figures["losses"]) == 4,
    "allocations of a settled step": lambda figures: figures == {},  # a CPU has none to count
}


@pytest.mark.parametrize("name", WITHOUT_A_GPU)
@pytest.mark.slow
def test_the_cases_themselves_on_a_cpu(name: str, monkeypatch) -> None:
    assert name in ON_A_CPU_TOO
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert WITHOUT_A_GPU[name](CASES[name]("cpu"))


@pytest.mark.skipif(no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    program = [sys.executable, str(Path(__file__).with_name("run_gpu.py")), "--output", str(output)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"The GPU tests were skipped: {no_gpu()}.\n"
    assert not output.exists()


# -- which device, which library -------------------------------------------------------------------


def gpus(monkeypatch, count: int = 4, *, current: int = 0, bound: str | None = None, **environment: int) -> list[str]:
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


BOUND = (
    "torch_device: '{}', but the default process group is bound to cuda:1 "
    "(device_id of init_process_group); expected 'cuda:1'"
)
ANY = (None, "cuda", torch.device("cuda"))
DEVICES: list[tuple[dict[str, Any], tuple[Any, ...], str]] = [
    # the machine and its environment, what is wanted, the device or the error
    ({"count": 0}, (None,), "cpu"),
    ({"count": 0}, ("cuda",), "torch_device: 'cuda', but this process sees 0 GPUs"),
    ({"count": 1, "LOCAL_RANK": 3}, (None,), "cuda:0"),  # several processes share it
    ({"LOCAL_RANK": 3}, (None,), "cuda:3"),
    ({"LOCAL_RANK": 5}, (None,), "cuda:1"),
    ({"LOCAL_RANK": 2}, ("cuda",), "cuda:2"),
    ({"LOCAL_RANK": 2}, ("cuda:1",), "cuda:1"),
    ({"LOCAL_RANK": 2}, ("cpu",), "cpu"),
    ({}, ("cuda:4",), "torch_device: 'cuda:4', but this process sees 4 GPUs"),
    # where the caller names none
    ({}, ANY, "cuda:0"),
    ({"current": 2}, ANY, "cuda:2"),
    ({"bound": "cuda:3", "LOCAL_RANK": 1, "current": 2}, ANY, "cuda:3"),
    ({"LOCAL_RANK": 1, "SLURM_LOCALID": 0, "current": 2}, ANY, "cuda:1"),  # torchrun below srun
    ({"SLURM_LOCALID": 3, "current": 2}, ANY, "cuda:3"),
    ({"SLURM_LOCALID": 3, "OMPI_COMM_WORLD_LOCAL_RANK": 1}, ANY, "cuda:3"),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": 1, "current": 2}, ANY, "cuda:1"),
    # the default group has chosen already
    ({"bound": "cuda:1"}, ("cuda:1",), "cuda:1"),
    ({"bound": "cuda:1"}, ("cuda:0",), BOUND.format("cuda:0")),
    ({"bound": "cuda:1"}, ("cpu",), BOUND.format("cpu")),
]


def test_the_device_of_a_process(monkeypatch) -> None:
    for machine, choices, expected in DEVICES:
        for wanted in choices:
            done = gpus(monkeypatch, **machine)
            if expected.startswith("torch_device"):
                with pytest.raises(InputError) as error:
                    worker._select_device(wanted)
                assert expected in str(error.value) and done == [], (machine, wanted)
                continue
            device, identity = worker._select_device(wanted)
            on_gpu = device.type == "cuda"
            assert str(device) == expected, (machine, wanted)
            assert done == ([f"{device} is the current one", f"{device} is ready"] if on_gpu else [])
            assert identity == (f"GPU-{device.index}" if on_gpu else "")


OF_A_PIPELINE = [
    # of the process, of the default group, wanted, found; None: an error
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
]


def test_the_device_of_a_pipeline(monkeypatch) -> None:
    for own, bound, wanted, expected in OF_A_PIPELINE:
        done = gpus(monkeypatch, bound=bound, LOCAL_RANK=3)
        this = worker.Worker(0, 1, torch.device(own), 1.0, Watch(None), None, owned=True)
        device = None if wanted is None else torch.device(wanted)
        if expected is not None:
            chosen = worker.device_of_pipeline(this, device)
            assert str(chosen) == expected
            assert (f"{chosen} is the current one" in done) == (own == "cpu" and chosen.type == "cuda")
            continue
        with pytest.raises(InputError) as error:
            worker.device_of_pipeline(this, device)
        assert str(error.value) == (
            f"torch_device: '{wanted}', but this process computes on {own} since its first call of "
            f"initialise_worker or Pipeline; expected '{own}'; choose another one in that call"
        )
        assert done == []


def test_a_first_pipeline_chooses_for_the_process(monkeypatch) -> None:
    gpus(monkeypatch)
    seen = []

    def borrow(torch_device) -> None:
        seen.append(torch_device)
        raise InputError("seen")

    monkeypatch.setattr(pipeline, "borrow_worker", borrow)
    for wanted in (None, "cuda:1", "cuda"):
        with pytest.raises(InputError, match="seen"):
            Pipeline("a model", torch_device=wanted)
    assert seen == [None, torch.device("cuda:1"), torch.device("cuda")]


def test_nccl_only_where_no_two_processes_share_a_gpu() -> None:
    for gpus_of_processes, expected in (("a", True), ("ab", True), ("aa", False), ("aba", False)):
        values: dict[str, bytes] = {}
        store = SimpleNamespace(set=lambda key, value: values.update({key: value.encode()}), get=values.__getitem__)
        for rank in reversed(range(1, len(gpus_of_processes))):
            with contextlib.suppress(KeyError):  # the first process has not spoken yet; a real store would wait
                worker._gpus_differ(gpus_of_processes[rank], store, rank, len(gpus_of_processes))
        answers = [
            worker._gpus_differ(identity, store, rank, len(gpus_of_processes))
            for rank, identity in enumerate(gpus_of_processes)
        ]
        assert answers == [expected] * len(gpus_of_processes)


NOT_RUN_YET = {"a run, continued"}
"""Cases that are newer than the last run of all on a GPU (docs/status.md)."""


def test_figures_of_the_last_run_on_a_gpu() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_test.json"
    cases = json.loads(file.read_text())["cases"]
    assert cases.keys() == CASES.keys() - NOT_RUN_YET
    assert all(figures["passed"] for figures in cases.values())
