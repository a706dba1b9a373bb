"""Copy numbers that are computed on the host to a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.vocabulary.buffers import aligned


def to_device(values: Tensor, torch_device: torch.device | str) -> Tensor:
    """Return `values` on `torch_device`, without waiting for a copy from the host.

    CUDA copies pageable memory through a staging buffer, and if that is too small (above 64 KiB: 8192 indices) the host
    waits for the GPU. Torch manages pinned memory, and knows when the copy is done.
    """
    if torch.device(torch_device).type == "cuda" and values.device.type == "cpu" and values.numel():
        values = values.pin_memory()
    return values.to(torch_device, non_blocking=True)


def to_device_together(parts: Sequence[Tensor], torch_device: torch.device) -> list[Tensor]:
    """Copy several vectors of the same dtype at once: each copy costs as much as a small kernel.

    All vectors start at multiples of 16 bytes, whatever their lengths: Triton compiles a separate kernel for other
    addresses.
    """
    if parts[0].device == torch_device:
        return list(parts)
    rooms = [aligned(vector.shape[0]) for vector in parts]
    joined = parts[0].new_empty(sum(rooms), pin_memory=torch_device.type == "cuda" and parts[0].device.type == "cpu")
    for room, vector in zip(torch.split(joined, rooms), parts, strict=True):
        room[: vector.shape[0]] = vector
    on_device = torch.split(joined.to(torch_device, non_blocking=True), rooms)
    return [room[: vector.shape[0]] for room, vector in zip(on_device, parts, strict=True)]
