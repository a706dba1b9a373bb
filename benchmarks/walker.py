"""The walker's own time per pass: one device, stages that do nothing, vocabulary layers that do nothing.

    python benchmarks/walker.py [--repeats 30]      # a table; processor time of one thread

A stage hands its input on, so what is left of a pass is the walker: finding the pass, its inputs and outputs, entering
autograd and leaving it (a call of torch's engine with an empty graph is 15 of the microseconds of a B or I). Kernels
and waits are outside. Time that the fixed parts of a step take (inputs checked, cut and distributed) is told apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe import Pipeline
from evenpipe.model import EdgeSpec, EdgeTensor
from evenpipe.runtime.batch import Batch, cut
from evenpipe.runtime.inputs import Inputs
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.walker import Walker
from evenpipe.schedule import Pass, add_recompute, generate, parts_of, plan_program

HIDDEN_SIZE = 8
MICROBATCHES = 64
LIMIT_MICROSECONDS = 30.0
CASES = (
    # schedule, options, mode, with R
    ("gpipe", {}, "first-last", False),
    ("1f1b", {}, "first-last", False),
    ("1f1b", {}, "vocab-2", False),
    ("1f1b", {}, "vocab-1", False),
    ("1f1b", {}, "first-last", True),
    ("interleaved", {"stages_per_device": 4}, "first-last", False),
    ("interleaved", {"stages_per_device": 4}, "vocab-2", False),
    ("zb-h1", {}, "first-last", False),
    ("zbv", {}, "first-last", False),
    ("zbv", {}, "vocab-2", False),
    ("dualpipe-v", {}, "first-last", False),
)


class EmptyStage(nn.Module):
    """Hands its input on."""

    incoming = outgoing = EdgeSpec((EdgeTensor("hidden", ("sequences", "tokens", HIDDEN_SIZE), torch.float32),))

    def forward(
        self, hidden: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        return hidden


class EmptyEmbedding:
    """What the walker calls of an embedding, with tensors that are there already."""

    def __init__(self, tokens: int) -> None:
        self._hidden = torch.zeros(tokens, HIDDEN_SIZE)

    def begin(self, batch: Batch) -> None: ...
    def end(self) -> None: ...

    def rows(self, microbatch: int) -> Tensor:
        return self._hidden

    def place(self, rows: Tensor, microbatch: int) -> Tensor:
        return rows

    def pick(self, gradient: Tensor, microbatch: int) -> Tensor:
        return gradient

    def add_gradient(self, gradient: Tensor, microbatch: int) -> None: ...


class EmptyOutput:
    """What the walker calls of an output layer, likewise."""

    left: tuple[int, ...] = ()

    def __init__(self, tokens: int, two_barriers: bool) -> None:
        self._statistics = torch.zeros(tokens, 3)
        self._gradient = torch.zeros(tokens, HIDDEN_SIZE)
        self._from_backward = self._gradient if two_barriers else None
        self.loss = None

    def begin(self) -> None: ...
    def clear(self) -> None: ...

    def forward(self, hidden: Tensor, microbatch: object, index: int, *, gradients: bool) -> Tensor:
        return self._statistics

    def combine(self, table: Tensor, microbatch: object, index: int, *, gradients: bool) -> None: ...

    def hidden_gradient(self, index: int) -> Tensor:
        return self._gradient

    def backward(self, index: int) -> Tensor | None:
        return self._from_backward


def microseconds_per_pass(schedule: str, options: dict[str, int], mode: str, recompute: bool, repeats: int) -> float:
    order = generate(schedule, 1, MICROBATCHES, **options)
    order = add_recompute(order) if recompute else order
    _, program = plan_program(order, 1, MICROBATCHES, mode)
    tokens = 1
    passes = sum(len(parts_of(item)) for item in program.rows[0] if isinstance(item, Pass))
    walker = Walker(
        0,
        {stage: EmptyStage() for stage in range(program.placement.stages)},
        EmptyEmbedding(tokens),  # type: ignore[arg-type]
        EmptyOutput(tokens, program.vocabulary != "vocab-2"),  # type: ignore[arg-type]
        transport=Transport(None, (0,), HIDDEN_SIZE, torch.float32, torch.device("cpu")),
        vocabulary_passes=program.vocabulary.sharded,
    )
    times = []
    for _ in range(repeats):
        batch = batch_of_zeros(tokens)
        started = time.thread_time()
        walker.walk(program, batch)
        times.append(time.thread_time() - started)
    return statistics.median(times) / passes * 1e6


def batch_of_zeros(tokens: int) -> Batch:
    ids = torch.zeros(MICROBATCHES, tokens, dtype=torch.int64)
    return cut(Inputs(ids, ids), microbatches=MICROBATCHES, dtype=torch.float32)


def microseconds_beside_the_walk(microbatches: int, repeats: int) -> float:
    """What a step takes before and after the walk: inputs checked, cut and distributed, weights refreshed."""
    embedding, head = nn.Embedding(16, HIDDEN_SIZE), nn.Linear(HIDDEN_SIZE, 16, bias=False)
    layers = [nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(4)]
    pipeline = Pipeline.from_modules(embedding, layers, None, head, microbatches=microbatches, self_check=False)
    ids = torch.zeros(microbatches, 4, dtype=torch.int64)
    walk, walked = pipeline._executor.walker.walk, []

    def timed_walk(*arguments: Any) -> Any:
        started = time.thread_time()
        result = walk(*arguments)
        walked.append(time.thread_time() - started)
        return result

    pipeline._executor.walker.walk = timed_walk  # type: ignore[method-assign]
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        pipeline.step(ids)
        times.append(time.thread_time() - started - walked[-1])
    pipeline.close()
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"microseconds per pass, median of {arguments.repeats} steps of {MICROBATCHES} microbatches")
    worst = 0.0
    for schedule, options, mode, recompute in CASES:
        found = microseconds_per_pass(schedule, options, mode, recompute, arguments.repeats)
        worst = max(worst, found)
        name = " ".join([schedule, *(f"{key}={value}" for key, value in options.items()), "with R" * recompute])
        print(f"{name:35} {mode:12} {found:6.1f}")
    print(f"most {worst:.1f}, limit {LIMIT_MICROSECONDS:.0f}")
    for microbatches in (1, 8, 64):
        beside = microseconds_beside_the_walk(microbatches, arguments.repeats)
        print(f"beside the walk, a step of {microbatches:2} microbatches: {beside:.0f} microseconds")


if __name__ == "__main__":
    main()
