"""One of two processes with torchrun's environment that somebody's own program runs; process 1 fails.

python own_process.py HOW    process 1 raises, dies, or is silent: stopped for longer than it may be
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from small_families import CONFIGS

from evenpipe import Pipeline
from evenpipe.errors import RunError

CONFIG = CONFIGS["llama"](num_hidden_layers=2)
SILENCE_SECONDS = 1.0


def main(how: str) -> None:
    from evenpipe.processes import worker

    torch.set_num_threads(1)
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
    main(sys.argv[1])
