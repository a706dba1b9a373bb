"""Checkpoints of several processes: all of them fail together or not at all, and no pickle travels.

Layouts go on from each other's checkpoints in test_changed_layouts.py and test_optimizers.py.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_outcomes, run_processes
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from evenpipe.checkpoints import find_latest, load, open_checkpoint, prepare_folder, save
from evenpipe.checkpoints.manifest import MANIFEST
from evenpipe.errors import InputError, RunError
from evenpipe.model.placement import Cut, Held, TensorPlacement

HIDDEN = 8
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def own_numbers(name: str, placement: TensorPlacement, seed: int) -> Tensor:
    """The part that a process holds of numbers that follow from name and seed alone."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
    (box,) = placement.boxes()
    return torch.randn(placement.shape, generator=generator)[box.whole].clone()


class Run:
    """What one process of a pipeline holds of four layers and of a vocabulary that is spread over all of them: at four
    processes its nine rows are 3, 3, 3 and 0."""

    def __init__(self, rank: int, size: int, seed: int = 0) -> None:
        placements = {EMBEDDING: TensorPlacement((9, HIDDEN), (Cut(("pp",), rank, size),))}
        layers = [layer for layer in range(4) if layer * size // 4 == rank]
        placements |= {f"model.layers.{layer}.mlp.weight": TensorPlacement((HIDDEN, HIDDEN)) for layer in layers}
        if rank == size - 1:
            placements[NORM] = TensorPlacement((HIDDEN,))
        self.shards: dict[str, Held] = {}
        for name, placement in placements.items():
            self.shards[name] = Held(nn.Parameter(own_numbers(name, placement, seed)), placement)
        self.optimizer = torch.optim.AdamW([shard.tensor for shard in self.shards.values()], lr=0.01)

    def take_step(self, step: int) -> None:
        for name, shard in self.shards.items():
            shard.tensor.grad = own_numbers(name, shard.placement, 100 + step)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, shard in self.shards.items():
            tensors[name] = shard.tensor.detach()
            tensors |= {f"{key} of {name}": value for key, value in self.optimizer.state.get(shard.tensor, {}).items()}
        return {name: value.clone() for name, value in tensors.items()}


def run_of_this_process(**options: int) -> Run:
    return Run(dist.get_rank(), dist.get_world_size(), **options)


def three_checkpoints(folder: Path, run: Run) -> Run:
    for step in (1, 2, 3):
        run.take_step(step)
        save(folder, step, run.shards, run.optimizer, {}, keep=None)
    return run


def refuse_objects() -> None:
    """From now on no Python object can be sent as a pickle."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a pickle was about to travel")

    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refuse
    with pytest.raises(AssertionError, match="a pickle"):
        dist.all_gather_object([None] * 4, "hello")


def save_with_an_idle_empty_shard(folder: Path) -> list[str]:
    """A shard without rows may never get a gradient, and then its optimizer state does not exist."""
    refuse_objects()
    run, other, expected = (run_of_this_process(seed=seed) for seed in (0, 5, 0))
    run.take_step(1)
    if dist.get_rank() == 3:
        assert run.shards[EMBEDDING].tensor.shape == (0, HIDDEN)
        del run.optimizer.state[run.shards[EMBEDDING].tensor]
    load(open_checkpoint(save(folder, 1, run.shards, run.optimizer, {})), other.shards, other.optimizer)
    other.take_step(2)
    for step in (1, 2):
        expected.take_step(step)
    found = other.tensors()
    assert all(torch.equal(found[key], value) for key, value in expected.tensors().items())
    return sorted(path.name for path in (folder / "step-00000001").iterdir())


def test_an_empty_shard_needs_no_optimizer_state_and_no_pickle_travels(tmp_path: Path) -> None:
    names = run_processes(save_with_an_idle_empty_shard, 4, tmp_path)[0]
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp", MANIFEST, "run.json"]


# ---- all or none


def fail_on_one(folder: Path, case: str) -> str:
    """Let something go wrong on the second process alone; return the error that this one saw."""
    run = three_checkpoints(folder, run_of_this_process())
    second, is_lost = dist.get_rank() == 1, case.endswith("is lost")
    checkpoint = find_latest(folder).checkpoint
    if is_lost:
        run = run_of_this_process(seed=5)
    before = run.tensors()
    if second and case == "file size limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    elif second and case == "state that is no tensor":
        run.optimizer.state[run.shards[EMBEDDING].tensor]["rounds"] = 3
    elif second and case == "dtype":
        run.shards[NORM] = Held.whole(nn.Parameter(torch.zeros(HIDDEN, dtype=torch.float64)))
        run.optimizer = None
    elif second:
        (folder / "step-00000003" / case.split(maxsplit=1)[0]).unlink()
    dist.barrier()
    with pytest.raises((InputError, RunError)) as caught:
        if case == "dtype" or is_lost:
            load(checkpoint, run.shards, run.optimizer)
        else:
            save(folder, 4, run.shards, run.optimizer, {})
    if is_lost or not second:
        assert all(torch.equal(value, before[key]) for key, value in run.tensors().items())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert find_latest(folder).checkpoint.step == (2 if is_lost else 3)
    assert not list(folder.glob("*.tmp"))
    return f"{caught.type.__name__}: {caught.value}"


FAILURES = {
    "file size limit": "RunError: the checkpoint of step 4 was not saved: process 1: File too large: ",
    "state that is no tensor": "InputError: optimizer: its state 'rounds' of 'model.embed_tokens.weight' is int",
    "dtype": "InputError: 'model.norm.weight' has dtype float32 in the checkpoint and float64 in the model",
    "__0_0.distcp is lost": "RunError: the checkpoint ",
    "__1_0.distcp is lost": "RunError: the checkpoint ",  # the first process reads nothing from it
}


def failures_on_one(folder: Path) -> list[str]:
    return [fail_on_one(folder / case, case) for case in FAILURES]


def test_a_failure_of_one_process_is_one_of_all(tmp_path: Path) -> None:
    first, second = run_processes(failures_on_one, 2, tmp_path)
    assert first == second
    for error, says in zip(first, FAILURES.values(), strict=True):
        assert error.startswith(says)


# ---- killed


def limit_file_size_and_die(size: int) -> None:
    """The kernel kills the process in the middle of the write that passes this size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def die_while_saving(folder: Path) -> str:
    run = three_checkpoints(folder, run_of_this_process())
    if dist.get_rank() == 1:
        limit_file_size_and_die(1000)
    with pytest.raises(RunError) as caught:
        save(folder, 4, run.shards, run.optimizer, {})
    return str(caught.value)


def test_a_process_that_dies_while_saving_is_an_error_of_the_others(tmp_path: Path) -> None:
    outcomes = run_outcomes(die_while_saving, 2, tmp_path)
    assert outcomes[1].exit_code == -signal.SIGXFSZ
    assert outcomes[0].value.startswith("the checkpoint of step 4 was not saved: ")
    assert "another process died or does not answer" in outcomes[0].value
    assert outcomes[0].seconds < GROUP_TIMEOUT.total_seconds() / 2, "noticed by the timeout only"
    assert find_latest(tmp_path).checkpoint.step == 3


CALLS = ("mkdir", "fsync", "rename", "unlink", "rmdir", "open")
"""What changes a folder; a process is killed right before and right after each of them."""


def kill_at(point: int, after: bool) -> None:
    """This process will be killed at the `point`-th of these calls."""
    count = 0

    def dying(call: Callable) -> Callable:
        def wrapper(*arguments, **options):
            nonlocal count
            count += 1
            mine = count == point
            if mine and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **options)
            finally:
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapper

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


def survive_being_killed(folder: Path, step: int, keep: int) -> int:
    """Save step 3 or 4 over and over in processes killed at ever later points; return the number of points."""
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the kernel has; waiting would take minutes
    before = folder / "before"
    run = three_checkpoints(before, Run(0, 1))
    third = run.tensors()
    run.take_step(4)
    point = 0
    while True:
        point += 1
        for after in (False, True):
            here = folder / f"{point} {after}"
            shutil.copytree(before, here, ignore=shutil.ignore_patterns(".evenpipe-lock-*"))
            status = in_a_child(
                lambda: (kill_at(point, after), save(here, step, run.shards, run.optimizer, {"new": 1}, keep=keep))
            )
            assert status in (0, -signal.SIGKILL), status
            latest = find_latest(here)
            assert latest.rejected == ()
            assert latest.checkpoint.step in (3, step)
            back = Run(0, 1, seed=5)
            was_saved = load(latest.checkpoint, back.shards, back.optimizer) == {"new": 1}
            wanted = run.tensors() if was_saved else third
            assert all(torch.equal(value, wanted[key]) for key, value in back.tensors().items())
            prepare_folder(here)
            save(here, 5, run.shards, run.optimizer, {}, keep=1)
            assert sorted(path.name for path in here.glob("[!.]*")) == ["step-00000005"]
            if status == 0:
                assert was_saved
                return point


def in_a_child(work: Callable) -> int:
    """Exit code of a forked process: 0, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("step", "keep"), [(4, 2), (3, 3)], ids=["a new step", "the same step again"])
@pytest.mark.sampled(1)
def test_killed_at_any_point_a_whole_checkpoint_is_there(tmp_path: Path, step: int, keep: int) -> None:
    points = run_processes(survive_being_killed, 1, tmp_path, step, keep, group=False)[0]
    assert points > 15, f"only {points} points: the calls that this test listens to are no longer used"
