"""Numbers that are made on the host and used on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.vocabulary.buffers import aligned


def to_device(values: Tensor, torch_device: torch.device | str) -> Tensor:
    """`values` on `torch_device`; nothing waits for a copy from the host.

    From memory that the operating system may move, CUDA copies through a room of its own, and where that is too small
    for the whole (above 64 KiB: 8192 indices) the host waits until the GPU has come so far. Pinned memory is torch's,
    which knows when the copy is done.
    """
    if torch.device(torch_device).type == "cuda" and values.device.type == "cpu" and values.numel():
        values = values.pin_memory()
    return values.to(torch_device, non_blocking=True)


def to_device_together(parts: Sequence[Tensor], torch_device: torch.device) -> list[Tensor]:
    """The same for several vectors of one dtype, with one copy: each costs as much as a small kernel.

    They begin at whole vectors, whatever their lengths: Triton compiles a kernel anew for an address that is no
    multiple of 16 bytes.
    """
    if parts[0].device == torch_device:
        return list(parts)
    rooms = [aligned(part.shape[0]) for part in parts]
    together = parts[0].new_empty(sum(rooms), pin_memory=torch_device.type == "cuda" and parts[0].device.type == "cpu")
    for room, part in zip(torch.split(together, rooms), parts, strict=True):
        room[: part.shape[0]] = part
    there = torch.split(together.to(torch_device, non_blocking=True), rooms)
    return [room[: part.shape[0]] for room, part in zip(there, parts, strict=True)]
