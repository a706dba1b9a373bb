"""Memory that one microbatch after another uses for the same thing."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 16
"""Elements, 32 bytes of bf16: where rows begin on a GPU."""


def aligned(columns: int) -> int:
    """Elements from one row to the next, of a matrix of so many columns on a GPU.

    Shards of a vocabulary have any number of rows. cuBLAS has its fast kernels for operands whose rows begin at 16
    bytes, Triton reads and writes whole vectors where their distance is a multiple of 16 elements.
    """
    return -(-columns // ALIGNED) * ALIGNED


class Buffers:
    """Room for the large tensors of S and T, handed on from one microbatch to the next.

    On a CPU a tensor of this size is new memory from the operating system each time, page by page, which was 5 % of S
    and T together; handed on, there are as many as microbatches are in flight. They stay until `clear`. Torch's
    allocator for GPUs does the same by itself, and gives the memory to others as well: there `take` asks the allocator
    and nothing is held here.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype, *, room: int = 0) -> Tensor:
        """[rows, columns] of `dtype` on the device of `like`, undefined content.

        `room` is the largest number of rows that this use may ask for, so that one buffer does for all. On a GPU the
        distance of two rows is `aligned`.
        """
        distance = self._distance(columns, like)
        capacity = max(rows, room) * distance
        alike = [index for index, free in enumerate(self._free) if free.dtype == dtype and free.device == like.device]
        fitting = [index for index in alike if self._free[index].numel() >= capacity]
        if fitting:
            buffer = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        else:
            if alike:  # outgrown: the new one takes the place of the largest
                del self._free[max(alike, key=lambda index: self._free[index].numel())]
            buffer = torch.empty(capacity, dtype=dtype, device=like.device)
        return buffer[: rows * distance].view(rows, distance)[:, :columns]

    @staticmethod
    def _distance(columns: int, like: Tensor) -> int:
        return aligned(columns) if like.is_cuda else columns

    def give(self, tensor: Tensor | None) -> None:
        """Take back what `take` handed out, once nobody reads it any more."""
        if tensor is not None and tensor.device.type == "cpu":
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._free.append(tensor.as_strided((elements,), (1,), 0))

    @property
    def free(self) -> list[Tensor]:
        """What nobody uses now."""
        return list(self._free)

    def clear(self) -> None:
        """Let go of the memory that is free now."""
        self._free.clear()
