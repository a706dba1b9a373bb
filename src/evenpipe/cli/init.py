"""`evenpipe init [--model MODEL] [--data PATH] [-o FILE.toml]`, or `evenpipe init --example NAME|all`."""

from __future__ import annotations

from pathlib import Path

from evenpipe.cli.declarations import Count
from evenpipe.cli.options import check_output
from evenpipe.cli.printing import say
from evenpipe.errors import InputError
from evenpipe.given import check_new, nearest_path, plain


def run(
    *,
    model: str | None = None,
    data: str | None = None,
    processes: Count | None = None,
    example: str | None = None,
    output: str | None = None,
) -> int:
    """Write a complete configuration, or examples.

    --model NAME|FOLDER|FILE.json  hub name, folder or config.json; default: a small model with fresh weights
    --data FOLDER|FILE             text, JSON lines, parquet, or a folder that save_to_disk wrote; default: sources of
                                   Python's library
    --processes N                  devices of the pipeline; default: the GPUs, or the cores
    --example NAME                 write an example instead: quickstart, experts, v_half, zbv; all: every example, with
                                   models and training loops
    -o, --output FILE.toml         the configuration to write; default: train.toml, or NAME.toml; all: the folder
                                   examples
    """
    from evenpipe.train.examples import ALL, write_example, write_examples

    if example and (model or data or processes):
        raise InputError(
            "--example is a complete configuration, so it cannot be combined with --model, --data or --processes"
        )
    path = Path(output or ("examples" if example == ALL else f"{example or 'train'}.toml"))
    if example != ALL:
        check_output(path, ".toml")
    check_new(path)
    if example == ALL:
        write_examples(path)
        say(f"wrote {path}")
        return 0
    remarks: tuple[str, ...] = ()
    if example:
        write_example(example, path)
    else:
        remarks = _write(path, model, data, processes)
    for remark in remarks:
        say(remark)
    say(f"wrote {path}; next: evenpipe train {path}")
    return 0


def _write(path: Path, model: str | None, data: str | None, processes: int | None) -> tuple[str, ...]:
    """Write the configuration, and return remarks about the data. Mistakes are detected before torch is imported, where
    possible."""
    _check_model(model)
    source = None
    if data is not None:
        from evenpipe.train.found_data import find_data

        source = find_data(data)
    from evenpipe.train.new_config import new_tables, write_new

    write_new(new_tables(model, source, processes, path.stem), path)
    return () if source is None else tuple(source.remarks)


def _check_model(model: str | None) -> None:
    """Refuse a path that does not exist, unless it may be a hub name."""
    if model is None or Path(model).exists():
        return
    if model.startswith((".", "/", "~")) or model.endswith(".json") or model.count("/") > 1:
        raise InputError(f"--model is {plain(model)}, but there is no such file or folder{nearest_path(model)}")
