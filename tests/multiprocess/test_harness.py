"""Work may take as long as it takes; processes that are stuck are ended, and what they were at is told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import process_groups
import pytest
import torch
import torch.distributed as dist
from harness import run_outcomes, run_processes

SECONDS = 2.0


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SILENCE_SECONDS", SECONDS)


def one_works() -> float:
    """For longer than a silence, while the other one waits for it."""
    if dist.get_rank() == 0:
        while time.process_time() < 1.5 * SECONDS:
            pass
    dist.barrier()
    return time.process_time()


def test_who_works_may_take_long() -> None:
    assert run_processes(one_works, 2)[0] >= 1.5 * SECONDS


def both_wait() -> None:
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


def test_who_is_stuck_is_ended_and_shows_where() -> None:
    with pytest.raises(AssertionError, match=r"exit codes \[-9, -9\](.|\n)*in both_wait"):
        run_processes(both_wait, 2)


def one_stops() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("boo")


def test_a_stopped_process_is_not_waited_for() -> None:
    stopped, failed = run_outcomes(one_stops, 2)
    assert (stopped.exit_code, str(failed.exception)) == (-9, "boo")


def test_nothing_outlives_a_running_program() -> None:
    """Neither what is in its group nor what it has started in another one."""
    waits = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    starts = f"start({waits}); start({waits}, start_new_session=True); print(flush=True); input()"
    program = f"from subprocess import Popen as start; {starts}"
    with process_groups.running(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        started.stdout.readline()
        pids = [started.pid, *process_groups.descendants(started.pid)]
        assert len(pids) == 3
    deadline = time.monotonic() + SECONDS
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(has_ended, pids))


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
