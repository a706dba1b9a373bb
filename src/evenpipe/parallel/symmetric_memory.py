"""torch's fused operations between tensor ranks: kernels that read rows of other GPUs while computing products.

`torch.ops.symm_mem` (CUDA only; torch calls its module private). Not run on a GPU yet: tests run the same semantics on
gloo, with torch's own fallbacks.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenpipe.parallel.tensor_ranks import TensorRanks


class Fused:
    """An `Overlap` of `tensor.exchange` by torch."""

    adds_biases = False  # only the first rank has a bias, and adds it before the sum

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._gather, self._scatter = fused_operations()
        group = ranks.communicator.group
        assert group is not None
        self._group_name = group.group_name

    def gather_products(
        self, rows: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return all rows [n, in], gathered from [n/t, in], and their products [n, out] with [in, out], plus biases."""
        gathered, products = self._gather(rows, list(matrices), 0, self._group_name)
        self._ranks.started("rows")
        for product, bias in zip(products, biases, strict=True):
            if bias is not None:
                product.add_(bias)
        return gathered, products

    def sum_products(
        self, pairs: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        """Return this rank's rows [n/t, out] of the sum over ranks of products and `addend`. Only a single product
        without `addend` is fused with its sum."""
        assert bias is None
        (rows, matrix), *remaining = pairs
        if not remaining and addend is None:
            summed: Tensor = self._scatter(rows, matrix, "sum", 0, self._group_name)
            self._ranks.started("sum")
            return summed
        total = rows @ matrix
        for rows, matrix in remaining:
            total += rows @ matrix
        return self._ranks.scatter(total if addend is None else total.add_(addend))


def fused_operations() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`. Raises AttributeError or ImportError in a
    torch without them."""
    import torch.distributed._symmetric_memory  # defines them

    return torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter


def obstacle_to_fused(ranks: TensorRanks, torch_device: torch.device) -> str | None:
    """Return why the fused operations cannot run, or None if they can; the same on all ranks. Collective over them."""
    communicator = ranks.communicator
    if torch_device.type != "cuda":
        return "torch's fused operations need GPUs"
    if communicator.staging is not None:
        return "processes share a GPU"
    if communicator.members != tuple(sorted(communicator.members)):
        return "the mesh numbers tensor ranks in another order than torch"
    try:
        fused_operations()
    except (AttributeError, ImportError):
        return "this torch has no fused operations on symmetric memory"
    index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
    host = zlib.crc32(socket.gethostname().encode())
    table = ranks.table(torch.tensor([host, index], device=torch_device)).tolist()
    if len({host for host, _ in table}) > 1:
        return "the tensor ranks of a device are on several machines"
    reached = all(torch.cuda.can_device_access_peer(index, peer) for _, peer in table if peer != index)
    if not ranks.table(torch.tensor([reached], device=torch_device)).all():
        return "some GPUs of a device cannot read each other's memory"
    return None
