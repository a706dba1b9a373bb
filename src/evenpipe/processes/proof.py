"""Proof that the connections of a group lead to processes of this run.

gloo listens on a port for each group, and accepts the first connection that sends the small number of a peer; on
loopback that may be another user of the machine. So if processes share a secret (`FolderStore.secret`), every pair of a
new group proves that it knows it before anything else is sent: each sends the other a code (HMAC-SHA256, RFC 2104) of
the group and of both ranks. A stranger in a peer's place learns only a code that is useless elsewhere.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

AWAITED = "proofs of"
"""Prefix of the label of a wait for proofs."""

ABORTED = (
    "gloo ends a process that receives more than it asked for, so a program that is not part of this run may have "
    "connected to it; check who else uses this machine"
)
"""Message about a process that was aborted in such a wait."""


def find_strangers(group: dist.ProcessGroup, rank: int, members: Sequence[int], secret: bytes) -> list[int]:
    """Return the members whose connection leads to a stranger. Collective over a group that has gloo.

    rank, members: global ranks.
    """
    peers = [member for member in members if member != rank]
    received = {peer: torch.zeros(32, dtype=torch.uint8) for peer in peers}
    works = [dist.irecv(received[peer], peer, group) for peer in peers]
    works += [dist.isend(_code(secret, group.group_name, rank, peer), peer, group) for peer in peers]
    for work in works:
        if work is not None:
            work.wait()
    return [peer for peer in peers if not _equal(received[peer], _code(secret, group.group_name, peer, rank))]


def _code(secret: bytes, group: str, sender: int, receiver: int) -> Tensor:
    """Return the code, [32] uint8."""
    digest = hmac.digest(secret, f"{group} {sender} {receiver}".encode(), "sha256")
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _equal(code: Tensor, expected: Tensor) -> bool:
    return hmac.compare_digest(code.numpy().tobytes(), expected.numpy().tobytes())
