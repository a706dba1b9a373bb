"""Temporary folders. Those of a program that was killed are removed by the next one.

A folder belongs to whoever holds the lock on it (flock). The kernel drops the lock with the program, however that ends,
knows it across containers that share a temporary folder but not their pids, and keeps systemd-tmpfiles away, which
deletes what looks old.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from evenpipe.errors import InputError

MARK = "locked"
"""In a folder whose maker has locked it."""

UNLOCKED_SECONDS = 3600.0
"""Age from which a folder without the mark is a leftover: its maker was killed before it could lock it."""


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for this user alone, removed at the end; leftovers with the same prefix are removed at once.

    Raises:
        InputError: the folder for temporary files cannot be written to.
    """
    try:
        remove_leftovers(prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        where = error.filename or "the folder for temporary files"
        raise InputError(f"{where}: {error.strerror}; expected a folder that can be written to (TMPDIR)") from error
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no folders: then nobody removes leftovers
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            (folder / MARK).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_leftovers(prefix: str) -> None:
    """Removes folders of killed programs of this user."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and _is_leftover(folder, found.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)


def _is_leftover(folder: Path, modified: float) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return (folder / MARK).exists() or time.time() - modified > UNLOCKED_SECONDS
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
