"""Cuts every sequence of a batch: into slices, and each of these over the processes that share it.

slices      one after the other, of equal work: a token has more to look at, the later it stands
processes   (context parallelism) equally many tokens of about equal work. Each slice is cut into chunks: of one
            long document a process gets the first and the last, and so on inwards; of packed documents, whose work
            is uneven in another way, eight smaller ones. A gather of keys allows any order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from evenpipe.attention.carry import Carries
from evenpipe.attention.sight import Alone, Exchange, Sight, documents_of
from evenpipe.model import Description, RowWork, slice_ends
from evenpipe.model.context_exchange import choose
from evenpipe.parallel.context_ranks import ContextRanks, HeadRanks
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.tensor_ranks import TensorRanks
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.inputs import Divisor
from evenpipe.runtime.walker import Meeting
from evenpipe.tensor.layers import ModelCut

logger = logging.getLogger(__name__)

OF_ONE_DOCUMENT, OF_SEVERAL = 2, 8
"""Chunks of each process."""


class Cutter:
    """Cuts batches for one process."""

    def __init__(self, rows: RowWork, slices: int, divisor: int, context: ContextRanks | HeadRanks | None) -> None:
        """
        Args:
            rows: by whose work slices are cut.
            divisor: of which every slice has some tokens.
            context: the processes that share every sequence; None for one.
        """
        self._rows, self._slices, self._divisor = rows, slices, divisor
        self.context = context
        self.ends: dict[int, Sequence[int]] = {}
        """By length of a sequence, the number of tokens up to the end of each slice."""

    def ends_of(self, length: int) -> Sequence[int]:
        """Return the number of tokens up to the end of each slice of a sequence."""
        if length not in self.ends:
            self.ends[length] = slice_ends(self._rows, length, self._slices, self._divisor)
        return self.ends[length]

    def pieces(self, batch: Batch) -> Batch:
        """Return this process's pieces of a batch, slice by slice; its sizes stay those of the whole."""
        ends = self.ends_of(batch.sequence_length)
        pieces = [piece for microbatch in batch.microbatches for piece in self._cut(microbatch, ends)]
        return replace(batch, microbatches=tuple(pieces))

    def _cut(self, microbatch: Microbatch, ends: Sequence[int]) -> Iterator[Microbatch]:
        rows, length = microbatch.token_ids.shape
        positions, mask = microbatch.position_ids, microbatch.attention_mask
        documents = None if positions is None or mask is not None else documents_of(positions)
        packed = None if documents is None else positions
        ranks, rank = (1, 0) if self.context is None else (self.context.size, self.context.rank)
        exchange: Exchange = self.context if isinstance(self.context, ContextRanks) else Alone()
        heads = self.context if isinstance(self.context, HeadRanks) else None
        carries = None if len(ends) == 1 else Carries(ends)
        known: list[Tensor] = []
        for index, (start, end) in enumerate(pairwise((0, *ends))):
            places = places_of_ranks(start, end, ranks, packed)
            known += places
            own = places[rank]
            here = own.to(microbatch.weights.device)
            sight = Sight(
                queries=here if heads is None else torch.cat(places).to(here.device),
                keys=torch.cat(known).to(here.device),
                exchange=exchange,
                length=length,
                positions=positions,
                documents=documents,
                valid=None if mask is None else mask.bool(),
                heads=heads,
            )
            yield Microbatch(
                token_ids=microbatch.token_ids[:, own],
                targets=microbatch.targets.view(rows, length)[:, own].flatten(),
                weights=microbatch.weights.view(rows, length)[:, here].flatten(),
                position_ids=here.expand(rows, -1) if positions is None else positions[:, here],
                attention_mask=None if mask is None else mask[:, here],
                sight=sight,
                carries=carries,
                slice=index,
            )


def make_cutter(
    description: Description, model: ModelCosts, slices: int, recipe: Recipe, groups: Groups
) -> tuple[Cutter | None, str | None]:
    """Return the cutter of a recipe, None for whole sequences; and what context ranks exchange and why, for a status
    line, None without any."""
    sizes, context, said = recipe.parallelism, None, None
    if groups.context is not None:
        how = choose(description, sizes.context_exchange, ranks=sizes.cp, tensor_ranks=sizes.tp, slices=slices)
        context = (HeadRanks if how.exchange == "heads" else ContextRanks)(groups.context)
        said = f"{how.exchange}: {how.reason}"
        if groups.everyone is not None and groups.everyone.position == 0:
            logger.info("context ranks exchange %s", said)
    elif slices == 1:
        return None, None
    return Cutter(model.rows_for(recipe), slices, Divisor.of(sizes, slices).number, context), said


def meetings(tensor: tuple[ModelCut, TensorRanks] | None, cutter: Cutter | None) -> list[Meeting]:
    """Return the exchanges of the processes that share a pass: of tensor ranks and of context ranks."""
    found = (None if tensor is None else tensor[1], None if cutter is None else cutter.context)
    return [one for one in found if one is not None]


def places_of_ranks(start: int, end: int, ranks: int, positions: Tensor | None) -> list[Tensor]:
    """Return the places of each rank's tokens of a slice, equally many.

    positions: of packed rows [rows, length], which restart with each document; None: each row is one document.
    """
    places = torch.arange(start, end)
    if ranks == 1:
        return [places]
    chunks = OF_ONE_DOCUMENT * ranks
    if positions is not None and len(places) % (OF_SEVERAL * ranks) == 0:
        chunks = OF_SEVERAL * ranks
    work = places.double() if positions is None else positions[:, start:end].sum(0).double().cpu()
    work = (work + 1).view(chunks, -1).sum(1)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for chunk in work.argsort(descending=True, stable=True).tolist():
        free = [rank for rank in range(ranks) if len(owned[rank]) < chunks // ranks]
        rank = min(free, key=lambda rank: (loads[rank], rank))
        owned[rank].append(chunk)
        loads[rank] += float(work[chunk])
    return [places.view(chunks, -1)[sorted(own)].flatten() for own in owned]
