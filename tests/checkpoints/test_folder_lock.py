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
from evenpipe.processes.signs import machine_id, start_time

LOCK = ".evenpipe-lock-1"
SINCE = "2026-01-02 03:04:05 UTC"


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
    born = start_time(child.pid)
    child.communicate()
    return {"pid": child.pid, "started": born}


def process(**changes: object) -> dict[str, object]:
    """The text of a lock whose holder runs on this machine: who started the tests."""
    parent = os.getppid()
    return {
        "run": "0" * 32,
        "host": socket.gethostname(),
        "pid": parent,
        "since": SINCE,
        "machine": machine_id(),
        "started": start_time(parent),
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


HERE = rf"process {os.getppid()} on {socket.gethostname()} since 2026"
HOLDERS: dict[str, tuple[Callable[[], dict[str, object] | None], Callable[[Path], None], str | None, float]] = {
    # text of the lock, what happens meanwhile, who refuses the folder, seconds until it is known
    # on this machine the kernel knows
    "running here": (lambda: process(), nothing, HERE, 0),
    "dead": (lambda: process(**dead_process()), nothing, None, 0),
    "the number now belongs to another process": (lambda: process(started="1"), nothing, None, 0),
    "released": (lambda: process(released=True), nothing, None, 0),
    # elsewhere a sign of life is waited for
    "running elsewhere": (lambda: process(**FAR), touch, f"process 4711 on node7 since {SINCE}", BEAT_SECONDS),
    "silent elsewhere": (lambda: process(**FAR), nothing, None, SILENCE_SECONDS),
    "released while we wait": (lambda: process(**FAR), release_it, None, BEAT_SECONDS),
    "taken over while we wait": (lambda: process(**FAR), take_it_over, "process 4711 on node8", 2 * BEAT_SECONDS),
    "released elsewhere": (lambda: process(**FAR, released=True), nothing, None, 0),
    "in a container": (lambda: process(host="a box"), touch, rf"process {os.getppid()} on a box", BEAT_SECONDS),
    "a copy of a folder in use": (lambda: process(inode=1), nothing, None, SILENCE_SECONDS),
    "a file system without lasting inodes": (lambda: process(inode=1), touch, r"process \d+ on", BEAT_SECONDS),
    "killed while it was written": (lambda: None, nothing, None, SILENCE_SECONDS),
    "looked at too early": (lambda: None, finish_writing, rf"process {os.getppid()} on", BEAT_SECONDS),
    "never written but touched": (lambda: None, touch, "an unknown process", BEAT_SECONDS),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_lock_holds_as_long_as_its_holder_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, during, refused_by, seconds = HOLDERS[name]
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


def test_by_force_it_is_taken_at_once_and_from_whom_is_said(tmp_path: Path) -> None:
    far, dead = (process(**FAR), f"process 4711 on node7 since {SINCE}"), (process(started="1"), None)
    for number, (text, from_whom) in enumerate((far, dead, (process(released=True), None))):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / LOCK, text)
        assert claim(folder, force=True).taken_from == from_whom
        check(folder)


def test_the_message_names_the_setting(tmp_path: Path) -> None:
    write(tmp_path / LOCK, process())
    with pytest.raises(InputError, match=r"^output\.folder is '.*; --force takes the folder from it, and"):
        claim(tmp_path, field="output.folder", by_force="--force")


def test_a_process_that_has_it_gets_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    first = claim(tmp_path / "folder")
    assert claim(tmp_path / "folder", force=True) == first
    assert claim(tmp_path / "link") == first
    hold(tmp_path / "folder" / ".." / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [LOCK]


@pytest.mark.parametrize("with_its_folder", [False, True])
def test_a_lock_that_is_deleted_is_lost(tmp_path: Path, with_its_folder: bool) -> None:
    """One that is taken by force: tests/multiprocess/test_two_runs.py."""
    folder = tmp_path / "folder"
    claim(folder)
    (folder / LOCK).unlink()
    if with_its_folder:
        folder.rmdir()
    for call in (check, hold, check, hold):  # it does not come back by itself
        with pytest.raises(RunError, match="has been deleted, and another run may write there"):
            call(folder)
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
    with pytest.raises(InputError, match=f"which process {os.getpid()} on"):
        claim(tmp_path)
    join([held])
    assert claim(tmp_path) == held
    check(tmp_path)


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
