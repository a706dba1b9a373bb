"""Runs that are asked to stop: by Ctrl-C or SIGTERM, with the local launcher and under torchrun.

Nothing here depends on how long anything takes: a signal is sent once a line of metrics.jsonl shows that steps are
being taken, and what is waited for is a process that ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_runs import curve, evenpipe, finish, newest_checkpoint, prepared, train, worker_of, write_config

started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    while started:
        process = started.pop()
        if process.poll() is None:
            process.kill()  # what it has started ends with it
            process.communicate()


def torchrun(path: Path) -> subprocess.Popen[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    return subprocess.Popen(
        [*command, "-m", "evenpipe.cli.main", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def local(path: Path) -> subprocess.Popen[str]:
    return evenpipe("train", path)


def child_of(process: int) -> int:
    """One of those that torchrun has started, each in a session of its own."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(children[-1])


def steps_of(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def train_beyond(steps: int, start: Callable[[Path], subprocess.Popen[str]], path: Path) -> subprocess.Popen[str]:
    """A run that has taken more than so many steps in all, and goes on."""
    process = start(path)
    started.append(process)
    while steps_of(path.parent) <= steps:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    return process


LONG = {"training.steps": 100_000, "checkpoint.every_steps": "none"}
"""More steps than a run will take, with no checkpoint before the last one."""


WAYS = [
    # how it is started, who gets which signal, and the exit code; torchrun's own is 1, whatever its processes say
    (local, os.killpg, signal.SIGINT, 130),  # Ctrl-C
    (torchrun, os.kill, signal.SIGTERM, None),
    (local, os.killpg, signal.SIGTERM, 143),  # as Slurm does
]


def test_stopped_in_every_way_it_goes_on_as_if_nothing_had_happened(tmp_path: Path, sample) -> None:
    """One run, stopped each time and continued by the same command, has the curve of one that was not stopped."""
    path = write_config(tmp_path / "parts", LONG)
    for start, send, number, exit_code in sample(WAYS, 1):
        process = train_beyond(steps_of(path.parent), start, path)
        send(process.pid, number)
        output, _ = process.communicate(timeout=1200)
        step = int(newest_checkpoint(path.parent).name.removeprefix("step-"))
        assert process.returncode == exit_code or (exit_code is None and process.returncode), output
        assert f"stopped at step {step}; continue with the same command" in output, output
        assert "finishing the step" in output, output
        assert step == steps_of(path.parent)
        assert exit_code is None or "Traceback" not in output, output
    whole = prepared(tmp_path / "whole", LONG)
    train(whole, until=step)
    assert curve(whole.parent) == curve(path.parent)


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_says_what_is_lost(tmp_path: Path) -> None:
    """One process of the run is stopped, so no step can be finished."""
    process = train_beyond(0, local, write_config(tmp_path, LONG))
    os.kill(worker_of(process.pid), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while "finishing the step" not in (line := process.stdout.readline()):
        assert line, "it ended"
    process.send_signal(signal.SIGINT)
    output = finish(process, exit_code=130)
    assert "no step was saved, so all steps are lost" in output, output
    assert "stopped at" not in output


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_under_torchrun_a_process_that_died_is_still_the_first_cause(tmp_path: Path, asked: bool) -> None:
    """Torchrun sends SIGTERM to the others then, which is no wish to stop."""
    path = write_config(tmp_path, LONG)
    process = train_beyond(0, torchrun, path)
    victim = child_of(process.pid)
    os.kill(victim, signal.SIGKILL)
    if asked:
        process.terminate()
    output, _ = process.communicate(timeout=1200)
    assert process.returncode
    assert f"(pid {victim}) has died: killed, out of memory or crashed" in output, output
    assert "stopped at" not in output


@pytest.mark.slow
def test_before_the_first_step_a_signal_ends_at_once(tmp_path: Path) -> None:
    """Nothing is lost then, and there is nothing to finish."""
    path = write_config(tmp_path, LONG)
    process = local(path)
    while not (tmp_path / "run" / "data").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output = finish(process, exit_code=143)
    assert "finishing" not in output and "lost" not in output
