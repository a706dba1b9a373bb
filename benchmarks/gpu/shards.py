"""How much of the speed of the output layer is left when its vocabulary is spread over p devices?

    python benchmarks/gpu/shards.py [--shapes 4096x4096x128256 ...] [--devices 1 2 4 8 16 32] [--output FILE.json]
    python benchmarks/gpu/shards.py --device cpu --shapes 64x128x4096 --devices 1 4 --repetitions 2    to try it

One GPU computes the passes of one of p devices: it has 1/p of the rows of the weight, and a table with the statistics
of the other shards in the place of their messages. For every shape (tokens x hidden size x vocabulary), mode and p:

    S, C, T     milliseconds, medians of runs that take turns; C is part of T with two barriers (vocab-1)
    efficiency  time of the whole layer on one device / (p x time of S, C and T), 100 % is linear scaling
    paper       the same of the paper's implementation on A100 at 256k (arXiv 2411.05288, table 3), where it says it
    E, G        microseconds of this device's embedding rows and of their gradients, and their efficiency; they wait for
                nothing but memory, and below some microseconds a kernel does not get shorter
"""

from __future__ import annotations

import argparse
from typing import Any

import published
import torch
from passes import MODES, pass_seconds, random_batches, random_weight
from timing import DTYPES, Results, arguments, device_of, milliseconds, percent, table

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


def measure(shape: str, given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All rows of one shape."""
    tokens, width, vocabulary = map(int, shape.split("x"))
    weight = random_weight(vocabulary, width, DTYPES[given.dtype], device)
    batches = random_batches(BATCHES, tokens, weight)
    found = []
    for mode in MODES:
        whole: dict[str, float] = {}
        for devices in sorted({1, *given.devices}):
            options = LossOptions(keep=given.keep, kernels=given.kernels)
            seconds = pass_seconds(weight, devices, mode, options, batches, given=given)
            output, rows = seconds["S"] + seconds["C"] + seconds["T"], seconds["E"] + seconds["G"]
            whole = whole or {"output": output, "rows": rows}
            found.append(
                {
                    "tokens": tokens,
                    "hidden_size": width,
                    "vocabulary": vocabulary,
                    "mode": mode,
                    "devices": devices,
                    "seconds": seconds,
                    "efficiency": whole["output"] / (devices * output),
                    "rows_efficiency": whole["rows"] / (devices * rows),
                    "paper_efficiency": published.OUTPUT_EFFICIENCY.get((devices, tokens, mode)),
                    "paper_rows_efficiency": published.INPUT_EFFICIENCY.get((devices, tokens)),
                }
            )
    return found


HEADER = ["mode", "p", "S ms", "C ms", "T ms", "sum", "efficiency", "paper", "E µs", "G µs", "efficiency", "paper"]


def line(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    seconds = row["seconds"]
    return [
        row["mode"],
        str(row["devices"]),
        *(milliseconds(seconds[kind]) for kind in "SCT"),
        milliseconds(sum(seconds[kind] for kind in "SCT")),
        percent(row["efficiency"]),
        percent(row["paper_efficiency"]),
        *(f"{1e6 * seconds[kind]:.1f}" for kind in "EG"),
        percent(row["rows_efficiency"]),
        percent(row["paper_rows_efficiency"]),
    ]


def main() -> None:
    assert __doc__ is not None
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="TOKENSxHIDDENxVOCABULARY")
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], metavar="P")
    parser.add_argument("--keep", choices=("probabilities", "nothing"), default="probabilities", help="between S and T")
    parser.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of hidden states and weight")
    given = parser.parse_args()
    device = device_of(given)
    results = Results(given, device)
    for shape in given.shapes:
        rows = measure(shape, given, device)
        for row in rows:
            results.add(row)
        first = rows[0]
        print(f"\n{first['tokens']} tokens x {first['hidden_size']} x {first['vocabulary']} rows, {given.dtype}")
        print(table([HEADER, *map(line, rows)]), flush=True)


if __name__ == "__main__":
    main()
