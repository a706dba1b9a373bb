"""How many communicators a process has, and how many calls make them, on few and on very many processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenpipe import NcclOptions
from evenpipe.communication import communicators
from evenpipe.communication.communicators import Communicators
from evenpipe.errors import InputError
from evenpipe.memory.framework import EVENPIPE
from evenpipe.memory.reserved import communicators_of
from evenpipe.parallel import Grid
from evenpipe.parallel.groups import Groups
from evenpipe.processes.watch import Watch
from evenpipe.recipe.parallelism import Parallelism
from evenpipe.schedule import PER_KIND, SHARING, plan_program

SIZES = [
    # 64, 512 and 4 096 processes
    {"dp": (2, 8, 32), "pp": (4, 8, 16), "tp": (8, 8, 8)},
    {"dp": (2, 4, 32), "pp": (4, 8, 8), "cp": (2, 2, 2), "tp": (4, 8, 8)},
    {"dp": (16, 64, 512), "pp": (4, 8, 8)},
    {"dp": (8, 64, 512), "ep": (4, 8, 64), "pp": (8, 8, 8)},
    {"dp": (64, 512, 4096)},
]
LINE = {"B", "F", "SMALL", "LARGE"}


class Options:
    """As torch's ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.config = SimpleNamespace(max_ctas=0)


class Splits(list[str]):
    """The names of groups, a call each."""

    def __init__(self) -> None:
        self.aborted: list[str] = []


@contextmanager
def fake_processes(size: int, rank: int) -> Iterator[None]:
    """A default group of so many, none of which runs."""
    dist.init_process_group("fake", store=FakeStore(), world_size=size, rank=rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Splits:
    """The default group is that of processes with a GPU of their own."""
    called = Splits()

    def split_group(split_ranks: list[list[int]], group_desc: str, **_: Any) -> SimpleNamespace | None:
        called.append(group_desc)
        ranks = [rank for line in split_ranks for rank in line]
        assert len({*ranks}) == len(ranks) and {*ranks} <= {*range(dist.get_world_size())}, "lines of one split overlap"
        return SimpleNamespace(abort=lambda: called.aborted.append(group_desc)) if dist.get_rank() in ranks else None

    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: pytest.fail("a group made line by line"))
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: "cuda:nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(communicators, "bound_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(communicators, "arrivals_on", lambda _: None)
    monkeypatch.setattr(Communicators, "warm_up", lambda _: None)
    h100 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h100)
    return called


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: " ".join(sizes))
@pytest.mark.parametrize("mode", ["first-last", "vocab-2"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_process_makes_as_many_on_any_number_of_processes(
    sizes: dict[str, tuple[int, ...]], mode: str, sharded: bool, splits: Splits, caplog: pytest.LogCaptureFixture
) -> None:
    """At most four on the line of the pipeline, one for each other axis and one for all processes; and one more for
    rows that are cut along tensor ranks and other axes at once."""
    counts = []
    for number in range(3):
        splits.clear()
        grid_sizes = {axis: lengths[number] for axis, lengths in sizes.items()}
        processes = math.prod(size for axis, size in grid_sizes.items() if axis != "ep")
        rank = processes // 3
        with fake_processes(processes, rank):
            grid = Grid.from_sizes(rank, **grid_sizes)
            devices = grid.size("pp")
            _, program = plan_program("1f1b", devices, devices, mode if devices > 1 else "first-last", sharing=PER_KIND)
            vocabulary = mode == "vocab-2" and devices > 1
            groups = Groups(
                grid,
                program.communicators,
                tied=None,
                vocabulary=vocabulary,
                sharded=sharded,
                timeout_seconds=600.0,
                torch_device=torch.device("cuda:0"),
                watch=Watch(None, rank, processes),
            )
            assert groups.communicators is not None
            own = [one.name for one in groups.communicators]
        parallelism = Parallelism(**grid_sizes, data_parallel="shard" if sharded else "replicate")
        counts.append((len(splits), len(own)))
        transfers = sum(grid.coordinate("pp") in members for members in program.communicators.values())
        assert len(own) == communicators_of(parallelism, EVENPIPE, transfers, vocabulary=vocabulary), own
        on_line = [name for name in own if name in LINE]
        assert len(on_line) == (0 if devices == 1 else 4 if mode == "vocab-2" else 2)
        others = {"everyone", *(name for name in own if name in ("dp", "cp", "tp", "dp x cp", "experts"))}
        both = {"expert replicas", "tp x dp", "tp x dp x cp", "pp x tp", "shared"}
        assert {*own} <= {*on_line, *others, *both} and len({*own} & both) <= 2
    assert not caplog.messages, "few channels"
    assert counts[0] == counts[1] == counts[2]
    assert all(calls == made for calls, made in counts)


def test_a_failed_run_aborts_them_where_nobody_ends_the_process(
    splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_processes(64, 5):
        watch = Watch(None, 5, 64)
        options = {"timeout_seconds": 600.0, "torch_device": "cuda:0", "watch": watch}
        made = Communicators([("F", [range(8)]), ("dp", [range(8, 16)]), ("everyone", [range(64)])], **options)
        (interrupt,) = watch._interrupts
        interrupt()
        assert splits.aborted == ["F", "everyone"]
        monkeypatch.setattr(dist, "destroy_process_group", lambda *_: None)
        made.close()
        assert not watch._interrupts
        monkeypatch.undo()


def test_communicators_of_programs_have_few_channels() -> None:
    """Whatever they are called."""
    for sharing, mode in itertools.product(SHARING, ("first-last", "vocab-2")):
        _, program = plan_program("zbv", 4, 4, mode, sharing=sharing)
        assert all(NcclOptions().channels_of(name) for name in program.communicators)


WAITING = [
    # communicators of a process, multiprocessors, channels that are given, and what is said
    (["B", "F", "LARGE", "SMALL", "dp", "tp", "everyone"], 132, None, ""),
    (["F:0>1", "F:1>2", "B:1>0", "B:2>1", "X", "DX", "ROWS", "STATISTICS", "dp"], 132, None, "may occupy 41 of 132"),
    (["B", "F", "LARGE", "SMALL"], 80, 32, "it must be fewer"),
    (["B", "F", "LARGE", "SMALL", "tp"], 132, 32, "nccl.channels is 32; it must be fewer"),
    (["ALL", "tp"], 132, 64, "may occupy 64 of 132"),
    (["tp", "dp"], 132, 64, ""),
]


def test_waiting_transfers_leave_room_on_the_gpu() -> None:
    for names, multiprocessors, channels, says in WAITING:
        try:
            said = NcclOptions(channels=channels).check_channels(names, multiprocessors) or ""
        except InputError as error:
            said = str(error)
        assert says in said and bool(says) == bool(said), (names, said)


def test_the_environment_limits_channels_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    assert NcclOptions(channels=64).check_channels(["B", "F", "LARGE", "SMALL", "tp"], 16) is not None
    assert NcclOptions(channels=64).check_channels(["B", "F", "LARGE", "SMALL", "tp"], 32) is None
