"""One run at a time writes into a folder: a lock that outlives a crash of its holder, and can be told from one in use.

A kernel's lock vanishes with its holder, and holds among machines only on some shared file systems. This one is a file
that says who holds it, `.evenpipe-lock-N`, and the one with the highest N is the lock. It is taken by creating the next
number, which every file system grants to exactly one (O_EXCL, on NFS too): two that find the same lock without a holder
cannot both take it, and no crash in between leaves it in doubt. Numbers below are deleted; the highest one stays, with
a note that it has been released.

Whether the holder still runs
    on this machine     the kernel knows, by its process id and start
    on another          it touches the file every BEAT_SECONDS. One that stays as it is for SILENCE_SECONDS has lost its
                        holder; by the clock of the one who waits, as those of two machines are never compared
    in a copied folder  the same, as nobody touches the copy; it is another file (inode) than its text says

A holder that was given up, or whose lock was taken by force, may be running all the same: so `check` asks again right
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
from evenpipe.runtime.signs import machine, started

BEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""A server of files may keep a touch waiting for long while checkpoints are written to it."""
POLL_SECONDS = 0.5

_NAME = re.compile(r"\.evenpipe-lock-(\d+)")
_FIELDS = {"run": str, "host": str, "pid": int, "since": str, "machine": str, "started": str, "inode": int}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one run to write into a folder. Travels to other processes of the run, see `join`."""

    folder: str
    """Its real path."""
    number: int
    run: str
    """Random: tells this claim from all others."""
    taken_from: str | None = None
    """In words, who held the lock that was taken by force."""

    @property
    def _path(self) -> Path:
        return _lock_file(self.folder, self.number)


@dataclass(frozen=True, slots=True)
class _Lock:
    """A lock as it is found."""

    number: int
    text: dict[str, Any]
    """Empty while its holder writes it, or when that crashed in doing so."""
    stamp: tuple[int, ...]
    """Changes with every touch."""
    inode: int

    def __str__(self) -> str:
        if not self.text:
            return "a process that has not said who it is"
        return f"process {self.text['pid']} on {self.text['host']} since {self.text['since']}"

    def holder_is_here(self) -> bool | None:
        """What this machine's kernel knows of the holder: whether it runs; None: nothing."""
        if self.text.get("machine") != machine() or self.text["host"] != socket.gethostname():
            return None
        if started(self.text["pid"]) != self.text["started"]:
            return False
        return True if self.text["inode"] == self.inode else None


_claims: dict[str, Claim] = {}
"""By folder: what this process may write to."""
_taken_by: dict[Claim, int] = {}
"""Process ids: a fork has the claims of its parent and neither touches nor releases them."""
_heart: threading.Thread | None = None


def claim(
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    field: str = "folder",
    by_force: str = "evenpipe.runtime.checkpoints.prepare_folder(..., force=True)",
) -> Claim:
    """Takes the lock of a folder, which is made if there is none. A process that holds it already gets the same again.

    Waits up to SILENCE_SECONDS where the holder is on another machine and may be gone. The lock is released when this
    process ends, or by `release`.

    Args:
        folder: on any file system that all machines concerned share.
        force: takes it from a holder that runs as well; the next `check` of that one fails.
        field, by_force: name of the setting that gives the folder, and how to set `force`; for the message.

    Raises:
        InputError: a process that runs holds it.
        OSError: the folder cannot be made or written to.
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
        taken = _take(path, 1 if lock is None else lock.number + 1, taken_from)
        if taken is not None:
            return taken


def join(claims: Iterable[Claim]) -> None:
    """This process belongs to the run that took these locks in another process: it may write there too."""
    _claims.update({claim.folder: claim for claim in claims})


def hold(folder: str | os.PathLike[str]) -> bool:
    """`check` where this process has the lock or has had it, else `claim`; whether it was taken only now."""
    if os.path.realpath(folder) in _claims:
        check(folder)
        return False
    claim(folder)
    return True


def check(folder: str | os.PathLike[str]) -> None:
    """Raises RunError unless the lock that this process took is still the folder's lock."""
    mine = _claims[os.path.realpath(folder)]
    lock = _newest(mine.folder)
    if _is(lock, mine):
        return
    if lock is None or lock.number < mine.number:
        raise RunError(f"the lock that this run held on {str(folder)!r} is gone, and another run may write there")
    raise RunError(f"{str(folder)!r} has been taken from this run, by {lock}")


def release(claims: Iterable[Claim]) -> None:
    """Gives back what this process has taken. Without effect for a lock that is no longer its own."""
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
    """Of all locks there are. A folder that has been deleted has none."""
    try:
        return [int(match[1]) for path in Path(folder).iterdir() if (match := _NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []


def _newest(folder: str) -> _Lock | None:
    """The lock of a folder. Listing and opening ask the server, also where names and attributes are cached."""
    while True:
        numbers = _numbers(folder)
        if not numbers:
            return None
        with contextlib.suppress(FileNotFoundError):  # a newer one is there, and this one was deleted
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
    """True: its holder is gone. False: things have changed, look again. Raises InputError when the holder runs."""
    runs = lock.holder_is_here()
    if runs is None:
        _log.warning(
            "the lock of %s is held by %s: waiting up to %g s for a sign of life", folder, lock, SILENCE_SECONDS
        )
        deadline, pause = time.monotonic() + SILENCE_SECONDS, 0.01  # perhaps it is only just being written
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
    _log.info("the lock of %s is taken over from %s, which is gone", folder, lock)
    return True


def _take(folder: str, number: int, taken_from: str | None) -> Claim | None:
    """Creates the lock of that number. None: another one was faster."""
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
                "machine": machine(),
                "started": started(os.getpid()) or "",
                "inode": os.fstat(file.fileno()).st_ino,
            }
            file.write(_as_text(text))
            file.flush()
            os.fsync(file.fileno())
        # One that looked before this number was deleted creates it once more, below the lock of today.
        taken = _is(_newest(folder), claim)
    except OSError:
        claim._path.unlink(missing_ok=True)
        raise
    if not taken:
        claim._path.unlink(missing_ok=True)
        return None
    for other in _numbers(folder):
        if other < number:
            _lock_file(folder, other).unlink(missing_ok=True)
    _keep(claim)
    return claim


def _keep(claim: Claim) -> None:
    """From now on the lock is touched, until this process releases it or ends."""
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
                with contextlib.suppress(OSError):  # gone, or the server does not answer: `check` will tell
                    os.utime(claim._path)


def _as_text(text: dict[str, Any]) -> str:
    return json.dumps(text, indent=1) + "\n"
