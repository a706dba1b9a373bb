"""A program of somebody's own that makes pipelines: what of its process is another after they are closed.

python own_process.py alone              one process
python own_process.py taken_over         one process, in which evenpipe was asked to run it
python own_process.py spawned            two processes of torch.multiprocessing, joined by the program itself
python own_process.py fails NAME WHO     the same, but NAME of the pipeline's module raises in processes WHO, as in 01
python own_process.py as_torchrun HOW    one of several processes with torchrun's environment; process 1 raises, dies,
                                         or is stopped for longer than it may be silent
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from evenpipe import OffloadOptions, Pipeline, initialise_worker
from evenpipe.errors import RunError
from evenpipe.host import memory
from evenpipe.runtime import pipeline as pipeline_module

CONFIG = LlamaConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
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


def say(line: str) -> None:
    """Write a whole line at once: another process may write too."""
    print(f"{line}\n", end="", flush=True)


def train(**options: Any) -> None:
    with contextlib.closing(Pipeline(CONFIG, microbatches=2, self_check=True, **options)) as pipeline:
        pipeline.step(torch.arange(16).reshape(2, 8))


def compare() -> None:
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
    say(f"changed: {faults}")


def taken_over() -> None:
    """The same where evenpipe was asked to run the process: this program sees what it has to see."""
    initialise_worker()
    compare()
    print("allocator:", len(ALLOCATOR))


def spawned(rank: int, folder: str, how: Callable[..., None], *arguments: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    how(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def fails(name: str, who: str) -> None:
    train()
    before = everything()
    reason = ArithmeticError("a bad number")  # stays, and with its traceback all that refers to the pipeline

    def wrong(*arguments: Any, **options: Any) -> None:
        time.sleep(2)  # the other process waits for this one
        raise reason

    with mock.patch.object(pipeline_module, name, wrong) if str(dist.get_rank()) in who else contextlib.nullcontext():
        try:
            train()
        except Exception as error:
            say(f"{type(error).__name__}: {error}; changed: {changed(before)}")
    train()


def as_torchrun(how: str) -> None:
    from evenpipe.processes import worker

    worker.start_worker.__kwdefaults__["silence_seconds"] = SILENCE_SECONDS
    pipeline = Pipeline(CONFIG, microbatches=2, self_check=False)
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
    # If the peer dies just as the interpreter ends, a thread of gloo that gives its tensors back asks for the
    # interpreter's lock in vain, and torch aborts. So this process ends well after the peer.
    time.sleep(2 * SILENCE_SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "alone":
        compare()
    elif sys.argv[1] == "taken_over":
        taken_over()
    elif sys.argv[1] in ("spawned", "fails"):
        how = compare if sys.argv[1] == "spawned" else fails
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(spawned, (folder, how, *sys.argv[2:]), nprocs=2)
    else:
        as_torchrun(sys.argv[2])
