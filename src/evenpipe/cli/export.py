"""`evenpipe export RUN_OR_CHECKPOINT -o FOLDER [--dtype DTYPE]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from evenpipe.cli.printing import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the source and the target."""
    parser.add_argument(
        "checkpoint",
        metavar="RUN_OR_CHECKPOINT",
        type=Path,
        help="a checkpoint, or the folder of a run, for its newest checkpoint",
    )
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", type=Path, required=True, help="the Hugging Face folder to write"
    )
    parser.add_argument(
        "--dtype",
        choices=("source", "float32", "bfloat16", "float16"),
        default="source",
        help="dtype of the weights (default: source, that of the model that training began with)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the folder."""
    from evenpipe.train.export import export_checkpoint

    export_checkpoint(arguments.checkpoint, arguments.output, dtype=arguments.dtype)
    say(f"wrote {arguments.output}")
    return 0
