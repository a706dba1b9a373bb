"""Lets one run at a time write into a folder, by a lock that survives a crash of its holder.

A lock of the kernel disappears with its holder, and works between machines only on some shared file systems. This lock
is a file that names its holder, `.evenpipe-lock-N`; the file with the highest N is the lock. A process takes it by
creating the next number, which every file system grants to exactly one process (O_EXCL, also on NFS): two processes
that find the same lock without a holder cannot both take it, and a crash leaves no doubt. Lower numbers are deleted;
the highest remains, with a note if it has been released.

Whether the holder is still running:
    on this machine     the kernel knows, from its process id and start time
    on another          it touches the file every BEAT_SECONDS. If the file does not change for SILENCE_SECONDS, the
                        holder is dead. Only the clock of the waiting process is used, since clocks may differ
    in a copied folder  as on another machine: nobody touches the copy, whose inode differs from the recorded one

A holder that seemed dead, or whose lock was taken by force, may still be running, so `check` reads the lock again right
before every checkpoint is published.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError, RunError
from evenpipe.processes.signs import machine_id, start_time

BEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""A file server may delay a touch for a long time while it receives checkpoints."""
POLL_SECONDS = 0.5

_NAME = re.compile(r"\.evenpipe-lock-(\d+)")
_FIELDS = {"run": str, "host": str, "pid": int, "since": str, "machine": str, "started": str, "inode": int}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of a run to write into a folder. Other processes of the run `join` it."""

    folder: str
    """The real path."""
    number: int
    run: str
    """Random id of this claim."""
    taken_from: str | None = None
    """In words, the holder whose lock was taken by force."""

    @property
    def _path(self) -> Path:
        return _lock_file(self.folder, self.number)


@dataclass(frozen=True, slots=True)
class _Lock:
    """A lock as read from the folder."""

    number: int
    text: dict[str, Any]
    """Empty while its holder writes it, or if the holder crashed while writing."""
    stamp: tuple[int, ...]
    """Changes every time the holder touches the file."""
    inode: int

    def __str__(self) -> str:
        if not self.text:
            return "an unknown process"
        return f"process {self.text['pid']} on {self.text['host']} since {self.text['since']}"

    def holder_is_here(self) -> bool | None:
        """Return whether the holder is running according to this machine's kernel; None: the kernel does not know."""
        if self.text.get("machine") != machine_id() or self.text["host"] != socket.gethostname():
            return None
        if start_time(self.text["pid"]) != self.text["started"]:
            return False
        return True if self.text["inode"] == self.inode else None


_claims: dict[str, Claim] = {}
"""Claims of this process, by folder."""
_taken_by: dict[Claim, int] = {}
"""Process id that took each claim: a fork inherits the claims of its parent, but must not touch or release them."""
_heart: threading.Thread | None = None


def claim(
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    field: str = "folder",
    by_force: str = "evenpipe.checkpoints.prepare_folder(..., force=True)",
) -> Claim:
    """Take the lock of a folder, and make the folder if necessary. A process that already has the lock gets its claim.

    Waits up to SILENCE_SECONDS if the holder is on another machine and may be dead. The lock is released at the end of
    this process, or by `release`. Raises InputError if a running process holds it, and any OSError of the file system.

    force: take the lock even from a running holder, whose next `check` then fails.
    field, by_force: for the error message: the setting that names the folder, and how to set `force`.
    """
    path = os.path.realpath(folder)
    Path(path).mkdir(parents=True, exist_ok=True)
    while True:
        lock = _newest(path)
        mine = _claims.get(path)
        if mine is not None and _is(lock, mine):
            return mine
        taken_from = None
        if lock is not None and not lock.text.get("released"):
            if force:
                taken_from = None if lock.holder_is_here() is False else str(lock)
            elif not _is_abandoned(path, lock, field, by_force):
                continue
        new_claim = _take(path, 1 if lock is None else lock.number + 1, taken_from)
        if new_claim is not None:
            return new_claim


def join(claims: Iterable[Claim]) -> None:
    """Let this process write to these folders: it belongs to the run that took their locks in another process."""
    _claims.update({claim.folder: claim for claim in claims})


def hold(folder: str | os.PathLike[str]) -> bool:
    """`check` if this process has or had the lock, else `claim`; return whether the lock was taken by this call."""
    if os.path.realpath(folder) in _claims:
        check(folder)
        return False
    claim(folder)
    return True


def check(folder: str | os.PathLike[str]) -> None:
    """Raise RunError unless the lock that this process took is still the folder's lock."""
    mine = _claims[os.path.realpath(folder)]
    lock = _newest(mine.folder)
    if _is(lock, mine):
        return
    if lock is None or lock.number < mine.number:
        raise RunError(f"the lock of this run on {str(folder)!r} has been deleted, and another run may write there")
    raise RunError(f"{str(folder)!r} has been taken from this run, by {lock}")


def release(claims: Iterable[Claim]) -> None:
    """Release locks that this process has taken. No effect if it has lost a lock."""
    for claim in claims:
        if _taken_by.pop(claim, None) != os.getpid():
            continue
        if _claims.get(claim.folder) == claim:
            del _claims[claim.folder]
        with contextlib.suppress(OSError):
            lock = _read(claim.folder, claim.number)
            if _is(lock, claim):
                claim._path.write_text(_as_text(lock.text | {"released": True}), encoding="ascii")


def _is(lock: _Lock | None, claim: Claim) -> bool:
    return lock is not None and (lock.number, lock.text.get("run")) == (claim.number, claim.run)


def _lock_file(folder: str, number: int) -> Path:
    return Path(folder, f".evenpipe-lock-{number}")


def _numbers(folder: str) -> list[int]:
    """Return the numbers of all locks. A deleted folder has none."""
    try:
        return [int(match[1]) for path in Path(folder).iterdir() if (match := _NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []


def _newest(folder: str) -> _Lock | None:
    """Return the lock of a folder. Listing and opening ask the server even if it caches names and attributes."""
    while True:
        numbers = _numbers(folder)
        if not numbers:
            return None
        with contextlib.suppress(FileNotFoundError):  # deleted because there is a newer one
            return _read(folder, max(numbers))


def _read(folder: str, number: int) -> _Lock:
    with _lock_file(folder, number).open("rb") as file:
        status = os.fstat(file.fileno())
        content = file.read()
    try:
        text = json.loads(content)
    except ValueError:
        text = None
    if not isinstance(text, dict) or any(not isinstance(text.get(name), kind) for name, kind in _FIELDS.items()):
        text = {}
    return _Lock(number, text, (status.st_mtime_ns, status.st_size), status.st_ino)


def _is_abandoned(folder: str, lock: _Lock, field: str, by_force: str) -> bool:
    """Return True if the holder is dead, False if the lock has changed. Raises InputError if the holder is running."""
    runs = lock.holder_is_here()
    if runs is None:
        _log.warning("%s has the lock of %s: waiting up to %g s for a sign of life", lock, folder, SILENCE_SECONDS)
        deadline, pause = time.monotonic() + SILENCE_SECONDS, 0.01  # short at first: its holder may be writing it now
        while not runs and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
            now = _newest(folder)
            if now is None or now.text != lock.text:
                return False
            runs = now.stamp != lock.stamp
    if runs:
        raise InputError(
            f"{field} is {folder!r}, which {lock} writes to; expected another folder, or that this process ends first;"
            f" {by_force} takes the folder from it, and its next checkpoint then fails"
        )
    _log.info("took over the lock of %s from %s, which has ended", folder, lock)
    return True


def _take(folder: str, number: int, taken_from: str | None) -> Claim | None:
    """Create the lock with this number. Return None if another process was faster."""
    claim = Claim(folder, number, secrets.token_hex(16), taken_from)
    try:
        file = claim._path.open("x", encoding="ascii")
    except FileExistsError:
        return None
    try:
        with file:
            text = {
                "run": claim.run,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                "machine": machine_id(),
                "started": start_time(os.getpid()) or "",
                "inode": os.fstat(file.fileno()).st_ino,
            }
            file.write(_as_text(text))
            file.flush()
            os.fsync(file.fileno())
        # A process that listed the locks before this number was deleted creates it again, below the current lock.
        is_newest = _is(_newest(folder), claim)
    except OSError:
        claim._path.unlink(missing_ok=True)
        raise
    if not is_newest:
        claim._path.unlink(missing_ok=True)
        return None
    for existing in _numbers(folder):
        if existing < number:
            _lock_file(folder, existing).unlink(missing_ok=True)
    _keep(claim)
    return claim


def _keep(claim: Claim) -> None:
    """Touch the lock from now on, until this process releases it or ends."""
    global _heart  # noqa: PLW0603  (one thread touches the locks of all folders)
    _claims[claim.folder] = claim
    _taken_by[claim] = os.getpid()
    # Unlike atexit this also runs at the end of a process that multiprocessing started, and never in a fork.
    util.Finalize(None, release, args=([claim],), exitpriority=0)
    if _heart is None or not _heart.is_alive():
        _heart = threading.Thread(target=_beat, name="evenpipe-locks", daemon=True)
        _heart.start()


def _beat() -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        for claim, pid in list(_taken_by.items()):
            if pid == os.getpid():
                with contextlib.suppress(OSError):  # deleted, or the server does not answer: `check` will raise
                    os.utime(claim._path)


def _as_text(text: dict[str, Any]) -> str:
    return json.dumps(text, indent=1) + "\n"
