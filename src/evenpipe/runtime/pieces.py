"""Cuts every sequence of a batch into slices, and each slice over the processes that share it. Also keeps the documents
of a sequence apart, even of an uncut one, if the model's own attention does not.

slices      consecutive, of equal work: the later a token, the more tokens it attends to
processes   (context parallelism) the same number of tokens, of about equal work. Each slice is cut into chunks: of
            one long document, a process gets the first and the last, and so on inwards; of packed documents, whose
            work is uneven in another way, it gets eight smaller ones. A gather of keys allows any order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from evenpipe.attention.carry import Carries
from evenpipe.attention.check import PLAIN, attention_dropout, needs_our_attention
from evenpipe.attention.places import places_of_ranks
from evenpipe.attention.row_context import Alone, Exchange, OnHost, RowContext, documents_of
from evenpipe.errors import InputError
from evenpipe.model import Description, RowWork, slice_ends
from evenpipe.model.context_exchange import choose, heads_divide
from evenpipe.model.flops import attention_of
from evenpipe.parallel.context_ranks import ContextRanks, HeadRanks
from evenpipe.parallel.groups import Groups
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.inputs import Divisor
from evenpipe.vocabulary.copies import to_device
from evenpipe.words import count

logger = logging.getLogger(__name__)


class Cutter:
    """Cuts batches for one process."""

    def __init__(
        self,
        rows: RowWork,
        slices: int,
        divisor: int,
        context: ContextRanks | HeadRanks | None,
        *,
        separate: bool = False,
    ) -> None:
        """
        Args:
            rows: the work of a row, by which slices are cut.
            divisor: the number of tokens of every slice is a multiple of it.
            context: the processes that share every sequence; None for a single one.
            separate: keep the documents of a sequence from attending to each other, whatever the model does.
        """
        self._rows, self._slices, self._divisor, self._separate = rows, slices, divisor, separate
        self.context = context
        self.ends: dict[int, Sequence[int]] = {}
        """For each sequence length, the number of tokens up to the end of each slice."""

    def ends_of(self, length: int) -> Sequence[int]:
        """Return the number of tokens up to the end of each slice of a sequence."""
        if length not in self.ends:
            self.ends[length] = slice_ends(self._rows, length, self._slices, self._divisor)
        return self.ends[length]

    def pieces(self, batch: Batch) -> Batch:
        """Return this process's pieces of a batch, slice by slice, with the sizes of the whole batch."""
        ends = self.ends_of(batch.sequence_length)
        pieces = [cut_microbatch for microbatch in batch.microbatches for cut_microbatch in self._cut(microbatch, ends)]
        return replace(batch, microbatches=tuple(pieces))

    def _cut(self, microbatch: Microbatch, ends: Sequence[int]) -> Iterator[Microbatch]:
        rows, length = microbatch.token_ids.shape
        positions, mask, torch_device = microbatch.position_ids, microbatch.attention_mask, microbatch.weights.device
        host_positions, host_mask = microbatch.on_host
        valid = None if host_mask is None else host_mask.bool()
        documents = None if host_positions is None or host_mask is not None else documents_of(host_positions)
        packed = None if documents is None else host_positions
        device_documents, device_valid = (
            None if tensor is None else to_device(tensor, torch_device) for tensor in (documents, valid)
        )
        ranks, rank = (1, 0) if self.context is None else (self.context.size, self.context.rank)
        exchange: Exchange = self.context if isinstance(self.context, ContextRanks) else Alone()
        heads = self.context if isinstance(self.context, HeadRanks) else None
        carries = None if len(ends) == 1 else Carries(ends)
        key_positions: list[Tensor] = []
        for index, (start, end) in enumerate(pairwise((0, *ends))):
            rank_positions = places_of_ranks(start, end, ranks, packed)
            key_positions += rank_positions
            local_positions = rank_positions[rank]
            device_positions = to_device(local_positions, torch_device)
            on_host = OnHost(
                local_positions if heads is None else torch.cat(rank_positions),
                torch.cat(key_positions),
                documents,
                valid,
            )
            row_context = RowContext(
                queries=device_positions if heads is None else to_device(on_host.queries, torch_device),
                keys=to_device(on_host.keys, torch_device),
                exchange=exchange,
                length=length,
                positions=positions,
                documents=device_documents,
                valid=device_valid,
                heads=heads,
                separate=self._separate,
                on_host=on_host,
            )
            yield Microbatch(
                token_ids=microbatch.token_ids[:, local_positions],
                targets=microbatch.targets.view(rows, length)[:, local_positions].flatten(),
                weights=microbatch.weights.view(rows, length)[:, device_positions].flatten(),
                position_ids=device_positions.expand(rows, -1) if positions is None else positions[:, device_positions],
                attention_mask=None if mask is None else mask[:, device_positions],
                row_context=row_context,
                carries=carries,
                slice=index,
            )


def make_cutter(
    description: Description, model: ModelCosts, slices: int, recipe: Recipe, groups: Groups, *, on_gpu: bool
) -> tuple[Cutter | None, str | None]:
    """Return the cutter of a recipe, and what context ranks exchange and why, for a status line. Collective.

    The cutter is None for uncut sequences, unless evenpipe's attention has to keep documents apart. The text is None
    without context ranks.

    Raises:
        InputError: on every process, if the model or the recipe cannot run on pieces of sequences.
    """
    separate, sizes = recipe.batch.separate, recipe.parallelism
    if slices > 1 or groups.context is not None:
        _refuse_unfit(description, slices, recipe)
    elif not (separate and _needs_our_attention(description, groups, on_gpu=on_gpu)):
        return None, None
    context, status = None, None
    if groups.context is not None:
        choice = choose(description, sizes.context_exchange, ranks=sizes.cp, tensor_ranks=sizes.tp, slices=slices)
        context = (HeadRanks if choice.exchange == "heads" else ContextRanks)(groups.context, groups.running)
        status = f"{choice.exchange}: {choice.reason}"
        if groups.everyone is not None and groups.everyone.position == 0:
            logger.info("context ranks exchange %s", status)
    return Cutter(model.rows_for(recipe), slices, Divisor.of(sizes, slices).number, context, separate=separate), status


def _refuse_unfit(description: Description, slices: int, recipe: Recipe) -> None:
    option = "slices" if slices > 1 else "cp"
    if description.config is None:
        raise InputError(f"{option}: {PLAIN} 1 with them")
    for name, share in attention_dropout(description):
        raise InputError(
            f"{option}: {name} is {share:g} in the model's config; it must be 0: evenpipe's attention drops no weights"
        )
    sizes = recipe.parallelism
    if sizes.context_exchange != "heads":
        return
    for attention in (attention_of(description, index) for index in range(description.layers)):
        if not heads_divide(attention, ranks=sizes.cp, tensor_ranks=sizes.tp):
            of_rank = f", {attention.heads // sizes.tp} on each tensor rank" if sizes.tp > 1 else ""
            raise InputError(
                f"context_exchange: 'heads', but {sizes.cp} context ranks cannot share"
                f" {count(attention.heads, 'head')}{of_rank}; expected 'keys', or a divisor as cp"
            )


def _needs_our_attention(description: Description, groups: Groups, *, on_gpu: bool) -> bool:
    """Return whether evenpipe's attention has to keep the documents of a sequence apart; the first process decides.

    Collective over everyone.

    Raises:
        InputError: on every process, if they cannot be kept apart.
    """
    needed, fault = False, None
    if groups.everyone is None or groups.everyone.position == 0:
        try:
            needed = needs_our_attention(description, on_gpu=on_gpu)
        except InputError as error:
            fault = str(error)
    fault = groups.from_the_first(fault, "the check of separate documents")
    if fault is not None:
        raise InputError(fault)
    return any(flag for (flag,) in groups.numbers([needed]))
