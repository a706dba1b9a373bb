"""A pipeline in a process that evenpipe did not start leaves that process as it is, and ends none."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_processes
from small_families import CONFIGS

from evenpipe import OffloadOptions, Pipeline, initialise_worker
from evenpipe.errors import RunError
from evenpipe.host import memory
from evenpipe.processes import worker
from evenpipe.runtime import pipeline as pipeline_module

CONFIG = CONFIGS["llama"](num_hidden_layers=2)
SILENCE_SECONDS = 1.0
ALLOCATOR: list[tuple[int, int]] = []
"""What the allocator was told."""


def everything() -> dict[str, Any]:
    """All of a process that a library can change behind its user's back."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wake-up descriptor": descriptor,
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "excepthook": sys.excepthook,
        "excepthook of threads": threading.excepthook,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "filters of warnings": copy.copy(warnings.filters),
        "options of the allocator": list(ALLOCATOR),
    }


def changed(before: dict[str, Any]) -> list[str]:
    after = everything()
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]


def train(**options: Any) -> None:
    with contextlib.closing(Pipeline(CONFIG, microbatches=2, self_check=True, **options)) as pipeline:
        pipeline.step(torch.arange(16).reshape(2, 8))


def compare() -> list[str]:
    """The first pipeline is not looked at: modules that it imports are no one's process."""
    memory._set_options = lambda *options: ALLOCATOR.append(options)
    train()
    before = everything()
    train()
    train(vocabulary="first-last", offload=OffloadOptions(activations="all"))
    faults = changed(before)
    try:
        Pipeline(CONFIG, microbatches=2, vocabulary="nonsense")
    except ValueError:
        faults += changed(before)
    return faults


def without_environment(work: Callable[[], Any]) -> Any:
    """Run as in a program that nobody launched."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return work()


def taken_over() -> tuple[list[str], int]:
    """The same where evenpipe was asked to run the process: here `compare` sees what it has to see."""
    initialise_worker()
    return compare(), len(ALLOCATOR)


def test_nothing_of_the_process_has_changed() -> None:
    assert run_processes(without_environment, 1, compare, group=False) == [[]]
    assert run_processes(compare, 2) == [[], []]  # joined by the program itself


def test_who_asks_gets_the_allocator_of_evenpipe() -> None:
    ((faults, told),) = run_processes(without_environment, 1, taken_over, group=False)
    assert any(fault.startswith("options of the allocator") for fault in faults) and told == 3


def fail(name: str, who: str) -> tuple[str, list[str]]:
    """Let `name` of the pipeline's module raise in processes `who`; return the error, and what has changed."""
    train()
    before = everything()
    reason = ArithmeticError("a bad number")  # stays, and with its traceback all that refers to the pipeline

    def wrong(*arguments: Any, **options: Any) -> None:
        time.sleep(2)  # the other process waits for this one
        raise reason

    fails = str(dist.get_rank()) in who
    with mock.patch.object(pipeline_module, name, wrong) if fails else contextlib.nullcontext():
        with pytest.raises(Exception, match="a bad number") as caught:
            train()
        faults = changed(before)
    train()
    return type(caught.value).__name__, faults


@pytest.mark.sampled(2)
@pytest.mark.parametrize("who", ["1", "01"])
@pytest.mark.parametrize("name", ["describe", "Builder"])  # before and after groups are made
def test_a_failure_while_a_pipeline_is_made_leaves_the_process_as_it_was(name: str, who: str) -> None:
    outcomes = run_processes(fail, 2, name, who)
    assert [faults for _, faults in outcomes] == [[], []]
    assert [kind for kind, _ in outcomes].count("ArithmeticError") == len(who), outcomes


ENDS = {
    "raises": "process 1 failed: ArithmeticError: a bad number",
    "dies": "has died: killed, out of memory or crashed",
    "is silent": "process 1 gave no sign of life for 1 s",
}


def fail_in_a_program(how: str) -> None:
    """One of two processes with torchrun's environment that somebody's own program runs; process 1 raises, dies, or is
    silent: stopped for longer than it may be."""
    torch.set_num_threads(1)
    worker.start_worker.__kwdefaults__["silence_seconds"] = SILENCE_SECONDS
    pipeline = Pipeline(CONFIG, microbatches=2, self_check=False)
    interrupted = threading.Event()
    pipeline._watch.interrupt_with(interrupted.set)
    ids = torch.arange(16).reshape(2, 8)
    pipeline.step(ids)
    if dist.get_rank() == 1:
        if how == "raises":
            raise ArithmeticError("a bad number")
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    elif how == "is silent":
        time.sleep(4 * SILENCE_SECONDS)  # much longer than a process of evenpipe would live now
    try:
        pipeline.step(ids)
    except RunError as error:
        print("alive:", error, flush=True)
        assert interrupted.wait(30), "NCCL would still wait"
    # If the peer dies just as the interpreter ends, a thread of gloo that gives its tensors back asks for the
    # interpreter's lock in vain, and torch aborts. So this process ends well after the peer.
    time.sleep(2 * SILENCE_SECONDS)


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.sampled(1)
def test_a_failure_is_named_where_a_process_waits_and_ends_no_other(how: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # here, so that its port is free
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, how],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert processes[0].stdout is not None
        said = processes[0].stdout.readline()  # alive, whatever the other one does
        if how == "is silent":
            processes[1].kill()  # gloo waits at the end of a process for what it has begun
        _, warned = processes[0].communicate(timeout=600)
    finally:
        for process in processes:
            process.kill()
    _, own = processes[1].communicate()
    assert processes[0].returncode == 0, said + warned
    assert said.startswith("alive: ") and ENDS[how] in said, said + warned
    if how == "raises":
        assert processes[1].returncode == 1 and own.rstrip().endswith("ArithmeticError: a bad number"), own


if __name__ == "__main__":
    fail_in_a_program(sys.argv[1])
