"""Checks the file of `--output` before the work begins."""

from __future__ import annotations

from pathlib import Path

from evenpipe.errors import InputError
from evenpipe.given import plain


def check_output(path: Path, suffix: str, what: str) -> None:
    """Raise InputError if the file cannot be written, or could not be read again by its name.

    what: the kind of file, in words.
    """
    if path.suffix != suffix:
        raise InputError(f"--output is '{plain(path)}', but the name of {what} must end in {suffix}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"'{plain(path)}' cannot be written: there is no folder '{plain(path.parent)}'")
