"""Two runs in one folder: one of them is refused; and whatever they do to each other, no checkpoint is of both."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_processes
from test_checkpoint_processes import Run
from training_runs import evenpipe, finish, write_config

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


# ---- two loops of one's own


def two_pairs() -> tuple[int, dist.ProcessGroup]:
    """Two runs of two processes each: which this one is of, and its group."""
    groups = [dist.new_group([0, 1], timeout=GROUP_TIMEOUT), dist.new_group([2, 3], timeout=GROUP_TIMEOUT)]
    run = dist.get_rank() // 2
    return run, groups[run]


def one_after_the_other(folder: Path) -> list[str]:
    """Return what the second of two runs gets to hear, and then the first, behind the name of this process."""
    run, group = two_pairs()
    state = Run(dist.get_rank(group), 2, seed=run)
    said = [f"process {os.getpid()} on"]

    def save_step(step: int) -> None:
        save(folder, step, state.shards, None, {"run": run}, group)

    def is_refused(error: type[Exception], work: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            work()
        said.append(str(caught.value))

    if run == 0:
        prepare_folder(folder, group)
        save_step(1)
    dist.barrier()
    if run == 1:
        is_refused(InputError, lambda: prepare_folder(folder, group))
        is_refused(InputError, lambda: save_step(2))
        assert find_latest(folder, group).checkpoint.metadata == {"run": 0}  # reading needs no lock
        prepare_folder(folder, group, force=True)
        save_step(2)
    dist.barrier()
    if run == 0:
        is_refused(RunError, lambda: save_step(3))
        is_refused(RunError, lambda: save_step(3))
        is_refused(InputError, lambda: prepare_folder(folder, group))
    dist.barrier()
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["step-00000001", "step-00000002"]
    assert find_latest(folder, group).checkpoint.metadata == {"run": 1}
    return said


def test_the_second_is_refused_and_by_force_the_first_one(tmp_path: Path) -> None:
    said = run_processes(one_after_the_other, 4, tmp_path)
    (first, *by_first), (second, *by_second) = said[0], said[2]
    assert [said[1][1:], said[3][1:]] == [by_first, by_second]
    assert all(text.startswith(f"folder is {str(tmp_path)!r}, which {first}") for text in by_second)
    for text in by_first[:2]:
        assert text.startswith(f"the checkpoint of step 3 was not saved: {str(tmp_path)!r} has been taken")
        assert f"by {second}" in text
    assert second in by_first[2]


# ---- two launchers


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path, after: int) -> None:
    """Wait until the run of this process has saved a step after this one."""
    while newest_step(run) <= after:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def newest_step(run: Path) -> int:
    return max((int(path.parent.name[5:]) for path in run.glob("checkpoints/step-????????/manifest.json")), default=0)


@pytest.mark.slow
def test_of_two_launchers_one_trains(tmp_path: Path) -> None:
    config, run = write_config(tmp_path, {"training.steps": 100_000}), tmp_path / "run"
    here = socket.gethostname()
    first = evenpipe("train", config)
    processes = [first]
    try:
        wait_for_checkpoint(first, run, 0)
        held_by = f"which process {first.pid} on {here} since "
        refused = finish(evenpipe("train", config), exit_code=2)
        assert f"output.folder is {str(run)!r}, {held_by}" in refused
        shared = (f"output.folder='{tmp_path / 'other'}'", f"checkpoint.folder='{run / 'checkpoints'}'")
        refused = finish(evenpipe("train", config, *shared), exit_code=2)
        assert f"checkpoint.folder is {str(run / 'checkpoints')!r}, {held_by}" in refused

        second = evenpipe("train", config, "--force")
        processes.append(second)
        taken = f"has been taken from this run, by process {second.pid} on {here}"
        assert f"not saved: {str(run / 'checkpoints')!r} {taken}" in finish(first, exit_code=3)
        wait_for_checkpoint(second, run, newest_step(run))
        second.kill()  # the launcher alone; its processes follow
        crashed = find_latest(run / "checkpoints").checkpoint.step
        third = evenpipe("train", config)
        processes.append(third)
        wait_for_checkpoint(third, run, crashed)
        os.killpg(third.pid, signal.SIGKILL)
        assert "waiting" not in third.communicate()[0]
        said = second.communicate()[0]
        assert f"output.folder {run} is taken from process {first.pid} on {here} since" in said
    finally:
        for process in processes:
            process.kill()
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
    state = Run(dist.get_rank(group), 2)
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
    state = Run(0, 1)
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
