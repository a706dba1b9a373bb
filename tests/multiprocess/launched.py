"""Functions that test_launch.py runs in processes of their own, and a program that is interrupted while it has some."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import until_they_wait
from torch import Tensor, nn

from evenpipe.communication.communicators import Communicators
from evenpipe.errors import InputError, RunError
from evenpipe.processes.launcher import initialise_worker, launch


def report(number, table):
    """What a process is: its rank, the sum over all, and how it was set up."""
    worker = initialise_worker()
    total = torch.tensor([float(worker.rank)])
    dist.all_reduce(total)
    return {
        "rank": worker.rank,
        "pid": os.getpid(),
        "sum": total,
        "arguments": (number, table),
        "threads": torch.get_num_threads(),
        "environment": os.environ.get("OF_THE_CALLER"),
        "prepared": "colorsys" in sys.modules,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_DFL,
        "timeout": worker.timeout_seconds,
    }


def fail(folder: str, how: str) -> None:
    """Process 1 of three fails while 0 and 2 wait for it."""
    worker = initialise_worker()
    rank = worker.rank
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    communicators = Communicators([("B:1>0", (0, 1)), ("F:1>2", (1, 2))], timeout_seconds=600, watch=worker.watch)
    communicators.warm_up()
    if rank == 0:
        communicators["B:1>0"].receive(torch.zeros(1), 1, "0RECV_B2").wait("0B2")
    elif rank == 2:
        communicators["F:1>2"].receive(torch.zeros(1), 1, "2RECV_F3").wait("2F3")
    elif how == "input":
        raise InputError('schedule: "2f2b", expected one of gpipe, 1f1b')
    elif how == "run":
        raise RunError("checkpoint: no space left on the device")
    elif how == "other":
        raise KeyError("boo")
    elif how == "exit":
        sys.exit(5)
    else:
        until_they_wait(worker.watch, (0, 2))
        os.kill(os.getpid(), getattr(signal, how))


def everyone_fails() -> None:
    """The same mistake found by all at once, as with a wrong config."""
    raise InputError("devices: 3, expected at most 2")


# ---- mistakes of a user, and which lines an error shows


class Layer(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ torch.ones(3, 5)  # shown


def pipeline_of(*layers: nn.Module) -> Any:
    from evenpipe import Pipeline

    return Pipeline.from_modules(
        nn.Embedding(32, 8), layers, None, nn.Linear(8, 32, bias=False), microbatches=2, self_check=False
    )


IDS = torch.arange(8).view(2, 4)


def gives_text() -> None:
    pipeline = pipeline_of(nn.Linear(8, 8), nn.Linear(8, 8))
    pipeline.step("text")  # shown


def calls_two_methods() -> None:
    pipeline = pipeline_of(nn.Linear(8, 8), nn.Linear(8, 8))
    if dist.get_rank() == 0:
        pipeline.full_state_dict()  # shown
    else:
        pipeline.step(IDS)  # shown


def multiplies_wrongly() -> None:
    pipeline = pipeline_of(Layer(8, 8), Layer(8, 8))
    pipeline.step(IDS)


def reads_no_json() -> None:
    json.loads("{")  # shown


def refuses() -> None:
    raise InputError("size: 3, expected 4")  # shown


# ---- programs


def wait_for_ever(folder: str) -> None:
    """0 and 1 wait for each other in gloo, where Python's own Ctrl-C is not heard; 2 computes."""
    rank = dist.get_rank()
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 2:
        time.sleep(600)
    dist.recv(torch.zeros(1), 1 - rank)


def go_on_until_told(folder: str) -> None:
    """Steps of all together, until there is a file `go`."""
    rank = dist.get_rank()
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    told = torch.zeros(1)
    while not told:
        told[0] = rank == 0 and (Path(folder) / "go").exists()
        dist.broadcast(told, 0)
    (Path(folder) / f"done-{rank}").touch()


def told(folder: str) -> None:
    """The program whose launcher is stopped for longer than any process may be silent."""
    launch(go_on_until_told, folder, processes=2, silence_seconds=1.0)


def interrupted(folder: str) -> None:
    """The program: says how each launch ended. The test sends the signals."""
    for name in ("early", "first", "second", "third"):
        (Path(folder) / name).mkdir()
        try:
            launch(wait_for_ever, str(Path(folder) / name), processes=3)
        except BaseException as error:
            print(name, repr(error), flush=True)


if __name__ == "__main__":
    {"interrupted": interrupted, "told": told}[sys.argv[1]](sys.argv[2])
