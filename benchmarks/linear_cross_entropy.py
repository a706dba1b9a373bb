"""The head for one device against a linear layer with torch's cross-entropy, on the CPU.

    python benchmarks/linear_cross_entropy.py [--vocabularies 32768 131072] [--output FILE.json]

Loss and all gradients of one batch, each arm in a process of its own with one thread; the arms run in turn, so that a
machine that others share treats them alike. Printed are medians:

    seconds     of forward and backward
    MiB         by which the process's resident memory grows at most, in another process that runs one batch
    faster      how many times as fast as "torch", median of the ratios of neighbours, and its memory over torch's

Arms: "torch" is `cross_entropy(x @ W.T, target)` in the dtype of x; "torch fp32" the same with `.float()` on bf16
logits, as training loops have it; "torch chunked" `torch.nn.functional.linear_cross_entropy` with its default options,
where this torch has it; "evenpipe" `evenpipe.linear_cross_entropy`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import common
import torch
from common import option
from torch import Tensor, nn
from torch.nn import functional

from evenpipe import linear_cross_entropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings(common.Options):
    """What is measured."""

    tokens: int = option(2048, "of the batch")
    hidden_size: int = option(512, "of the hidden states")
    repetitions: int = option(7, "that count")
    warm_up: int = option(1, "repetitions that do not count")


def _chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, target, options=options)


ARMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": lambda hidden, weight, target: functional.cross_entropy(hidden @ weight.t(), target),
    "torch fp32": lambda hidden, weight, target: functional.cross_entropy((hidden @ weight.t()).float(), target),
    "torch chunked": _chunked,
    "evenpipe": linear_cross_entropy,
}


def arms_for(dtype: str, with_chunked: bool) -> list[str]:
    """Those that differ from each other and exist."""
    names = ["torch", "evenpipe"]
    if dtype != "fp32":
        names.insert(1, "torch fp32")
    if with_chunked and hasattr(functional, "linear_cross_entropy"):
        names.append("torch chunked")
    return names


class Batch:
    """Hidden states, a weight and labels; the same in every arm."""

    def __init__(self, settings: Settings, vocabulary: int, dtype: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DTYPES[dtype]).requires_grad_()

        self.hidden = normal(settings.tokens, settings.hidden_size)
        self.weight = normal(vocabulary, settings.hidden_size)
        with torch.no_grad():
            self.weight.mul_(settings.hidden_size**-0.5)
        self.target = torch.randint(vocabulary, (settings.tokens,), generator=generator)

    def step(self, arm: str) -> float:
        """Seconds of forward and backward."""
        self.hidden.grad = self.weight.grad = None
        begin = time.perf_counter()
        ARMS[arm](self.hidden, self.weight, self.target).backward()
        return time.perf_counter() - begin


def serve(to: Connection, settings: Settings, vocabulary: int, dtype: str, arm: str) -> None:
    """A process that runs one batch whenever it is asked to."""
    torch.set_num_threads(1)
    batch = Batch(settings, vocabulary, dtype)
    while to.recv():
        to.send(batch.step(arm))


def memory(to: Connection, settings: Settings, vocabulary: int, dtype: str, arm: str) -> None:
    """By how many bytes one batch makes this process grow."""
    torch.set_num_threads(1)
    small = Batch(Settings(tokens=8, hidden_size=8), 64, dtype)
    small.step(arm)  # what is loaded or compiled at the first use
    batch = Batch(settings, vocabulary, dtype)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _peak()
    batch.step(arm)
    to.send(_peak() - before)


def _peak() -> int:
    """Bytes that this process had resident at most."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def start(function: Any, *arguments: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    return process, here


def run_case(settings: Settings, vocabulary: int, dtype: str, arms: list[str]) -> dict[str, Any]:
    grown = {}
    for arm in arms:
        process, of_memory = start(memory, settings, vocabulary, dtype, arm)
        grown[arm] = of_memory.recv()
        process.join()
    servers = {arm: start(serve, settings, vocabulary, dtype, arm) for arm in arms}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for repetition in range(settings.warm_up + settings.repetitions):
        for arm, (_, pipe) in servers.items():
            pipe.send(True)
            found = pipe.recv()
            if repetition >= settings.warm_up:
                seconds[arm].append(found)
    for process, pipe in servers.values():
        pipe.send(False)
        process.join()
    return {
        "vocabulary": vocabulary,
        "dtype": dtype,
        "arms": {
            arm: {
                "seconds": statistics.median(seconds[arm]),
                "all_seconds": seconds[arm],
                "bytes": grown[arm],
                "times_as_fast": statistics.median(
                    theirs / ours for theirs, ours in zip(seconds["torch"], seconds[arm], strict=True)
                ),
                "memory_ratio": grown[arm] / grown["torch"],
            }
            for arm in arms
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--chunked", action="store_true", help="with torch's own chunked operator, which is slow here")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output)
    print(f"{'vocabulary':<12}{'dtype':<7}{'arm':<15}{'seconds':>9}{'MiB':>8}{'faster':>9}{'memory':>9}")
    for dtype in given.dtypes:
        for vocabulary in given.vocabularies:
            case = run_case(settings, vocabulary, dtype, arms_for(dtype, given.chunked))
            results.add(case)
            for arm, found in case["arms"].items():
                print(
                    f"{vocabulary:<12}{dtype:<7}{arm:<15}{found['seconds']:>9.2f}{found['bytes'] / MIB:>8.0f}"
                    f"{found['times_as_fast']:>8.2f}x{100 * found['memory_ratio']:>7.0f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
