"""Temporary folders. The next program removes the leftovers of a killed one.

A folder belongs to the process that holds the lock on it (flock). The kernel releases the lock when the program ends
for any reason, shares it across containers with a common temporary folder but separate pids, and keeps systemd-tmpfiles
from deleting old files.
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
"""Marks a folder that its maker has locked."""

UNLOCKED_SECONDS = 3600.0
"""Older folders without the mark are leftovers: their maker was killed before it could lock them."""


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a folder for this user alone. The process that created it removes it at the end, but processes forked from
    it do not; leftovers with the same prefix are removed first.

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
    maker = os.getpid()
    try:
        # Some network file systems cannot lock folders: their leftovers are not removed.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            (folder / MARK).touch()
        yield folder
    finally:
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_leftovers(prefix: str) -> None:
    """Remove folders of killed programs of this user."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and _is_leftover(folder, status.st_mtime):
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
