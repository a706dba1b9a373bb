"""Two runs in one folder: one of them is refused; and whatever they do to each other, no checkpoint is of both."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_processes
from test_checkpoint_processes import Run, in_a_child
from test_training import evenpipe, finish, write_config

from evenpipe.checkpoints import checkpoint, find_latest, load, open_checkpoint, prepare_folder, save
from evenpipe.checkpoints.lock import claim
from evenpipe.errors import InputError, RunError

# ---- the lock


def race(folder: Path, rounds: int, starters: int) -> list[int]:
    """Processes that start at the same moment, over and over; the one with the lock is killed. Winners per round."""
    winners = []
    for _ in range(rounds):
        start, started = os.pipe()
        results, result = os.pipe()
        children = []
        for _ in range(starters):
            child = os.fork()
            if child == 0:
                os.close(started)
                os.read(start, 1)  # until all are let go
                try:
                    claim(folder)
                    os.write(result, b"+")
                except InputError:
                    os.write(result, b"-")
                finally:
                    signal.pause()
            children.append(child)
        os.close(started)
        outcomes = b""
        while len(outcomes) < starters:
            outcomes += os.read(results, starters)
        winners.append(outcomes.count(b"+"))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for descriptor in (start, results, result):
            os.close(descriptor)
    return winners


def test_of_those_that_find_a_dead_holder_exactly_one_gets_the_lock(tmp_path: Path, pytestconfig) -> None:
    rounds = 10 if pytestconfig.option.quick else 200
    assert run_processes(race, 1, tmp_path, rounds, 5, group=False)[0] == [1] * rounds
    assert len(list(tmp_path.iterdir())) == 1


def end(folder: Path, how: str) -> None:
    claim(folder)
    if how == "raises":
        raise RunError("over")
    if how == "os._exit":
        os._exit(0)


@pytest.mark.parametrize(("how", "released"), [("returns", True), ("raises", True), ("os._exit", False)])
def test_the_end_of_a_process_releases_its_lock(tmp_path: Path, how: str, released: bool) -> None:
    child = multiprocessing.get_context("forkserver").Process(target=end, args=(tmp_path, how))
    child.start()
    child.join()
    text = json.loads((tmp_path / ".evenpipe-lock-1").read_text())
    assert (text["pid"], text.get("released", False)) == (child.pid, released)
    claim(tmp_path)  # at once all the same: it was on this machine


def test_the_end_of_a_program_releases_its_lock(tmp_path: Path) -> None:
    program = f"from evenpipe.checkpoints.lock import claim; claim({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert json.loads((tmp_path / ".evenpipe-lock-1").read_text())["released"]


# ---- two loops of one's own


def two_pairs() -> tuple[int, dist.ProcessGroup]:
    """Two runs of two processes each: which this one is of, and its group."""
    groups = [dist.new_group([0, 1], timeout=GROUP_TIMEOUT), dist.new_group([2, 3], timeout=GROUP_TIMEOUT)]
    run = dist.get_rank() // 2
    return run, groups[run]


def one_after_the_other(folder: Path) -> list[str]:
    """What the second of two runs gets to hear, and then the first."""
    run, group = two_pairs()
    state = Run(9, True, True, dist.get_rank(group), 2, seed=run)
    said = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except (InputError, RunError) as error:
            said.append(f"{type(error).__name__}: {error}")

    def save_step(step: int) -> Path:
        return save(folder, step, state.shards, None, {"run": run}, group)

    if run == 0:
        prepare_folder(folder, group)
        save_step(1)
    dist.barrier()
    if run == 1:
        attempt(lambda: prepare_folder(folder, group))
        attempt(lambda: save_step(2))
        assert find_latest(folder, group).checkpoint.metadata == {"run": 0}  # reading needs no lock
        prepare_folder(folder, group, force=True)
        save_step(2)
    dist.barrier()
    if run == 0:
        attempt(lambda: save_step(3))
        attempt(lambda: save_step(3))
        attempt(lambda: prepare_folder(folder, group))
    dist.barrier()
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["step-00000001", "step-00000002"]
    assert find_latest(folder, group).checkpoint.metadata == {"run": 1}
    return [f"process {os.getpid()} on", *said]


def test_the_second_is_refused_and_by_force_the_first_one(tmp_path: Path) -> None:
    said = run_processes(one_after_the_other, 4, tmp_path)
    (first, *by_first), (second, *by_second) = said[0], said[2]
    assert said[1][1:] == by_first
    assert said[3][1:] == by_second
    assert len(by_second) == 2
    for text in by_second:
        assert text.startswith(f"InputError: folder is {str(tmp_path)!r}, which {first}")
    for text in by_first[:2]:
        assert text.startswith(f"RunError: the checkpoint of step 3 was not saved: {str(tmp_path)!r} has been taken")
        assert f"by {second}" in text
    assert by_first[2].startswith("InputError: ")
    assert second in by_first[2]


def killed_and_started_again(folder: Path) -> list[int]:
    """Each start saves two steps and is killed in the middle of a third; gives where each one began."""
    began = []
    for start in range(3):

        def life() -> None:
            prepare_folder(folder)
            assert not list(folder.glob("*.tmp")), "left over"
            found = find_latest(folder).checkpoint
            first = 0 if found is None else found.step
            (folder.parent / f"began-{start}").write_text(str(first))
            state = Run(9, True, True, 0, 1)
            for step in (first + 1, first + 2):
                save(folder, step, state.shards, None, {})
            checkpoint.sync_folder = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            save(folder, first + 3, state.shards, None, {})

        assert in_a_child(life) == -signal.SIGKILL
        assert len(list(folder.glob("*.tmp"))) == 1
        began.append(int((folder.parent / f"began-{start}").read_text()))
    return began


def test_after_a_crash_the_next_start_goes_on_at_once(tmp_path: Path) -> None:
    assert run_processes(killed_and_started_again, 1, tmp_path / "run", group=False)[0] == [0, 2, 4]


# ---- two launchers


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path, after: int) -> int:
    """Waits until the run of this process has saved; gives the step."""
    deadline = time.monotonic() + 1200
    while True:
        steps = [int(path.parent.name[5:]) for path in run.glob("checkpoints/step-????????/manifest.json")]
        if steps and max(steps) > after:
            return max(steps)
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_of_two_launchers_one_trains(tmp_path: Path) -> None:
    config, run = write_config(tmp_path, steps=100_000), tmp_path / "run"
    here = socket.gethostname()
    first = evenpipe("train", config)
    try:
        wait_for_checkpoint(first, run, 0)
        says = f"output.folder is {str(run)!r}, which process {first.pid} on {here} since "
        assert says in finish(evenpipe("train", config), exit_code=2)
        elsewhere = f"output.folder='{tmp_path / 'other'}'"
        says = f"checkpoint.folder is {str(run / 'checkpoints')!r}, which process {first.pid} on {here} since "
        shared = f"checkpoint.folder='{run / 'checkpoints'}'"
        assert says in finish(evenpipe("train", config, elsewhere, shared), exit_code=2)

        second = evenpipe("train", config, "--force")
        says = (
            f"not saved: {str(run / 'checkpoints')!r} has been taken from this run, by process {second.pid} on {here}"
        )
        try:
            assert says in finish(first, exit_code=3)
            wait_for_checkpoint(second, run, find_latest(run / "checkpoints").checkpoint.step)
        finally:
            second.kill()  # the launcher alone; its processes follow
        crashed = find_latest(run / "checkpoints").checkpoint.step
        third = evenpipe("train", config)
        try:
            wait_for_checkpoint(third, run, crashed)
        finally:
            os.killpg(third.pid, signal.SIGKILL)
        assert "waiting" not in third.communicate()[0]
        said = second.communicate()[0]
        assert f"output.folder {run} is taken from process {first.pid} on {here} since" in said
    finally:
        first.kill()
    assert find_latest(run / "checkpoints").checkpoint.step > crashed


# ---- saves at the same moments


@dataclass
class Attempt:
    run: int
    number: int
    step: int
    """Both runs save the same steps, several times each."""
    failure: str | None = None


def fill(state: Run, run: int, number: int) -> None:
    with torch.no_grad():
        for shard in state.shards.values():
            shard.tensor.fill_(2 * number + run)


def save_in_turns(folder: Path, saves: int, how: str) -> list[Attempt]:
    """Two runs save as fast as they can. "by force": each takes the lock from the other, at random moments; "without
    locks": as if there were none."""
    os.fsync = lambda descriptor: None  # nothing loses power here; waiting for the disk would take minutes
    run, group = two_pairs()
    state = Run(9, True, True, dist.get_rank(group), 2)
    chance = random.Random(run)
    if how == "without locks":
        checkpoint.hold = lambda folder: Path(folder).mkdir(parents=True, exist_ok=True)
        checkpoint.check = lambda folder: None
    attempts = []
    for number in range(saves // 2):
        if number % 4 == 0:  # a refusal is quick: a run that is refused would use up its attempts before the other
            dist.barrier()
        attempt = Attempt(run, number, number // 3)
        fill(state, run, number)
        try:
            if how == "by force" and chance.random() < 0.5:
                prepare_folder(folder, group, force=True)
            save(folder, attempt.step, state.shards, None, asdict(attempt), group, keep=None)
        except (InputError, RunError) as error:
            attempt.failure = str(error)
        attempts.append(attempt)
    dist.barrier()
    return attempts


def values_in(path: Path) -> set[float]:
    """All that stands in the tensors of a checkpoint."""
    state = Run(9, True, False, 0, 1)
    load(open_checkpoint(path), state.shards)
    return {value for shard in state.shards.values() for value in shard.tensor.detach().flatten().tolist()}


@pytest.mark.parametrize("how", ["by force", "without locks"])
def test_no_checkpoint_is_of_two_runs_and_no_success_is_without_one(tmp_path: Path, how: str, pytestconfig) -> None:
    saves = 40 if pytestconfig.option.quick else 1000  # of both runs together
    both = run_processes(save_in_turns, 4, tmp_path, saves, how)
    assert both[0] == both[1]
    assert both[2] == both[3]
    attempts = both[0] + both[2]
    succeeded = [attempt for attempt in attempts if attempt.failure is None]
    steps = {attempt.step for attempt in succeeded}
    assert {f"step-{step:08d}" for step in steps} <= {path.name for path in tmp_path.iterdir()}
    for path in tmp_path.glob("step-*[0-9]"):
        metadata = open_checkpoint(path).metadata
        assert values_in(path) == {2 * metadata["number"] + metadata["run"]}, f"{path.name} is of two saves"
        own = [attempt for attempt in succeeded if attempt.step == metadata["step"]]
        assert Attempt(**metadata) in own, f"{path.name} is of a save that failed, none of {own}"
    failures = [attempt.failure for attempt in attempts if attempt.failure is not None]
    print(f"{how}: {len(attempts)} saves, {len(succeeded)} succeeded, {len(failures)} refused, {len(steps)} folders")
    assert len(succeeded) > len(attempts) // 10
    assert {attempt.run for attempt in succeeded} == {0, 1}
