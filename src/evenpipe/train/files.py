"""Files that are never half written, locks that a dead process cannot hold, and a full disk as a sentence."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError, RunError


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step: it is never half written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def disk_errors(folder: Path, doing: str) -> Iterator[None]:
    """A full disk or a folder that cannot be written, as a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunError(f"the disk is full: {doing} in {folder} failed ({error.strerror})") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise InputError(f"the folder {folder} cannot be written: {error.strerror}") from error
        raise
