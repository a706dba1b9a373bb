"""The first exchange of a public method that all processes must call: it compares the names of the methods.

A program may call such a method on some processes only (`if rank == 0: pipeline.save_pretrained(...)`), while the
others continue with their next one. Two different collectives would then meet: gloo ends a process that receives more
bytes than it asked for, and otherwise both wait forever. So every public method begins with an all-gather of rows of
equal size, over all processes, and each row begins with the name of the method:

    name, 32 bytes as four int64  |  28 int64 that the method exchanges anyway, such as the size of the batch

Whichever methods meet, this exchange completes, and all processes find the same fault in it and can continue.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from evenpipe.communication.communicator import Communicator
from evenpipe.errors import InputError
from evenpipe.processes.names import processes

ROW = 32
"""Numbers in a row."""
NAME = 4
"""Numbers of the name, at the start of a row."""
ROOM = ROW - NAME
"""Most numbers that a method may add."""


@cache
def _encoded(name: str) -> tuple[int, ...]:
    content = name.encode()
    assert len(content) <= 8 * NAME, f"{name} is longer than {8 * NAME} bytes"
    return struct.unpack(f"<{NAME}q", content.ljust(8 * NAME, b"\0"))


def _decoded(numbers: Sequence[int]) -> str:
    return struct.pack(f"<{NAME}q", *numbers).rstrip(b"\0").decode("ascii", errors="backslashreplace")


def row_of(name: str, numbers: Sequence[int], torch_device: torch.device) -> Tensor:
    """Return this process's row, [ROW] int64."""
    assert len(numbers) <= ROOM, f"{name} gives {len(numbers)} numbers, a row has room for {ROOM}"
    padding = [0] * (ROOM - len(numbers))
    return torch.tensor([*_encoded(name), *numbers, *padding], dtype=torch.int64, device=torch_device)


def row_of_scalar(name: str, number: Tensor) -> Tensor:
    """As `row_of`, with the bits of an fp64 scalar, which the host does not read."""
    row = row_of(name, (), number.device)
    row[NAME] = number.view(torch.int64)
    return row


def check_names(rows: Sequence[Sequence[int]], members: Sequence[int]) -> None:
    """Raise InputError if processes were called for different methods.

    members: global ranks of the processes with these rows.
    """
    callers: dict[tuple[int, ...], list[int]] = {}
    for member, row in zip(members, rows, strict=True):
        callers.setdefault(tuple(row[:NAME]), []).append(member)
    if len(callers) > 1:
        by_rank = sorted((sorted(ranks), _decoded(name)) for name, ranks in callers.items())
        message = ", ".join(f"{processes(ranks)} called {name}" for ranks, name in by_rank)
        raise InputError(f"{message}: every process must call it")


def gather_numbers(
    communicator: Communicator | None, numbers: Sequence[int], label: str, needed_by: str, torch_device: torch.device
) -> list[list[int]]:
    """Return the numbers of all members, in their order, on every member; None: only those of this process. No method
    begins with this exchange. Collective over the communicator."""
    if communicator is None:
        return [list(numbers)]
    own_numbers = torch.tensor(numbers, dtype=torch.int64, device=torch_device)
    table: Tensor = communicator.all_gather(own_numbers, label).wait(needed_by)
    return table.tolist()


def gather_calls(communicator: Communicator, row: Tensor, label: str, needed_by: str = "") -> Tensor:
    """Return the numbers of all members' rows, [members, ROOM] int64 on the host.

    Collective over the communicator. The host waits for it, also with a GPU.

    Args:
        row: of this process, from `row_of`.
        label, needed_by: description of this wait, for error messages.

    Raises:
        InputError: on every member, if members were called for different methods.
    """
    on_host: Tensor = communicator.all_gather(row, label).wait(needed_by).cpu()
    check_names(on_host[:, :NAME].tolist(), communicator.members)
    return on_host[:, NAME:]


def check_same_call(communicator: Communicator | None, name: str, torch_device: torch.device) -> None:
    """Raise InputError on every member if members were called for different methods; None: a single process. Collective
    over the communicator."""
    if communicator is not None:
        gather_calls(communicator, row_of(name, (), torch_device), f"the call of {name}")
