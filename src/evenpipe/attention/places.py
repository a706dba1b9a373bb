"""Assigns the tokens of a slice to the processes that share it."""

from __future__ import annotations

import torch
from torch import Tensor

OF_ONE_DOCUMENT, OF_SEVERAL = 2, 8
"""Chunks per process, for rows of one document or of several."""


def places_of_ranks(start: int, end: int, ranks: int, positions: Tensor | None) -> list[Tensor]:
    """Return the positions in the row of each rank's tokens of a slice; every rank has the same number.

    positions: position ids of packed rows [rows, length], which restart with each document; None: one document per row.
    """
    indices = torch.arange(start, end)
    if ranks == 1:
        return [indices]
    chunks = OF_ONE_DOCUMENT * ranks
    if positions is not None and len(indices) % (OF_SEVERAL * ranks) == 0:
        chunks = OF_SEVERAL * ranks
    work = indices.double() if positions is None else positions[:, start:end].sum(0).double().cpu()
    work = (work + 1).view(chunks, -1).sum(1)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for chunk in work.argsort(descending=True, stable=True).tolist():
        free = [rank for rank in range(ranks) if len(owned[rank]) < chunks // ranks]
        rank = min(free, key=lambda rank: (loads[rank], rank))
        owned[rank].append(chunk)
        loads[rank] += float(work[chunk])
    return [indices.view(chunks, -1)[sorted(chunk_indices)].flatten() for chunk_indices in owned]
