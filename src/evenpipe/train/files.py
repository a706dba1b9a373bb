"""Atomic file writes, locks that end with their process, and disk errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError, RunError
from evenpipe.given import FULL, plain
from evenpipe.words import refused


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step: it is never half written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def check_folders(folders: Mapping[str, Path]) -> None:
    """Raise InputError for the first folder that cannot be made or written, RunError if the disk is full.

    `folders`: by the names of their fields. Folders and files that the check makes are removed.
    """
    for field, folder in folders.items():
        made: list[Path] = []
        try:
            missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
            for directory in reversed(missing):
                directory.mkdir()
                made.append(directory)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            if error.errno in FULL:
                raise RunError(f"the disk is full: nothing can be written in {plain(folder)}") from None
            raise refused(field, str(folder), f"a folder that can be written: {error.strerror}") from None
        finally:
            for directory in reversed(made):
                with contextlib.suppress(OSError):
                    directory.rmdir()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases however the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def disk_errors(folder: Path, doing: str) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise RunError(f"the disk is full: {doing} in {folder} failed ({error.strerror})") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise InputError(f"the folder {folder} cannot be written: {error.strerror}") from error
        raise
