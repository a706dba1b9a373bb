"""What each process of a case runs: a short training with checkpoints, in which one of them fails.

Every part runs at least twice. In the first round the victim counts the places where it could fail (function calls and
returns, through Python's profiler); in the second it fails at the one that the case asks for. Faults of the start have
functions of their own, in place of two steps of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_case import LAYERS, Case
from transformers import LlamaConfig, MixtralConfig

from evenpipe import Pipeline, initialise_worker
from evenpipe.checkpoints import prepare_folder, save
from evenpipe.communication.communicator import Handle
from evenpipe.errors import InputError
from evenpipe.processes import worker
from evenpipe.processes.worker import finish_worker

SILENCE_SECONDS = 4.0
START_SECONDS = 30.0
"""Time for processes to arrive, on a machine that may be busy."""
HANG_SECONDS = 6.0
"""Limit of a wait in a case where a process hangs; elsewhere so long that reaching it is a fault."""
FOLDER, CASE = "EVENPIPE_FAULT_FOLDER", "EVENPIPE_FAULT_CASE"

OF_A_PIPELINE = ("schedule", "vocabulary", "microbatches", "tp", "cp", "context_exchange")
OF_A_PIPELINE += ("slices", "ep")
"""Fields of a case that are options of its pipeline."""

ISSUING = {"isend", "irecv", "broadcast", "reduce", "all_gather", "all_reduce", "batch_isend_irecv"}
ISSUING |= {"all_gather_single", "reduce_scatter_single", "all_to_all_single"}
ISSUING |= {"all_gather_into_tensor", "reduce_scatter_tensor"}  # the same before torch 2.13


def timeout_seconds(case: Case) -> float:
    return HANG_SECONDS if case.how == "hangs" else 120.0


def train(case: Case, folder: Path) -> int:
    """Two pipelines, five steps, two checkpoints."""
    rank = int(os.environ["RANK"])
    _print_into(folder / f"printed-{rank}")
    _show_waits(folder / f"waiting-{rank}")
    trap = Trap(case, folder, rank)
    initialise_worker(silence_seconds=SILENCE_SECONDS, timeout_seconds=timeout_seconds(case), torch_device="cpu")
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2} if case.ep > 1 else {}
    sizes = {"vocab_size": 67, "hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": LAYERS}
    config = (MixtralConfig if experts else LlamaConfig)(**experts, **sizes, **heads)
    options = {name: getattr(case, name) for name in OF_A_PIPELINE} | {"dp": case.ep}
    for number in range(2):
        checkpoints = folder / f"checkpoints-{number}"
        with trap.armed("build"):
            trained = Pipeline(config, **options, self_check=False, timeout_seconds=timeout_seconds(case))
        tokens = 6 if case.cp == 1 else 8  # a multiple of two chunks for each rank and slice
        ids = torch.randint(0, 67, (2 * case.microbatches, tokens), generator=torch.Generator().manual_seed(rank))
        optimizer = torch.optim.AdamW(trained.parameters(), foreach=False)
        prepare_folder(checkpoints, trained.process_group)
        for step in range(1, 3):
            with trap.armed("step"), trap.armed("wait"), trap.armed("issue"):
                result = trained.step(ids)
            assert result.loss > 0
            trained.clip_grad_norm_(1.0)
            with trap.armed("optimizer"):
                optimizer.step()
            trained.zero_grad()
            with trap.armed("evaluate"):
                assert trained.evaluate(ids).loss > 0
            metadata = {"step": step, "model_config": config.to_dict(), "tied": trained.description.tied}
            with trap.armed("checkpoint"):
                save(checkpoints, step, trained.parameter_shards(), optimizer, metadata, trained.process_group)
        with trap.armed("close"):
            trained.close()
    (folder / f"done-{rank}").touch()
    return rank


class Trap:
    """In the victim, and in the process that is stopped before it."""

    def __init__(self, case: Case, folder: Path, rank: int) -> None:
        self._case, self._folder, self._rank = case, folder, rank
        self._rounds = 0
        self._seen = self._counted = 0
        self._target: int | None = None

    @contextlib.contextmanager
    def armed(self, where: str) -> Iterator[None]:
        """A part of the program in which a case may have its fault."""
        if where != self._case.where or self._rank not in (self._case.victim, self._case.also_stopped):
            yield
            return
        self._rounds += 1
        if self._rounds == 2 and self._rank == self._case.also_stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        self._target = int(self._case.share * self._counted) if self._rounds == 2 else None
        self._seen = 0
        sys.setprofile(self._event if self._rounds <= 2 and self._rank == self._case.victim else None)
        try:
            yield
        finally:
            sys.setprofile(None)
        self._counted = self._seen
        if self._rounds == 2 and self._rank == self._case.victim:
            self._fire(f"the end of {where}")  # this round was shorter than the first

    def _event(self, frame, event: str, _) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not self._is_place(code.co_filename, code.co_name, event):
            return
        self._seen += 1
        if self._target is not None and self._seen > self._target:
            sys.setprofile(None)
            self._fire(f"{event} of {code.co_qualname}", delayed=self._case.where == "wait" and self._seen % 2 == 0)

    def _is_place(self, file: str, function: str, event: str) -> bool:
        where = self._case.where
        if where == "wait":
            return function == "begin_wait" and event == "return" and file.endswith("watch.py")
        if where == "issue":
            return function in ISSUING and file.endswith("distributed_c10d.py")
        if where == "optimizer":
            return "/torch/optim/" in file
        return "/evenpipe/" in file

    def _fire(self, place: str, delayed: bool = False) -> None:
        if self._case.also_stopped is not None:
            time.sleep(0.3)  # so that the other one is stopped by now
        fail(self._case.how, self._folder, place, delayed=delayed)


def fail(how: str, folder: Path, place: str, *, delayed: bool = False) -> None:
    """Fails, after writing down where and when. Delayed: from another thread, while this one is in what follows."""
    (folder / "fault.part").write_text(f"{time.monotonic()} {place}")
    (folder / "fault.part").rename(folder / "fault")
    if how.startswith("SIG"):
        signalled = os.getpid(), getattr(signal, how)
        if delayed:
            threading.Timer(0.01, os.kill, signalled).start()
            time.sleep(0)
            return
        os.kill(*signalled)
        time.sleep(600 if how == "SIGTERM" else 0)  # under torchrun the watch ends it
    elif how == "freezes":
        ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock
    elif how == "hangs":
        time.sleep(600)
    elif how == "os._exit(7)":
        os._exit(7)
    elif how == "sys.exit(5)":
        sys.exit(5)
    raise {
        "ArithmeticError": ArithmeticError("a bad number"),
        "MemoryError": MemoryError(),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "InputError": InputError("loss: a bad number; expected a good one"),
        "OSError": OSError(errno.ENOSPC, "no space left on device"),
    }[how]


def _print_into(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _show_waits(file: Path) -> None:
    """The file holds 1 while this process is in a wait of a transfer, whatever the watch believes."""
    file.write_bytes(b"0")
    descriptor = os.open(file, os.O_WRONLY)
    wait = Handle.wait

    def shown(self, needed_by: str = "") -> Any:
        os.pwrite(descriptor, b"1", 0)
        result = wait(self, needed_by)
        os.pwrite(descriptor, b"0", 0)
        return result

    Handle.wait = shown


# --- faults of the start ----------------------------------------------------------------------------------------------


def _with_fault(function: Callable[..., Any], place: str, before: float, after: float) -> Callable[..., Any]:
    """`function`, failing before or after it where the case's share is below these."""

    def run(*arguments: Any, **named: Any) -> Any:
        _fail_if("before", before)
        result = function(*arguments, **named)
        _fail_if("after", after)
        return result

    def _fail_if(when: str, share: float) -> None:
        if CASE not in os.environ:
            return
        case = Case.load(os.environ[CASE])
        is_here = share - 0.25 <= case.share < share
        if case.where == "start" and int(os.environ["RANK"]) == case.victim and is_here:
            fail(case.how, Path(os.environ[FOLDER]), f"{when} {place}")

    return run


# Imported into the fork server, or first of all under torchrun.
worker.meet = _with_fault(worker.meet, "meeting", 0.25, 0.5)
dist.init_process_group = _with_fault(dist.init_process_group, "making the default group", 0.75, 1.0)

if __name__ == "__main__":  # under torchrun
    train(Case.load(os.environ[CASE]), Path(os.environ[FOLDER]))
    finish_worker()
