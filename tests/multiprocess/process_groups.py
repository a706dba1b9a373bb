"""Programs in process groups of their own: a signal reaches all of the group, and nothing outlives the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program in a group (and session) of its own. options: of Popen."""
    return subprocess.Popen(command, start_new_session=True, **options)


def send(program: subprocess.Popen[Any], number: int) -> bool:
    """Send a signal to the whole group; return whether there was still somebody in it."""
    try:
        os.killpg(program.pid, number)
    except ProcessLookupError:
        return False
    return True


def kill(program: subprocess.Popen[Any]) -> None:
    """End the group, and what the program has started in groups of their own, as torchrun does. Close its pipes."""
    others = descendants(program.pid)
    send(program, signal.SIGKILL)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.wait()
    for pipe in (program.stdin, program.stdout, program.stderr):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program that has ended, with all that it has started, when the block ends."""
    program = start(command, **options)
    try:
        yield program
    finally:
        kill(program)


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on, as far as none of those between has ended."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, file.read_text().split())
    return children + [one for child in children for one in descendants(child)]
