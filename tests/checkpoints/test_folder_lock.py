"""Who may write into a folder: one run at a time, whatever has become of those before it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evenpipe.checkpoints import lock as module
from evenpipe.checkpoints.lock import BEAT_SECONDS, SILENCE_SECONDS, check, claim, hold, join, release
from evenpipe.errors import InputError, RunError
from evenpipe.processes.signs import machine, started

LOCK = ".evenpipe-lock-1"


class Clock:
    """Time that passes only when the code under test waits; what happens meanwhile is `during(lock file)`."""

    strftime, gmtime = staticmethod(time.strftime), staticmethod(time.gmtime)

    def __init__(self, during: Callable[[Path], None], file: Path) -> None:
        self.seconds = 0.0
        self._during, self._file, self._next = during, file, BEAT_SECONDS

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
            return
        self.seconds += seconds
        if self.seconds >= self._next:
            self._next += BEAT_SECONDS
            self._during(self._file)


def dead_process() -> dict[str, object]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = started(child.pid)
    child.communicate()
    return {"pid": child.pid, "started": born}


def process(**changes: object) -> dict[str, object]:
    """The text of a lock whose holder runs on this machine: who started the tests."""
    parent = os.getppid()
    return {
        "run": "0" * 32,
        "host": socket.gethostname(),
        "pid": parent,
        "since": "2026-01-02 03:04:05 UTC",
        "machine": machine(),
        "started": started(parent),
        "inode": None,
        **changes,
    }


def write(file: Path, text: dict[str, object] | None) -> None:
    """Written in place, as a holder does; None: not yet. The inode is the file's own where none is given."""
    with file.open("w") as opened:
        if text is not None:
            json.dump(text | {"inode": text["inode"] or os.fstat(opened.fileno()).st_ino}, opened)


FAR = {"machine": "another boot/pid:[1]", "host": "node7", "pid": 4711}


def nothing(file: Path) -> None:
    """The holder gives no sign."""


def touch(file: Path) -> None:
    os.utime(file)


def release_it(file: Path) -> None:
    write(file, process(**FAR, released=True))


def take_it_over(file: Path) -> None:
    newer = file.with_name(".evenpipe-lock-2")
    if not newer.exists():
        write(newer, process(**FAR | {"host": "node8"}, run="1" * 32))
        file.unlink()
    touch(newer)


def finish_writing(file: Path) -> None:
    write(file, process())


@pytest.mark.parametrize(
    ("holder", "during", "refused_by", "seconds"),
    [
        # on this machine the kernel knows
        (lambda: process(), nothing, rf"process {os.getppid()} on {socket.gethostname()} since 2026", 0),
        (lambda: process(**dead_process()), nothing, None, 0),
        (lambda: process(started="1"), nothing, None, 0),  # the number now belongs to another process
        (lambda: process(released=True), nothing, None, 0),
        # elsewhere a sign of life is waited for
        (lambda: process(**FAR), touch, r"process 4711 on node7 since 2026-01-02 03:04:05 UTC", BEAT_SECONDS),
        (lambda: process(**FAR), nothing, None, SILENCE_SECONDS),
        (lambda: process(**FAR), release_it, None, BEAT_SECONDS),
        (lambda: process(**FAR), take_it_over, "process 4711 on node8", 2 * BEAT_SECONDS),
        (lambda: process(**FAR, released=True), nothing, None, 0),
        (lambda: process(host="a container"), touch, rf"process {os.getppid()} on a container", BEAT_SECONDS),
        # a copy of a folder in use, and of one on another machine
        (lambda: process(inode=1), nothing, None, SILENCE_SECONDS),
        (lambda: process(**FAR, inode=1), nothing, None, SILENCE_SECONDS),
        # a file system without lasting inodes: its holder touches it
        (lambda: process(inode=1), touch, r"process \d+ on", BEAT_SECONDS),
        # killed while it was written; or only looked at too early
        (lambda: None, nothing, None, SILENCE_SECONDS),
        (lambda: None, finish_writing, rf"process {os.getppid()} on", BEAT_SECONDS),
        (lambda: None, touch, "an unknown process", BEAT_SECONDS),
    ],
)
def test_a_lock_holds_as_long_as_its_holder_runs(  # noqa: PLR0917
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holder: Callable[[], dict[str, object] | None],
    during: Callable[[Path], None],
    refused_by: str | None,
    seconds: float,
) -> None:
    write(tmp_path / LOCK, holder())
    clock = Clock(during, tmp_path / LOCK)
    monkeypatch.setattr(module, "time", clock)
    if refused_by is None:
        claim(tmp_path)
        check(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".evenpipe-lock-2"]
    else:
        says = rf"^folder is '.*', which {refused_by}.* writes to; expected another folder, .*prepare_folder\(.*force"
        with pytest.raises(InputError, match=says):
            claim(tmp_path)
    assert abs(clock.seconds - seconds) <= module.POLL_SECONDS


@pytest.mark.parametrize(
    ("text", "from_whom"),
    [
        (process(**FAR), "process 4711 on node7 since 2026-01-02 03:04:05 UTC"),
        (process(), f"process {os.getppid()} on {socket.gethostname()} since 2026-01-02 03:04:05 UTC"),
        (process(started="1"), None),  # nobody loses anything
        (process(released=True), None),
    ],
)
def test_by_force_it_is_taken_at_once_and_from_whom_is_said(
    tmp_path: Path, text: dict[str, object], from_whom: str | None
) -> None:
    write(tmp_path / LOCK, text)
    assert claim(tmp_path, force=True).taken_from == from_whom
    check(tmp_path)


def test_the_message_names_the_setting(tmp_path: Path) -> None:
    write(tmp_path / LOCK, process())
    with pytest.raises(InputError, match=r"^output\.folder is '.*; --force takes the folder from it, and"):
        claim(tmp_path, field="output.folder", by_force="--force")
    with pytest.raises(
        InputError,
        match=r"^folder is '.*; evenpipe\.checkpoints\.prepare_folder\(\.\.\., force=True\) takes the folder",
    ):
        hold(tmp_path)


def test_a_process_that_has_it_gets_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    first = claim(tmp_path / "folder")
    assert claim(tmp_path / "folder", force=True) == first
    assert claim(tmp_path / "link") == first
    hold(tmp_path / "folder" / ".." / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [LOCK]


@pytest.mark.parametrize("by", ["force", "deletion", "deletion of the folder"])
def test_one_that_has_lost_it_is_told(tmp_path: Path, by: str) -> None:
    folder = tmp_path / "folder"
    claim(folder)
    if by == "force":
        write(folder / ".evenpipe-lock-2", process())
        (folder / LOCK).unlink()
        says = rf"has been taken from this run, by process {os.getppid()} on "
    else:
        (folder / LOCK).unlink()
        if by == "deletion of the folder":
            folder.rmdir()
        says = "has been deleted, and another run may write there"
    for _ in range(2):  # it does not come back by itself
        with pytest.raises(RunError, match=says):
            check(folder)
        with pytest.raises(RunError, match=says):
            hold(folder)
    if by == "force":
        with pytest.raises(InputError, match="which process"):
            claim(folder)
    claim(folder, force=True)  # a new start
    check(folder)


def test_a_released_lock_is_free_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    first = claim(tmp_path)
    release([first])
    release([first])
    assert json.loads((tmp_path / LOCK).read_text())["released"]
    second = claim(tmp_path)
    assert (first.number, second.number) == (1, 2)
    release([first])
    check(tmp_path)
    (tmp_path / ".evenpipe-lock-2").unlink()
    write(tmp_path / ".evenpipe-lock-3", process())
    release([second])  # not its own any more
    assert "released" not in json.loads((tmp_path / ".evenpipe-lock-3").read_text())
    assert not (tmp_path / ".evenpipe-lock-2").exists()


def test_another_process_of_the_run_may_write_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = claim(tmp_path)
    monkeypatch.setattr(module, "_claims", {})
    monkeypatch.setattr(module, "_taken_by", {})
    with pytest.raises(InputError, match=f"which process {os.getpid()} on"):
        claim(tmp_path)
    join([held])
    assert claim(tmp_path) == held
    check(tmp_path)
    release([held])  # nothing of this process
    check(tmp_path)
    assert "released" not in json.loads((tmp_path / LOCK).read_text())


def test_one_that_looked_too_early_does_not_get_a_number_of_the_past(tmp_path: Path) -> None:
    """Between its look and its creation of number 2, others have come and gone."""
    write(tmp_path / ".evenpipe-lock-3", process())
    assert module._take(str(tmp_path), 2, None) is None
    assert module._take(str(tmp_path), 3, None) is None
    assert [path.name for path in tmp_path.iterdir()] == [".evenpipe-lock-3"]


def test_a_folder_that_holds_no_file_raises_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    claim(tmp_path)


def test_its_holder_touches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path)
    stamp = (tmp_path / LOCK).stat().st_mtime_ns
    clock = Clock(nothing, tmp_path / LOCK)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(clock, "_during", lambda file: 1 / 0)  # ends the endless loop
    clock._next = 2 * BEAT_SECONDS
    with pytest.raises(ZeroDivisionError):
        module._beat()
    assert (tmp_path / LOCK).stat().st_mtime_ns > stamp
