"""Memory that successive microbatches reuse."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 16
"""Elements, 32 bytes of bf16: rows start at multiples of this on a GPU."""


def aligned(columns: int) -> int:
    """Return the elements from one row to the next, for a matrix with this many columns on a GPU.

    Shards of a vocabulary have any number of rows. cuBLAS has fast kernels for operands whose rows start at multiples
    of 16 bytes, and Triton reads and writes whole vectors if the row stride is a multiple of 16 elements.
    """
    return -(-columns // ALIGNED) * ALIGNED


class Buffers:
    """Memory for the large tensors of S and T, passed from one microbatch to the next.

    On a CPU a tensor of this size is new memory from the operating system each time, page by page, which took 5 % of
    the time of S and T; with reuse, there are as many as microbatches in flight. They stay until `clear`. Torch's GPU
    allocator does the same itself, and shares the memory with other uses: there `take` asks the allocator and nothing
    is kept here.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype, *, room: int = 0) -> Tensor:
        """Return [rows, columns] of `dtype` on the device of `like`, with undefined content.

        `room` is the largest number of rows that this use may ask for, so that one buffer suffices. On a GPU the row
        stride is `aligned`.
        """
        distance = self._distance(columns, like)
        capacity = max(rows, room) * distance
        alike = [index for index, free in enumerate(self._free) if free.dtype == dtype and free.device == like.device]
        fitting = [index for index in alike if self._free[index].numel() >= capacity]
        if fitting:
            buffer = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        else:
            if alike:  # outgrown: the new one replaces the largest
                del self._free[max(alike, key=lambda index: self._free[index].numel())]
            buffer = torch.empty(capacity, dtype=dtype, device=like.device)
        return buffer[: rows * distance].view(rows, distance)[:, :columns]

    @staticmethod
    def _distance(columns: int, like: Tensor) -> int:
        return aligned(columns) if like.is_cuda else columns

    def give(self, *tensors: Tensor | None) -> None:
        """Take back buffers from `take` that are no longer read."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type == "cpu":
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self._free.append(tensor.as_strided((elements,), (1,), 0))

    @property
    def free(self) -> list[Tensor]:
        return list(self._free)

    def clear(self) -> None:
        self._free.clear()
