"""Reads values of options: several separated by commas, an amount of memory, the file of `--output`."""

from __future__ import annotations

import argparse
from pathlib import Path

from evenpipe.errors import InputError
from evenpipe.given import plain


def words(name: str, text: str) -> tuple[str, ...]:
    """The values of option --`name`. Raises InputError if it has none."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise InputError(
            f"--{name.replace('_', '-')} is '{plain(text)}', expected one value, or several separated by commas"
        )
    return found


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of option --`name`. Raises InputError for anything else."""
    try:
        return tuple(int(word) for word in words(name, text))
    except ValueError:
        raise InputError(
            f"--{name.replace('_', '-')} is '{plain(text)}', expected whole numbers such as 1,2,4"
        ) from None


def numbers(name: str, text: str | None) -> float | list[float] | None:
    """One number, or several separated by commas. Raises InputError."""
    if text is None:
        return None
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--{name} is '{plain(text)}', expected a number, or one per device such as 8,8,6,4") from None
    return values[0] if len(values) == 1 else values


def memory(arguments: argparse.Namespace) -> int | None:
    """The bytes of `--gpu-memory`. Raises InputError for anything else than a size."""
    from evenpipe.sizes import parse_size

    return None if arguments.gpu_memory is None else parse_size(arguments.gpu_memory, "--gpu-memory")


def check_output(path: Path, suffix: str, what: str) -> None:
    """Raise InputError if the file, `what` in words, cannot be written, or could not be read again by its name."""
    if path.suffix != suffix:
        raise InputError(f"--output is '{plain(path)}', but the name of {what} must end in {suffix}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"'{plain(path)}' cannot be written: there is no folder '{plain(path.parent)}'")
