"""A pipeline in a process that evenpipe did not start leaves that process as it is, and ends none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("own_process.py")


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_of_the_process_has_changed(processes: int) -> None:
    assert run("alone" if processes == 1 else "spawned").splitlines() == ["changed: []"] * processes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("who", ["1", "01"])
@pytest.mark.parametrize("name", ["describe", "Builder"])  # before and after groups are made
def test_a_failure_while_a_pipeline_is_made_leaves_the_process_as_it_was(name: str, who: str) -> None:
    said = run("fails", name, who).splitlines()
    assert len(said) == 2 and all(line.endswith("; changed: []") for line in said), said
    assert [line.startswith("ArithmeticError: a bad number;") for line in said].count(True) == len(who), said
    assert all("a bad number" in line for line in said), said


def test_who_asks_gets_the_allocator_of_evenpipe() -> None:
    said = run("taken_over")
    assert "options of the allocator" in said and said.endswith("allocator: 3\n")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "process 1 failed: ArithmeticError: a bad number"),
        ("dies", "has died: killed, out of memory or crashed"),
        ("is silent", "process 1 gave no sign of life for 1 s"),
    ],
)
def test_a_failure_is_named_where_a_process_waits_and_ends_no_other(how: str, says: str) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, "as_torchrun", how],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert processes[0].stdout is not None
        said = processes[0].stdout.readline()  # alive, whatever the other one does
        if how == "is silent":
            processes[1].kill()  # gloo waits at the end of a process for what it has begun
        _, warned = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
    _, own = processes[1].communicate()
    assert processes[0].returncode == 0, said + warned
    assert said.startswith("alive: ") and says in said, said + warned
    if how == "raises":
        assert processes[1].returncode == 1 and own.rstrip().endswith("ArithmeticError: a bad number"), own
