"""What the benchmarks of one GPU share: arguments, times, peaks of memory, errors, and the file with all figures.

Times are those of the stream on a GPU (events around each run, the cache overwritten before it) and of the clock on a
CPU. All arms run in turn, again and again, and every repetition has inputs of its own; medians count.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common

from evenpipe.runtime.trace import machine

FLUSHED = 256 * 2**20
"""Bytes that are written before each run: more than the caches of any GPU hold."""
ROWS = 1024
"""Of matrices that are compared at a time, so that their copies in fp64 are small."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PACKAGES = ("triton", "accelerate", "liger-kernel", "cut-cross-entropy", "quack-kernels")
"""Of which the version is noted where they are installed."""
MIB = 2**20

T = TypeVar("T")


# --- arguments and results -----------------------------------------------------------------------------------


def arguments(text: str) -> argparse.ArgumentParser:
    """A parser with what all scripts take; `text` is the script's docstring."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying a script only")
    parser.add_argument("--repetitions", type=int, default=20, metavar="N", help="that count (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="that do not (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    return parser


def device_of(given: argparse.Namespace) -> torch.device:
    """The device that was asked for, named in the table. Ends the program where it is not there."""
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("skipped: torch sees no NVIDIA GPU here (--device cpu tries the script with small shapes)")
    device = torch.device(given.device)
    about = machine(device)
    tried = "" if device.type == "cuda" else " (a CPU: these figures are for trying the script only)"
    print(f"on {about['machine']}{tried}; torch {about['torch']}, Python {about['python']}")
    return device


class Results(common.Results):
    """Figures of a script, with its arguments, the machine and versions; written after each case."""

    def __init__(self, given: argparse.Namespace, device: torch.device, **more: Any) -> None:
        settings = {name: value for name, value in vars(given).items() if name != "output"}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
        cuda = torch.version.cuda if device.type == "cuda" else None
        super().__init__(settings, given.output, device, cuda=cuda, **versions, **more)

    @property
    def about(self) -> str:
        """Machine and versions, in one line."""
        return ", ".join(f"{name} {self._all[name]}" for name in ("machine", "torch", "python", "evenpipe"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Failure:
    """Why something did not run, in one line."""

    reason: str


def attempt(work: Callable[[], T]) -> T | Failure:
    """What `work` returns; or why it does not, whatever the reason: a library that is not there, a kernel that does not
    compile for this device, memory that is not enough."""
    try:
        return work()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Failure(f"{type(error).__name__}: {lines[0][:160]}")
    finally:
        gc.collect()
        torch.cuda.empty_cache()


# --- time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way of doing something. `run` is timed and takes what `prepare`, which is not, made for a repetition."""

    run: Callable[[Any], Any]
    prepare: Callable[[int], Any] = lambda repetition: repetition

    def __call__(self, repetition: int = 0) -> Any:
        return self.run(self.prepare(repetition))


class Clock:
    """Seconds of single runs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flushed = torch.empty(FLUSHED if self._cuda else 0, dtype=torch.uint8, device=device)

    def seconds(self, arm: Arm, repetition: int) -> float:
        """Of one run."""
        prepared = arm.prepare(repetition)
        if not self._cuda:
            started = time.perf_counter()
            arm.run(prepared)
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        arm.run(prepared)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000  # elapsed_time: milliseconds


def medians(arms: Mapping[str, Arm], device: torch.device, given: argparse.Namespace) -> dict[str, float]:
    """Seconds of every arm; all run in turn."""
    clock = Clock(device)
    found: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(given.warm_up + given.repetitions):
        for name, arm in arms.items():
            seconds = clock.seconds(arm, repetition)
            if repetition >= given.warm_up:
                found[name].append(seconds)
    return {name: statistics.median(times) for name, times in found.items()}


# --- memory --------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """What `work` returns, and the most memory that it takes beside what was there before and what it returns; None on
    a CPU, where nobody counts it. `work` should have run before: libraries keep workspaces from their first use on."""
    if device.type != "cuda":
        return work(), None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = work()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


# --- errors --------------------------------------------------------------------------------------------------


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of `exact` (in fp64), block by block of rows."""
    difference = norm = 0.0
    for one, other in zip(found.split(ROWS), exact.split(ROWS), strict=True):
        difference += float((one.double() - other).square().sum())
        norm += float(other.square().sum())
    return (difference / norm) ** 0.5


# --- tables --------------------------------------------------------------------------------------------------


def table(rows: list[list[str]]) -> str:
    """Rows for a terminal; the first column stands left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(line))
        for line in ([*zip(row, widths, strict=True)] for row in rows)
    )


def milliseconds(seconds: float | None) -> str:
    """For a table."""
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def percent(share: float | None, digits: int = 1) -> str:
    """For a table."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"
