"""What each process of a network scenario runs: a pipeline over all of them, step after step, until it is told to end.

Its folder tells the judge what happens: `pid-RANK` once it has started, `step-RANK` with the number of its last step,
`printed-RANK`, and `done-RANK` when it came to a good end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from evenpipe import Pipeline, initialise_worker
from evenpipe.processes.launcher import launch
from evenpipe.processes.worker import finish_worker

LAYERS, VOCABULARY = 4, 61


def pipeline_and_batch(timeout_seconds: float) -> tuple[Pipeline, torch.Tensor]:
    """The same weights and token ids on any number of processes."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1)
    pipeline = Pipeline(config, microbatches=2, self_check=False, timeout_seconds=timeout_seconds)
    return pipeline, torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))


def train(folder: Path, silence_seconds: float, timeout_seconds: float) -> None:
    rank = int(os.environ["RANK"])
    printed = os.open(folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    worker = initialise_worker(silence_seconds=silence_seconds, timeout_seconds=timeout_seconds, torch_device="cpu")
    pipeline, ids = pipeline_and_batch(timeout_seconds)
    others = tuple(other for other in range(worker.world_size) if other != rank)
    ends = torch.zeros(1)
    step = 0
    while not ends:
        loss = pipeline.step(ids).loss
        pipeline.zero_grad()
        step += 1
        (folder / f"step-{rank}").write_text(str(step))
        time.sleep(0.02)
        ends[0] = rank == 0 and (folder / "end").exists()
        with worker.watch.during("word to go on", "default", others):
            dist.broadcast(ends, 0)
    (folder / f"done-{rank}").write_text(repr(loss))


if __name__ == "__main__":
    given = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    if "RANK" in os.environ:  # under torchrun
        train(*given)
        finish_worker()
    else:
        launch(train, *given, processes=2, torch_device="cpu", silence_seconds=given[1], timeout_seconds=given[2])
