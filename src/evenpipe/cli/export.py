"""`evenpipe export RUN_OR_CHECKPOINT -o FOLDER`."""

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


def run(arguments: argparse.Namespace) -> int:
    """Write the folder."""
    from evenpipe.train.export import export_checkpoint

    export_checkpoint(arguments.checkpoint, arguments.output)
    say(f"wrote {arguments.output}")
    return 0
