"""Checkpoints of several processes: any layout into any other, and all of them fail together or not at all."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
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
EMBEDDING, HEAD, BIAS, NORM = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias", "model.norm.weight"


def numbers(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers that follow from name and seed alone, whatever the layout."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 1000 + sum(name.encode())))


class Run:
    """What one process of a pipeline holds of a model of a vocabulary and four layers.

    spread: the vocabulary over all processes, else on first and last. At four processes nine rows are 3, 3, 3 and 0.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        spread: bool = True,
        vocabulary: int = 9,
        tied: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        last = size - 1
        shapes = {EMBEDDING: (vocabulary, HIDDEN), NORM: (HIDDEN,)}
        shapes |= {f"model.layers.{layer}.mlp.weight": (HIDDEN, HIDDEN) for layer in range(4)}
        shapes |= {} if tied else {HEAD: (vocabulary, HIDDEN), BIAS: (vocabulary,)}
        holders = {f"model.layers.{layer}.mlp.weight": {layer * size // 4} for layer in range(4)}
        holders |= {EMBEDDING: {0, last} if tied else {0}, HEAD: {last}, BIAS: {last}, NORM: {last}}
        self.shards: dict[str, Held] = {}
        for name, shape in shapes.items():
            placement = TensorPlacement(shape)
            if shape[0] == vocabulary and spread:
                placement = TensorPlacement(shape, (Cut(("pp",), rank, size),))
            elif rank not in holders[name]:
                continue
            elif name == EMBEDDING and rank == last != 0:
                placement = TensorPlacement(shape, copied_along=frozenset({"pp"}))
            (box,) = placement.boxes()
            value = numbers(name, shape, seed).to(dtype)[box.whole].clone()
            self.shards[name] = Held(nn.Parameter(value), placement)
        self.optimizer = torch.optim.AdamW([shard.tensor for shard in self.shards.values()], lr=0.01)

    def rows(self, name: str, value: Tensor) -> Tensor:
        (box,) = self.shards[name].placement.boxes()
        return value[box.whole]

    def take_step(self, step: int) -> None:
        for name, shard in self.shards.items():
            gradient = self.rows(name, numbers(name, shard.placement.shape, 100 + step))
            shard.tensor.grad = gradient.to(shard.tensor.dtype).clone()
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, shard in self.shards.items():
            tensors[name] = shard.tensor.detach()
            tensors |= {f"{key} of {name}": value for key, value in self.optimizer.state.get(shard.tensor, {}).items()}
        return {name: value.clone() for name, value in tensors.items()}

    def assert_equal(self, reference: Run) -> None:
        """To the reference, which holds everything whole, bit for bit."""
        expected = reference.tensors()
        for key, value in self.tensors().items():
            name = key.split(" of ")[-1]
            is_whole = expected[key].shape == self.shards[name].placement.shape
            want = self.rows(name, expected[key]) if is_whole else expected[key]
            assert value.dtype == want.dtype, key
            assert torch.equal(value, want), key
        assert {key.split(" of ")[0] for key in self.tensors()} - set(self.shards) == {"step", "exp_avg", "exp_avg_sq"}


def run_of_this_process(**options: int) -> Run:
    return Run(dist.get_rank(), dist.get_world_size(), **options)


def three_checkpoints(folder: Path, run: Run) -> Run:
    for step in (1, 2, 3):
        run.take_step(step)
        save(folder, step, run.shards, run.optimizer, {}, keep=None)
    return run


# ---- any layout into any other

LAYOUTS = [(4, True), (2, False), (3, True), (1, True), (4, False), (1, False), (2, True), (4, True)]
"""Processes, and whether the vocabulary is spread over them; each continues from the checkpoint of the one before."""
CASES = [
    # rows of the vocabulary, whether it is tied, dtype
    (1003, True, torch.float32),
    (1003, False, torch.float32),
    (9, True, torch.float32),
    (9, False, torch.float32),
    (9, False, torch.bfloat16),
    (2, True, torch.float32),  # two empty shards
]


def refuse_objects() -> None:
    """From now on no Python object can be sent as a pickle."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a pickle was about to travel")

    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refuse
    with pytest.raises(AssertionError, match="a pickle"):
        dist.all_gather_object([None] * 4, "hello")


def go_through_layouts(folder: Path, vocabulary: int, tied: bool, dtype: torch.dtype) -> None:
    refuse_objects()
    model = {"vocabulary": vocabulary, "tied": tied, "dtype": dtype}
    reference, rank = Run(0, 1, **model), dist.get_rank()
    for step, (size, spread) in enumerate(LAYOUTS, start=1):
        group = dist.new_group(list(range(size)), timeout=GROUP_TIMEOUT)
        reference.take_step(step)
        if rank < size:
            run = Run(rank, size, spread=spread, seed=step if step > 1 else 0, **model)
            latest = find_latest(folder, group)
            if step == 1:
                assert latest.checkpoint is None
            else:
                assert (latest.checkpoint.step, latest.rejected) == (step - 1, ())
                assert load(latest.checkpoint, run.shards, run.optimizer, group) == {"processes": LAYOUTS[step - 2][0]}
            run.take_step(step)
            run.assert_equal(reference)
            path = save(folder, step, run.shards, run.optimizer, {"processes": size}, process_group=group)
            again = Run(rank, size, spread=spread, seed=50 + step, **model)
            load(open_checkpoint(path, group), again.shards, again.optimizer, group)
            again.assert_equal(reference)
        dist.barrier()
    if rank == 1:
        file = folder / f"step-{len(LAYOUTS):08d}" / "__1_0.distcp"
        file.write_bytes(bytes(file.stat().st_size))
    dist.barrier()
    latest = find_latest(folder)
    (rejected,) = latest.rejected
    assert (latest.checkpoint.step, rejected.path.name) == (len(LAYOUTS) - 1, "step-00000008")
    assert rejected.reason == "the content of __1_0.distcp does not have the hash in the manifest"


@pytest.mark.parametrize(("vocabulary", "tied", "dtype"), CASES)
@pytest.mark.sampled(1)
def test_every_layout_loads_into_every_other(tmp_path: Path, vocabulary: int, tied: bool, dtype: torch.dtype) -> None:
    """No pickle travels, and all processes agree on the newest sound checkpoint."""
    run_processes(go_through_layouts, 4, tmp_path, vocabulary, tied, dtype)


def save_with_an_idle_empty_shard(folder: Path) -> list[str]:
    """A shard without rows may never get a gradient, and then its optimizer state does not exist."""
    run, other = (run_of_this_process(seed=seed) for seed in (0, 5))
    run.take_step(1)
    if dist.get_rank() == 3:
        assert run.shards[EMBEDDING].tensor.shape == (0, HIDDEN)
        del run.optimizer.state[run.shards[EMBEDDING].tensor]
    load(open_checkpoint(save(folder, 1, run.shards, run.optimizer, {})), other.shards, other.optimizer)
    reference = Run(0, 1)
    for step in (1, 2):
        reference.take_step(step)
    other.take_step(2)
    other.assert_equal(reference)
    return sorted(path.name for path in (folder / "step-00000001").iterdir())


def test_an_empty_shard_needs_no_optimizer_state(tmp_path: Path) -> None:
    names = run_processes(save_with_an_idle_empty_shard, 4, tmp_path)[0]
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp", MANIFEST, "run.json"]


# ---- all or none


def save_from_wrong_rows(folder: Path) -> None:
    run = run_of_this_process()
    rows = nn.Parameter(torch.zeros(5 - dist.get_rank(), HIDDEN))
    run.shards[EMBEDDING] = replace(run.shards[EMBEDDING], tensor=rows)
    save(folder, 1, run.shards, None, {})


def test_rows_that_would_be_saved_at_wrong_offsets_are_noticed(tmp_path: Path) -> None:
    run_processes(save_from_wrong_rows, 2, tmp_path / "as torch.chunk does")
    with pytest.raises((AssertionError, RunError), match=r"this process holds \(\d, 8\), not \(\d, 8\)"):
        run_processes(save_from_wrong_rows, 3, tmp_path)


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
