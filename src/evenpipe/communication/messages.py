"""Messages between processes of a group besides tensors: JSON, in tensors of bytes.

torch's own collectives of objects send pickles, and reading a pickle can run its sender's code. A port of a group is
open to everyone who reaches its machine (docs/security.md), so messages here are only data: numbers, strings, None,
lists and tables of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.communication.calls import NAME, ROW, check_names, row_of
from evenpipe.communication.communicator import ALL_GATHER, Communicator
from evenpipe.errors import RunError

LIMIT_BYTES = 1 << 30
"""Largest message: an index of a hundred thousand tensors is a tenth of that."""


def values_of_members(communicator: Communicator | None, value: Any, label: str) -> list[Any]:
    """Return the JSON value of every member, in their order; None: only that of this process. Collective.

    label: of the wait, for the error if it fails.
    """
    if communicator is None:
        return [value]
    with communicator.waiting(label):
        values = gather_values(value, communicator.group)
    by_rank = sorted(communicator.members)
    return [values[by_rank.index(member)] for member in communicator.members]


def gather_values(value: Any, group: dist.ProcessGroup | None, called: str = "") -> list[Any]:
    """Return the value of every process of the group (None: of all), in the order of ranks. Collective over the group.

    value: a JSON value. Tuples become lists, also in the value of this process.
    called: name of the public method that begins with or contains this exchange (`calls`).

    Raises:
        RuntimeError: as torch's collectives.
        RunError: a process sent invalid data.
        InputError: on every process, if they were called for different methods.
    """
    size, device = dist.get_world_size(group), _device(group)
    message = _encode(value)
    counts = _gather_lengths(len(message), group, called)
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(message)] = message
    table = torch.empty(size * len(padded), dtype=torch.uint8, device=device)
    ALL_GATHER(table, padded.to(device), group=group)
    rows = table.cpu().view(size, -1)
    return [_decode(row[:count]) for row, count in zip(rows, counts, strict=True)]


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup | None, called: str = "") -> Any:
    """Return the value of the process with global rank `source`, on every process. Collective over the group.

    called: as for `gather_values`. Raises as `gather_values`.
    """
    device, is_source = _device(group), dist.get_rank() == source
    message = _encode(value if is_source else None)
    length = _gather_lengths(len(message), group, called)[dist.get_process_group_ranks(group).index(source)]
    content = message.to(device) if is_source else torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(content, source, group=group)
    return _decode(content.cpu())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name from `dtype_name`. Raises ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of tensors for this group: the CPU if it has gloo."""
    gloo = "gloo" in dist.get_backend_config(group)
    return torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())


def _encode(value: Any) -> Tensor:
    """Return [bytes] uint8, never empty."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise RunError(f"another process sent invalid JSON: {error}") from error


def _gather_lengths(length: int, group: dist.ProcessGroup | None, called: str) -> Sequence[int]:
    """Return the bytes of every process's message, by rank."""
    device = _device(group)
    members = dist.get_process_group_ranks(group)
    table = torch.empty(len(members) * ROW, dtype=torch.int64, device=device)
    ALL_GATHER(table, row_of(called, [length], device), group=group)
    rows = table.view(-1, ROW).tolist()
    check_names(rows, members)
    return _checked([row[NAME] for row in rows])


def _checked(lengths: Sequence[int]) -> Sequence[int]:
    if not all(0 < length <= LIMIT_BYTES for length in lengths):
        raise RunError(f"another process announced a message of {max(lengths)} bytes; expected 1 to {LIMIT_BYTES}")
    return lengths
