"""How long schedules take to be made, from thousands of passes to millions: is it linear, and how much memory?

    python benchmarks/schedules.py            every size
    python benchmarks/schedules.py --quick    a few small ones

Each size runs in a process of its own, so that its peak memory is its own, the smaller ones three times, of which the
best counts. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from provenance import write

from evenpipe.schedule import EQUAL_COSTS, add_communication, add_vocabulary, check_program, generate
from evenpipe.schedule.transforms.communication import Lowering
from evenpipe.simulate import simulate

STEPS = ("generate", "transform", "lower", "check")
"""From a name to a checked program, in turn."""
ASIDE = ("time", "row", "simulate")
"""Besides: timing an order to lower a single device, that device's row, and the full simulator."""

Size = tuple[str, int, int, int]
"""Schedule, devices, microbatches, stages per device."""

QUICK: tuple[Size, ...] = (("1f1b", 4, 32, 1), ("1f1b", 8, 64, 1), ("1f1b", 8, 128, 1), ("interleaved", 4, 32, 4))
LADDER: tuple[Size, ...] = (
    ("1f1b", 8, 64, 1),
    ("1f1b", 16, 128, 1),
    ("1f1b", 16, 512, 1),
    ("1f1b", 32, 512, 1),
    ("1f1b", 64, 512, 1),
    ("1f1b", 64, 1024, 1),
    ("1f1b", 128, 2048, 1),
    ("interleaved", 8, 64, 4),
    ("interleaved", 16, 128, 4),
    ("interleaved", 32, 256, 4),
    ("interleaved", 32, 1024, 4),
)


def measure(size: Size) -> dict[str, Any]:
    """CPU seconds of each step for one size, in vocabulary mode vocab-2, in this process."""
    name, devices, microbatches, stages_per_device = size
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def timed(step: str, function: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = function()
        seconds[step] = round(time.process_time() - start, 4)
        return result

    base = timed("generate", lambda: generate(name, devices, microbatches, stages_per_device=stages_per_device))
    order = timed("transform", lambda: add_vocabulary(base, "vocab-2"))
    program = timed("lower", lambda: add_communication(order))
    report = timed("check", lambda: check_program(program))
    assert report.ok, report.faults[0]
    result = {
        "schedule": name,
        "devices": devices,
        "microbatches": microbatches,
        "stages_per_device": stages_per_device,
        "passes": sum(map(len, order.rows)),
        "items": sum(map(len, program.rows)),
        "wall_seconds": round(time.perf_counter() - began, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    lowering = timed("time", lambda: Lowering(order))
    timed("row", lambda: lowering.row(devices // 2))
    if result["passes"] < 10**6:
        timed("simulate", lambda: simulate(order, EQUAL_COSTS))
    result["seconds"] = seconds
    return result


def best(size: Size, times: int) -> dict[str, Any]:
    """The least CPU time of each step over so many fresh processes, and the least peak and time by the clock."""
    runs = []
    for _ in range(times):
        command = [sys.executable, __file__, "--one", *map(str, size)]
        runs.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    result = dict(runs[0])
    for field in ("wall_seconds", "peak_mib"):
        result[field] = min(run[field] for run in runs)
    result["seconds"] = {step: min(run["seconds"][step] for run in runs) for step in runs[0]["seconds"]}
    return result


def linear(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """Least squares of seconds = a * items, its R², and the exponent of a power law (least squares of logarithms)."""
    slope = sum(x * y for x, y in zip(sizes, seconds, strict=True)) / sum(x * x for x in sizes)
    mean = sum(seconds) / len(seconds)
    rest = sum((y - slope * x) ** 2 for x, y in zip(sizes, seconds, strict=True))
    logs = [(math.log(x), math.log(y)) for x, y in zip(sizes, seconds, strict=True)]
    x0, y0 = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    exponent = sum((x - x0) * (y - y0) for x, y in logs) / sum((x - x0) ** 2 for x, _ in logs)
    return {
        "microseconds_per_item": round(slope * 1e6, 2),
        "r_squared": round(1 - rest / sum((y - mean) ** 2 for y in seconds), 4),
        "exponent": round(exponent, 3),
    }


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per schedule, how the time of all steps together grows with the items of the program."""
    result = {}
    for name in dict.fromkeys(row["schedule"] for row in rows):
        own = [row for row in rows if row["schedule"] == name]
        if len(own) > 1:
            total = [sum(row["seconds"][step] for step in STEPS) for row in own]
            result[name] = linear([row["items"] for row in own], total)
    return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a terminal."""
    head = ["schedule", "p", "m", "v", "passes", "items", *STEPS, "sum", "µs/item", "MiB", *ASIDE]
    lines = [head]
    for row in rows:
        seconds = row["seconds"]
        total = sum(seconds[step] for step in STEPS)
        lines.append(
            [
                row["schedule"],
                *(str(row[field]) for field in ("devices", "microbatches", "stages_per_device")),
                f"{row['passes']:,}",
                f"{row['items']:,}",
                *(f"{seconds[step]:.2f}" for step in STEPS),
                f"{total:.2f}",
                f"{total / row['items'] * 1e6:.1f}",
                str(row["peak_mib"]),
                *(f"{seconds[step]:.2f}" if step in seconds else "-" for step in ASIDE),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small sizes")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    parser.add_argument(
        "--one", nargs=4, metavar=("SCHEDULE", "P", "M", "V"), help="one size, in this process, as JSON"
    )
    arguments = parser.parse_args()
    if arguments.one:
        name, *numbers = arguments.one
        devices, microbatches, stages = map(int, numbers)
        print(json.dumps(measure((name, devices, microbatches, stages))))
        return
    rows = [best(size, 1 if size[1] * size[2] > 2**16 else 3) for size in (QUICK if arguments.quick else LADDER)]
    print(f"CPU seconds, vocab-2, equal costs\n{table(rows)}")
    for name, fit in fits(rows).items():
        print(
            f"{name}: {fit['microseconds_per_item']} µs per item, R² of the line {fit['r_squared']}, "
            f"exponent {fit['exponent']}"
        )
    if arguments.output:
        write(arguments.output, {"rows": rows, "fits": fits(rows)})


if __name__ == "__main__":
    main()
