"""What the benchmarks of one GPU share: arguments, times, peaks of memory, errors, and the file with all figures.

Times are those of the stream on a GPU (events around each run) and of the clock on a CPU. On a GPU the cache is
overwritten before each run, and the stream is held up until all of the run is queued: what the host needs for that does
not count, unless the run itself waits for the GPU. All arms run in turn, again and again, and every repetition has
inputs of its own; medians count. What fails, when it is built or in one of its turns, is left out with the reason.

Scripts set PYTORCH_CUDA_ALLOC_CONF before they import torch: by its newer name torch 2.9 to 2.11 do not heed it
(github.com/pytorch/pytorch/issues/183387).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common

from evenpipe.runtime.trace import machine

FLUSHED = 256 * 2**20
"""Bytes that are written before each run: more than the caches of any GPU hold."""
HELD_UP_SECONDS = (0.0005, 0.05)
"""The stream, before each run: at least and at most. What needs longer to be queued waits for the GPU by itself."""
CYCLES_PER_SECOND = 2e9
"""Of the fastest GPUs, about; a slower one is held up longer."""
LEAST = 3
"""Repetitions that count, whatever time they take."""
ROWS = 1024
"""Of matrices that are compared at a time, so that their copies in fp64 are small."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PACKAGES = ("triton", "accelerate", "liger-kernel", "cut-cross-entropy", "quack-kernels")
"""Of which the version is noted where they are installed."""
MIB = 2**20

STARTED = time.perf_counter()

T = TypeVar("T")


# --- arguments and results -----------------------------------------------------------------------------------


def arguments(text: str, *, arm_seconds: float = 2.0) -> argparse.ArgumentParser:
    """A parser with what all scripts take; `text` is the script's docstring."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying a script only")
    parser.add_argument("--repetitions", type=int, default=20, metavar="N", help="that count (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="that do not (default: %(default)s)")
    parser.add_argument(
        "--arm-seconds",
        type=float,
        default=arm_seconds,
        metavar="SECONDS",
        help=f"an arm that has taken so long has no more turns once {LEAST} of them count (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    return parser


def device_of(given: argparse.Namespace) -> torch.device:
    """The device that was asked for, named in the table. Ends the program where it is not there."""
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("skipped: torch sees no NVIDIA GPU here (--device cpu tries the script with small shapes)")
    device = torch.device(given.device)
    about = machine(device)
    tried = "" if device.type == "cuda" else " (a CPU: these figures are for trying the script only)"
    print(f"on {about['machine']}{tried}; torch {about['torch']}, Python {about['python']}", flush=True)
    return device


def progress(text: str) -> None:
    """A line that is there at once, for those who wait and for runs that are broken off."""
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", flush=True)


class Results(common.Results):
    """Figures of a script, with its arguments, the machine and versions; written after each case."""

    def __init__(self, given: argparse.Namespace, device: torch.device, **more: Any) -> None:
        settings = {name: value for name, value in vars(given).items() if name != "output"}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
        cuda = torch.version.cuda if device.type == "cuda" else None
        super().__init__(settings, given.output, device, cuda=cuda, **versions, **more)

    def complete(self, case: dict[str, Any], **figures: Any) -> None:
        """Further figures of a case that was added before; it is the last one then."""
        self.cases[:] = [one for one in self.cases if one is not case]
        case |= figures
        self.add(case)

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
        failure = Failure(f"{type(error).__name__}: {lines[0][:160]}")
    clean_up()  # only here has the error let go of the tensors of its frames
    return failure


def attempts(cases: Iterator[T]) -> Iterator[T | Failure]:
    """All cases; and behind them why there are no more, if making one failed."""
    while (case := attempt(partial(next, cases, None))) is not None:
        yield case


def clean_up() -> None:
    """Give back the memory that nobody uses any more."""
    gc.collect()
    with contextlib.suppress(Exception):  # behind some errors nothing works on the device any more, not even this
        torch.cuda.empty_cache()


def works(device: torch.device) -> bool:
    """Does it compute still?"""
    return device.type != "cuda" or not isinstance(attempt(partial(torch.cuda.synchronize, device)), Failure)


# --- time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way of doing something. `run` is timed and takes what `prepare`, which is not, made for a repetition."""

    run: Callable[[Any], Any]
    prepare: Callable[[int], Any] = lambda repetition: repetition

    def __call__(self, repetition: int = 0) -> Any:
        return self.run(self.prepare(repetition))


@dataclass(frozen=True)
class Timing:
    """Of an arm. seconds: the median. host: in how many repetitions the stream had begun before all was queued, so that
    what the host did may be in them."""

    seconds: float
    repetitions: int
    host: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Clock:
    """Seconds of single runs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flushed = torch.empty(FLUSHED if self._cuda else 0, dtype=torch.uint8, device=device)

    def hold_up(self, arm: Arm) -> float:
        """Seconds for which the stream is to be held up before a run of `arm`: twice what queueing one takes."""
        if not self._cuda:
            return 0.0
        arm()  # compiles, tunes, asks for memory
        prepared = arm.prepare(0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        arm.run(prepared)
        queued = time.perf_counter() - started
        least, most = HELD_UP_SECONDS
        return min(max(2 * queued, least), most)

    def seconds(self, arm: Arm, repetition: int, held_up: float) -> tuple[float, bool]:
        """Of one run; and had the stream begun before all was queued?"""
        prepared = arm.prepare(repetition)
        if not self._cuda:
            started = time.perf_counter()
            arm.run(prepared)
            return time.perf_counter() - started, False
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        torch.cuda._sleep(int(held_up * CYCLES_PER_SECOND))
        start.record()
        arm.run(prepared)
        end.record()
        begun = start.query()
        end.synchronize()
        return start.elapsed_time(end) / 1000, begun  # elapsed_time: milliseconds


def medians(
    arms: Mapping[str, Arm], device: torch.device, given: argparse.Namespace
) -> tuple[dict[str, Timing], dict[str, Failure]]:
    """Of every arm; all run in turn. One that fails has no more turns, and one that takes long has fewer."""
    clock = Clock(device)
    held_up: dict[str, float] = {}
    runs: dict[str, list[tuple[float, bool]]] = {name: [] for name in arms}
    spent = dict.fromkeys(arms, 0.0)
    failures: dict[str, Failure] = {}

    def turn(name: str, repetition: int) -> tuple[float, bool]:
        if name not in held_up:
            held_up[name] = clock.hold_up(arms[name])
        return clock.seconds(arms[name], repetition, held_up[name])

    for repetition, name in itertools.product(range(given.warm_up + given.repetitions), arms):
        if name in failures or (len(runs[name]) >= LEAST and spent[name] > given.arm_seconds):
            continue
        started = time.perf_counter()
        run = attempt(partial(turn, name, repetition))
        if isinstance(run, Failure):
            failures[name] = run
            if not works(device):  # the others keep what they have
                lost = Failure(f"the device no longer works since a run of {name}")
                failures |= {other: lost for other in arms if other not in failures and not runs[other]}
                break
        elif repetition >= given.warm_up:
            runs[name].append(run)
            spent[name] += time.perf_counter() - started
    return {
        name: Timing(statistics.median(seconds for seconds, _ in own), len(own), sum(begun for _, begun in own))
        for name, own in runs.items()
        if own and name not in failures
    }, failures


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
