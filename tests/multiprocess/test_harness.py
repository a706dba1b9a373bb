"""Work may take as long as it takes; processes that are stuck are ended, and what they were at is told."""

import os
import signal
import time

import harness
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
