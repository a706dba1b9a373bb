"""`evenpipe init [--model MODEL] [--data PATH] [-o FILE.toml]`, or `evenpipe init --example NAME|all`."""

from __future__ import annotations

import argparse
from pathlib import Path

from evenpipe.cli.printing import say
from evenpipe.cli.values import check_output
from evenpipe.errors import InputError
from evenpipe.given import beside, check_new, plain


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
    """Write a complete configuration, or examples. Mistakes are found before torch is imported, where possible."""
    from evenpipe.train.examples import ALL, write_example, write_examples

    if arguments.example and (arguments.model or arguments.data or arguments.processes):
        raise InputError(
            "--example is a complete configuration, so it cannot be combined with --model, --data or --processes"
        )
    if arguments.processes is not None and arguments.processes < 1:
        raise InputError(f"--processes is {arguments.processes}, but must be at least 1")
    all_examples = arguments.example == ALL
    path = Path(arguments.output or ("examples" if all_examples else f"{arguments.example or 'train'}.toml"))
    if not all_examples:
        check_output(path, ".toml", "a configuration")
    check_new(path)
    data = None
    if not arguments.example:
        _check_model(arguments.model)
        if arguments.data is not None:
            from evenpipe.train.found_data import find_data

            data = find_data(arguments.data)
    if all_examples:
        write_examples(path)
        say(f"wrote {path}")
        return 0
    if arguments.example:
        write_example(arguments.example, path)
    else:
        from evenpipe.train.new_config import new_tables, write_new

        write_new(new_tables(arguments.model, data, arguments.processes, path.stem), path)
    for remark in () if data is None else data.remarks:
        say(remark)
    say(f"wrote {path}; next: evenpipe train {path}")
    return 0


def _check_model(model: str | None) -> None:
    """Refuse a path that does not exist, unless it may be a hub name."""
    if model is None or Path(model).exists():
        return
    if model.startswith((".", "/", "~")) or model.endswith(".json") or model.count("/") > 1:
        raise InputError(f"--model is {plain(model)}, but there is no such file or folder{beside(model)}")
