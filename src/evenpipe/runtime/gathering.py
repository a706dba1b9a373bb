"""Whole tensors on the first process, streamed one after the other from the processes that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor, or rows of one, as this process holds it."""

    tensor: Tensor
    start_row: int | None
    """First row, for a shard of rows; None: the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


def stream_whole(
    held: Mapping[str, Held], group: dist.ProcessGroup | None, ranks: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor on the CPU) on the first process, nothing on the others; all of them must exhaust it.

    Collective over the pipeline axis: all processes first agree on who holds what; then, name after name, each holder
    sends its rows to the first process, which holds one whole tensor at a time.
    """
    own = {name: (one.start_row, tuple(one.tensor.shape), one.shape, one.tensor.dtype) for name, one in held.items()}
    if group is None:
        tables = [own]
        rank = ranks[0]
    else:
        tables = [{} for _ in ranks]
        dist.all_gather_object(tables, own, group=group)
        rank = dist.get_rank()
    first = ranks[0]
    names = dict.fromkeys(name for table in tables for name in table)
    for name in names:
        whole: Tensor | None = None
        for holder, table in zip(ranks, tables, strict=True):
            if name not in table:
                continue
            start, local_shape, shape, dtype = table[name]
            if rank == first:
                part = held[name].tensor.detach().cpu() if holder == first else torch.empty(local_shape, dtype=dtype)
                if holder != first and part.numel():
                    dist.recv(part, src=holder, group=group)
                if start is None:
                    whole = part.clone() if holder == first else part
                else:
                    whole = torch.empty(shape, dtype=dtype) if whole is None else whole
                    whole[start : start + local_shape[0]] = part
            elif holder == rank and held[name].tensor.numel():
                dist.send(held[name].tensor.detach().cpu().contiguous(), dst=first, group=group)
        if rank == first:
            assert whole is not None
            yield name, whole
