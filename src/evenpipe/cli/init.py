"""`evenpipe init [--model MODEL] [--data PATH] [-o FILE.toml]`, or `evenpipe init --example NAME|all`."""

from __future__ import annotations

import argparse
from pathlib import Path

from evenpipe.cli.printing import say
from evenpipe.cli.values import check_output
from evenpipe.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the data, or the name of an example."""
    parser.add_argument(
        "--model",
        metavar="NAME|FOLDER|FILE.json",
        help="hub name, folder or config.json (default: a small model with fresh weights)",
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER|FILE",
        help="text, JSON lines, parquet, or a folder that save_to_disk wrote (default: sources of Python's library)",
    )
    parser.add_argument("--processes", type=int, help="devices of the pipeline (default: the GPUs, or the cores)")
    parser.add_argument(
        "--example",
        metavar="NAME",
        help="write an example instead: quickstart, v_half, zbv; all: every example, with models and loops of your own",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.toml",
        help="the configuration to write (default: train.toml, or NAME.toml; all: the folder examples)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write a complete configuration, or examples."""
    from evenpipe.train.new_config import ALL, new_tables, write_example, write_examples, write_new

    if arguments.example and (arguments.model or arguments.data or arguments.processes):
        raise InputError(
            "--example is a complete configuration, so it cannot be combined with --model, --data or --processes"
        )
    if arguments.processes is not None and arguments.processes < 1:
        raise InputError(f"--processes is {arguments.processes}, but must be at least 1")
    if arguments.example == ALL:
        folder = Path(arguments.output or "examples")
        write_examples(folder)
        say(f"wrote {folder}")
        return 0
    path = Path(arguments.output or f"{arguments.example or 'train'}.toml")
    check_output(path, ".toml", "a configuration")
    if arguments.example:
        write_example(arguments.example, path)
    else:
        write_new(new_tables(arguments.model, arguments.data, arguments.processes, path.stem), path)
    say(f"wrote {path}; next: evenpipe train {path}")
    return 0
