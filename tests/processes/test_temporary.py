"""Temporary folders vanish with their program, or with the start of the next one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.errors import InputError
from evenpipe.processes.temporary import UNLOCKED_SECONDS, temporary_folder

HOLDS_ONE = """
from evenpipe.processes.temporary import temporary_folder
with temporary_folder("evenpipe-x-") as folder:
    print(folder, flush=True)
    input()
"""
FORKS = """
import multiprocessing.util
from evenpipe.processes.temporary import temporary_folder
context = temporary_folder("evenpipe-x-")
folder = context.__enter__()
multiprocessing.util.Finalize(None, context.__exit__, (None, None, None), exitpriority=-100)
del context
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join()
print(child.exitcode, folder.exists())
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_only_this_user_may_enter_and_nothing_stays(tmp_path: Path) -> None:
    with temporary_folder("evenpipe-x-") as folder:
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_program_is_removed_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    environment, pipes = os.environ | {"TMPDIR": str(tmp_path)}, {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    program = [sys.executable, "-c", HOLDS_ONE]
    holders = [subprocess.Popen(program, env=environment, text=True, **pipes) for _ in range(2)]
    killed, live = (Path(holder.stdout.readline().strip()) for holder in holders)
    holders[0].send_signal(signal.SIGKILL)
    holders[0].wait()
    assert killed.exists()
    with temporary_folder("evenpipe-x-"):
        assert (killed.exists(), live.exists()) == (False, True)
    holders[1].communicate("\n")
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_does_not_remove_the_folder(tmp_path: Path) -> None:
    """multiprocessing drops the finalizers of the parent in it, and with them an open context. A program of its own
    forks: this process has threads."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment, text=True, capture_output=True, check=True, timeout=120
    )
    assert said.stdout == "0 True\n"


def test_what_is_not_a_leftover_of_ours_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "evenpipe-x-link").symlink_to(elsewhere)
    (tmp_path / "evenpipe-x-file").touch()
    (tmp_path / "evenpipe-x-new").mkdir()  # its maker is about to lock it
    old = tmp_path / "evenpipe-x-old"
    old.mkdir()
    os.utime(old, (0, old.stat().st_mtime - 2 * UNLOCKED_SECONDS))
    with temporary_folder("evenpipe-x-"):
        pass
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"elsewhere", "evenpipe-x-link", "evenpipe-x-file", "evenpipe-x-new"}


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"Not a directory; expected a folder that can be written to \(TMPDIR\)$"):
        temporary_folder("evenpipe-x-").__enter__()
