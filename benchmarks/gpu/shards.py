"""How much of the speed of the output layer is left when its vocabulary is spread over p devices?

    python benchmarks/gpu/shards.py [--output FILE.json]
    python benchmarks/gpu/shards.py --shapes 4096x4096x128256 --devices 1 2 4 8 16 32 --labels even
    python benchmarks/gpu/shards.py --device cpu --shapes 64x128x4096 --devices 1 4 --repetitions 2    to try it

All seven shapes take some minutes; --shapes names those of one command.

One GPU computes the passes of one of p devices: it has 1/p of the rows of the weight, and a table with the statistics
of the other shards in the place of their messages. For every shape (tokens x hidden size x vocabulary), mode and p:

    S, C, T     milliseconds, medians of runs that take turns; C is part of T with two barriers (vocab-1)
    efficiency  time of the whole layer on one device / (p x time of S, C and T), 100 % is linear scaling
    paper       the same of the paper's implementation on A100 at 256k (arXiv 2411.05288, table 3), where it says it
    E, G        microseconds of this device's embedding rows and of their gradients, and their efficiency; they wait for
                nothing but memory, and below some microseconds a kernel does not get shorter

Labels, which are the token ids of E and G as well, are drawn as in text. Then the device that is measured, the first,
is the busiest: most tokens are its own, and E and G do not shrink to 1/p. With --labels even all devices are alike.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # shards of all sizes share the memory

import published
import torch
from passes import LABELS, MODES, pass_seconds, random_batches, random_weight
from timing import (
    DTYPES,
    Failure,
    Results,
    arguments,
    attempt,
    attempts,
    clean_up,
    device_of,
    milliseconds,
    percent,
    progress,
    table,
)

from evenpipe.vocabulary import LossOptions

SHAPES = (
    "4096x4096x128256",
    "2048x3072x256000",
    "4096x3072x256000",
    "2048x4096x256000",
    "4096x4096x256000",
    "2048x5120x256000",
    "4096x5120x256000",
)
"""Llama-3-8B, and the paper's models at its largest vocabulary."""
BATCHES = 3


def total(seconds: dict[str, float], mode: str, kinds: str) -> float | None:
    """Of all these passes; None if one of them failed."""
    wanted = kinds if MODES[mode] else kinds.replace("C", "")
    return sum(seconds[kind] for kind in wanted) if seconds.keys() >= set(wanted) else None


def efficiency(whole: float | None, devices: int, shard: float | None) -> float | None:
    """Of a shard, whose device is one of so many."""
    return None if whole is None or shard is None else whole / (devices * shard)


def measure(shape: str, given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Row by row, of one shape."""
    tokens, width, vocabulary = map(int, shape.split("x"))
    weight = random_weight(vocabulary, width, DTYPES[given.dtype], device)
    batches = random_batches(BATCHES, tokens, weight, drawn=given.labels)
    options = LossOptions(keep=given.keep, kernels=given.kernels)
    for mode in MODES:
        whole: dict[str, float] = {}
        for devices in sorted({1, *given.devices}):
            found = attempt(partial(pass_seconds, weight, devices, mode, options, batches, given=given))
            timings, failures = ({}, {"all": found}) if isinstance(found, Failure) else found
            seconds = {kind: timing.seconds for kind, timing in timings.items()}
            whole = seconds if devices == 1 else whole
            output, rows = (
                efficiency(total(whole, mode, kinds), devices, total(seconds, mode, kinds)) for kinds in ("SCT", "EG")
            )
            yield {
                "tokens": tokens,
                "hidden_size": width,
                "vocabulary": vocabulary,
                "mode": mode,
                "devices": devices,
                "seconds": seconds,
                "timings": {kind: timing.to_dict() for kind, timing in timings.items()},
                "efficiency": output,
                "rows_efficiency": rows,
                "paper_efficiency": published.OUTPUT_EFFICIENCY.get((devices, tokens, mode)),
                "paper_rows_efficiency": published.INPUT_EFFICIENCY.get((devices, tokens)),
                "reasons": {kind: failure.reason for kind, failure in failures.items()},
            }


HEADER = ["mode", "p", "S ms", "C ms", "T ms", "sum", "efficiency", "paper", "E µs", "G µs", "efficiency", "paper"]


def line(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    seconds = row["seconds"]
    return [
        row["mode"],
        str(row["devices"]),
        *(milliseconds(seconds.get(kind)) for kind in "SCT"),
        milliseconds(total(seconds, row["mode"], "SCT")),
        percent(row["efficiency"]),
        percent(row["paper_efficiency"]),
        *(f"{1e6 * seconds[kind]:.1f}" if kind in seconds else "-" for kind in "EG"),
        percent(row["rows_efficiency"]),
        percent(row["paper_rows_efficiency"]),
    ]


def main() -> None:
    assert __doc__ is not None
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="TOKENSxHIDDENxVOCABULARY")
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], metavar="P")
    parser.add_argument("--labels", choices=LABELS, default="text", help="how they are drawn (default: %(default)s)")
    parser.add_argument("--keep", choices=("probabilities", "nothing"), default="probabilities", help="between S and T")
    parser.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of hidden states and weight")
    given = parser.parse_args()
    device = device_of(given)
    results = Results(given, device)
    for shape in given.shapes:
        rows: list[dict[str, Any]] = []
        missing: list[str] = []
        for row in attempts(measure(shape, given, device)):
            if isinstance(row, Failure):
                results.add({"shape": shape, "reason": row.reason})
                missing.append(f"the rest: {row.reason}")
                continue
            results.add(row)
            rows.append(row)
            progress(f"{shape}: {'  '.join(line(row))}")
            case = f"{row['mode']}, {row['devices']} devices"
            missing += [f"{case}, {kind}: {reason}" for kind, reason in row["reasons"].items()]
        print(f"\n{shape} (tokens x hidden size x rows), {given.dtype}, labels: {given.labels}")
        print(table([HEADER, *map(line, rows)]))
        for text in missing:
            print(f"did not run: {text}")
        print(end="", flush=True)
        clean_up()


if __name__ == "__main__":
    main()
