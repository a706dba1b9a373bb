"""Cuts every sequence of a batch over the processes that share it (context parallelism).

A causal token attends to all before it, so equal pieces in order are unequal work. Each sequence is cut into chunks,
and each process gets equally many, with about equal work: of one long document the first and the last, and so on
inwards; of packed documents, whose work is uneven in another way, eight smaller ones. A gather of keys allows any
order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from evenpipe.attention.sight import Sight, documents_of
from evenpipe.parallel.context_ranks import ContextRanks
from evenpipe.runtime.batch import Batch, Microbatch

OF_ONE_DOCUMENT, OF_SEVERAL = 2, 8
"""Chunks of each process."""


def in_pieces(batch: Batch, ranks: ContextRanks, torch_device: torch.device) -> Batch:
    """Return this process's piece of a batch; its sizes stay those of the whole. The number of tokens of a sequence
    must be a multiple of two chunks for each process."""
    pieces = (_piece(microbatch, ranks, torch_device) for microbatch in batch.microbatches)
    return replace(batch, microbatches=tuple(pieces))


def _piece(microbatch: Microbatch, ranks: ContextRanks, torch_device: torch.device) -> Microbatch:
    rows, length = microbatch.token_ids.shape
    positions, mask = microbatch.position_ids, microbatch.attention_mask
    documents = None if positions is None or mask is not None else documents_of(positions)
    places = places_of_ranks(length, ranks.size, None if documents is None else positions)
    own = places[ranks.rank]
    here = own.to(torch_device)
    sight = Sight(
        queries=here,
        keys=torch.cat(places).to(torch_device),
        exchange=ranks,
        length=length,
        positions=positions,
        documents=documents,
        valid=None if mask is None else mask.bool(),
    )
    return Microbatch(
        token_ids=microbatch.token_ids[:, own],
        targets=microbatch.targets.view(rows, length)[:, own].flatten(),
        weights=microbatch.weights.view(rows, length)[:, here].flatten(),
        position_ids=here.expand(rows, -1) if positions is None else positions[:, here],
        attention_mask=None if mask is None else mask[:, here],
        sight=sight,
    )


def places_of_ranks(length: int, ranks: int, positions: Tensor | None) -> list[Tensor]:
    """Return the places of each rank's tokens, [length / ranks] each.

    positions: of packed rows [rows, length], which restart with each document; None: each row is one document.
    """
    chunks = OF_ONE_DOCUMENT * ranks
    if positions is not None and length % (OF_SEVERAL * ranks) == 0:
        chunks = OF_SEVERAL * ranks
    work = torch.arange(length, dtype=torch.float64) if positions is None else positions.sum(0).double().cpu()
    work = (work + 1).view(chunks, -1).sum(1)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for chunk in work.argsort(descending=True, stable=True).tolist():
        free = [rank for rank in range(ranks) if len(owned[rank]) < chunks // ranks]
        rank = min(free, key=lambda rank: (loads[rank], rank))
        owned[rank].append(chunk)
        loads[rank] += float(work[chunk])
    every = torch.arange(length).view(chunks, -1)
    return [every[sorted(own)].flatten() for own in owned]
