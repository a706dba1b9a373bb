"""Members of a group prove that they belong to the run; whoever took the place of one cannot."""

from __future__ import annotations

import torch.distributed as dist
from harness import run_processes

from evenpipe.processes.proof import strangers


def members(secrets: list[bytes]) -> list[int]:
    rank = dist.get_rank()
    return strangers(dist.group.WORLD, rank, range(len(secrets)), secrets[rank])


def test_who_knows_the_secret_is_no_stranger() -> None:
    assert run_processes(members, 3, [b"secret"] * 3) == [[], [], []]


def test_who_does_not_know_it_is_one_to_all_others() -> None:
    assert run_processes(members, 3, [b"secret", b"", b"secret"]) == [[1], [0, 2], [1]]
