"""What the queries of a pass may attend to, if a pass has only a piece of every sequence, or documents of a sequence do
not see each other.

transformers makes a mask from a predicate on the positions of a query and a key and passes it to all attention layers.
Our mask function (`function.mask`) returns a `Mask` instead of a tensor: it keeps the predicate and evaluates it on the
positions in the whole row, whatever the order of a process's tokens. An `Exchange` gives the attention the keys and
values of other pieces.

    stage.forward in `activated(row_context)` -> the family's own mask functions -> Mask -> every attention layer
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from evenpipe.attention.blocks import Block, KeyRange, causal_blocks
from evenpipe.attention.flash import Rounds, rounds_of
from evenpipe.errors import InputError
from evenpipe.model.packed_rows import packed_as

Keys = tuple[Tensor, Tensor]
"""Keys and values, [batch, heads of keys and values, tokens, size]; or their gradients."""


class Exchange(Protocol):
    """Brings keys and values of other pieces to a layer, and takes their gradients back."""

    keeps_keys: bool
    """Whether `keys_again` needs the local keys and values: the attention then saves them."""

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        """Return all keys and values that a layer's queries may attend to, given the local ones."""
        ...

    def keys_again(self, layer: int, *local: Tensor) -> Keys:
        """Return the same in the backward. local: keys and values, if `keeps_keys`."""
        ...

    def gradients(self, layer: int, key: Tensor, value: Tensor, dtype: torch.dtype) -> Keys:
        """Return the gradients of the local keys and values, in `dtype`, given those of all keys and values."""
        ...


class HeadExchange(Protocol):
    """Exchanges heads for tokens: each rank computes some heads, for all tokens."""

    size: int
    rank: int

    def exchange(self, tensor: Tensor, *, cut: int, join: int) -> Tensor:
        """Return [..., dimension `cut` / ranks, ..., dimension `join` x ranks, ...]: the rank's part of what is cut,
        concatenated from all ranks."""
        ...


class Alone:
    """An `Exchange` of a process that has all keys: nothing is exchanged."""

    keeps_keys = True

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        return key, value

    def keys_again(self, layer: int, *local: Tensor) -> Keys:
        key, value = local
        return key, value

    def gradients(self, layer: int, key: Tensor, value: Tensor, dtype: torch.dtype) -> Keys:
        return key.to(dtype), value.to(dtype)


class OnHost(NamedTuple):
    """Copies of the fields of a `RowContext` on the host, to make blocks of queries without waiting for a GPU."""

    queries: Tensor
    keys: Tensor
    documents: Tensor | None
    valid: Tensor | None


@dataclass(eq=False)
class RowContext:
    """What a pass knows about the whole rows of its microbatch."""

    queries: Tensor
    """[q]: positions of the pass's tokens in the row."""
    keys: Tensor
    """[k]: positions in the row of the keys that `exchange.keys` returns, in that order."""
    exchange: Exchange
    length: int
    """Tokens of a row."""
    positions: Tensor | None = None
    """[batch, row]: position ids; None: equal to the positions in the row."""
    documents: Tensor | None = None
    """[batch, row]: index of each token's document; None: one document per row."""
    valid: Tensor | None = None
    """[batch, row]: false for padding; None: no padding."""
    heads: HeadExchange | None = None
    """If given, heads are exchanged for tokens: `queries` and the attention's queries are those of all ranks."""
    separate: bool = False
    """Whether documents do not see each other, even if the family does not detect documents."""
    looks_for_documents: bool = False
    """Whether the family has checked for packed rows since the last mask was made."""
    on_host: OnHost | None = None
    """None: the tensors above are on the host."""
    kernels_of: str | None = None
    """Device type whose kernels compute attention, for a stage traced on another device; None: that of the queries."""

    def mask(self, predicate: Predicate, batch: int, *, separate: bool) -> Mask:
        """Return the mask that is passed to a model's attention layers."""
        return Mask(self, predicate, batch, separate=separate)

    def last_positions(self, batch: int, torch_device: torch.device) -> Tensor:
        """Return [batch, 1]: the highest position id of each row."""
        if self.positions is None:
            return torch.full((batch, 1), self.length - 1, device=torch_device)
        return self.positions.amax(-1, keepdim=True).expand(batch, -1)

    def _look(self, position_ids: Tensor) -> None:
        self.looks_for_documents = True


def documents_of(position_ids: Tensor) -> Tensor | None:
    """Return the index of each token's document [batch, row], determined as in transformers: a document begins where
    position ids do not increase by 1. None: every row is one document."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    documents = (steps != 1).cumsum(-1)
    return documents if bool(documents[:, -1].any()) else None


_current: ContextVar[RowContext | None] = ContextVar("what the pass under way may look at", default=None)


def current() -> RowContext | None:
    """Return the `RowContext` of the current pass; None outside `activated`."""
    return _current.get()


@contextmanager
def activated(row_context: RowContext) -> Iterator[None]:
    """Run a stage's forward inside for a piece of its rows."""
    token = _current.set(row_context)
    try:
        with packed_as(row_context._look):
            yield
    finally:
        _current.reset(token)


ROWS = 1024
"""Number of queries whose mask is computed at once."""
BLOCK = 128
"""Size of a block of FlexAttention, in queries and in keys. Divides `ROWS`."""

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From transformers: whether a query sees a key, given batch, head, query position and key position (broadcast)."""

_OF_A_WINDOW, _OVERLAY = sliding_window_causal_mask_function(1), sliding_window_overlay(1)


class Mask:
    """The object that transformers passes to the attention as its mask. It is not a tensor, so a family that computes
    with masks fails immediately instead of computing something else."""

    def __init__(self, row_context: RowContext, predicate: Predicate, batch: int, *, separate: bool) -> None:
        """separate: documents of a row do not see each other, and the predicate is applied to position ids."""
        self.row_context, self._predicate, self._batch, self._separate = row_context, predicate, batch, separate

    def tensor(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Return booleans [batch or 1, heads or 1, queries, keys]: whether a query sees a key.

        Raises:
            InputError: the predicate depends on the tokens of a call, not on positions in the row.
        """
        try:
            return self._seen(queries, keys)
        except IndexError as error:
            raise InputError(
                "its masks look tokens up in a table that it makes of the tokens of a call, a piece."
            ) from error

    def _seen(self, queries: slice, keys: slice) -> Tensor:
        row_context = self.row_context
        query_indices, key_indices = (
            torch.arange(*span.indices(len(tokens)), device=tokens.device)
            for tokens, span in ((row_context.queries, queries), (row_context.keys, keys))
        )
        batch = torch.arange(self._batch, device=query_indices.device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=query_indices.device)
        seen = self._sees(batch, head, query_indices[None, None, :, None], key_indices[None, None, None, :])
        return seen.expand(-1, -1, len(query_indices), len(key_indices))

    @property
    def is_causal(self) -> bool:
        """Whether each query sees all of its document up to itself, by position."""
        return self._predicate is causal_mask_function

    @property
    def window(self) -> int | None:
        """Most keys that a query sees, including itself, if the mask is causal with a sliding window; else None."""
        if getattr(self._predicate, "__code__", None) is not _OF_A_WINDOW.__code__:
            return None
        overlay, *remaining = inspect.getclosurevars(self._predicate).nonlocals["mask_functions"]
        if remaining != [causal_mask_function] or getattr(overlay, "__code__", None) is not _OVERLAY.__code__:
            return None
        return int(inspect.getclosurevars(overlay).nonlocals["sliding_window"])

    @cached_property
    def blocks(self) -> list[Block]:
        """The queries in blocks, with the keys that they attend to."""
        return causal_blocks(*self._places) if self.is_causal else list(self._cut())

    @cached_property
    def rounds(self) -> Rounds | None:
        """The calls of the GPU kernel for all queries; None: the kernel takes no masks and cannot compute this one."""
        row_context = self.row_context
        if not self.is_causal and (self.window is None or row_context.valid is not None):
            return None
        rounds = rounds_of(*self._places, batch=self._batch, torch_device=row_context.queries.device)
        return Rounds(rounds, self.window)

    @property
    def _places(self) -> OnHost:
        """The fields from which the blocks of a causal mask are made."""
        row_context = self.row_context
        fields = row_context.on_host or OnHost(
            row_context.queries, row_context.keys, row_context.documents, row_context.valid
        )
        # Position ids increase by 1 within documents, as positions do.
        return fields if self._separate else fields._replace(documents=None)

    @cached_property
    def block_mask(self) -> BlockMask:
        """The mask for FlexAttention: which blocks of queries see which blocks of keys, and the predicate.

        Raises InputError like `tensor`.
        """
        queries, keys = len(self.row_context.queries), len(self.row_context.keys)
        partial_blocks, full_blocks = [], []
        for start in range(0, queries, ROWS):
            seen = self.tensor(slice(start, min(start + ROWS, queries)))
            padded = functional.pad(seen, (0, -keys % BLOCK, 0, -seen.shape[2] % BLOCK))
            by_block = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5))
            partial_blocks.append((by_block > 0) & (by_block < BLOCK**2))
            full_blocks.append(by_block == BLOCK**2)
        return BlockMask.from_kv_blocks(
            *_listed(torch.cat(partial_blocks, 2)),
            *_listed(torch.cat(full_blocks, 2)),
            BLOCK_SIZE=BLOCK,
            mask_mod=self._sees,
            seq_lengths=(queries, keys),
        )

    def _sees(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query sees a key, both given by their indices in the call."""
        row_context = self.row_context
        query_position, key_position = row_context.queries[query], row_context.keys[key]
        if self._separate:
            assert row_context.documents is not None
            ids = (query_position, key_position)
            if row_context.positions is not None:
                ids = row_context.positions[batch, query_position], row_context.positions[batch, key_position]
            seen = self._predicate(batch, head, *ids)
            seen = seen & (row_context.documents[batch, query_position] == row_context.documents[batch, key_position])
        else:
            seen = self._predicate(batch, head, query_position, key_position)
        return seen if row_context.valid is None else seen & row_context.valid[batch, key_position]

    def _cut(self) -> Iterator[Block]:
        """Yield blocks determined by evaluating the predicate for every pair of query and key."""
        for start in range(0, len(self.row_context.queries), ROWS):
            queries = slice(start, min(start + ROWS, len(self.row_context.queries)))
            seen = self.tensor(queries)
            anyone = seen.flatten(0, 2).any(0).nonzero()
            keys = slice(int(anyone[0]), int(anyone[-1]) + 1) if len(anyone) else slice(0, 1)
            yield Block(slice(None), queries, (KeyRange(keys, "all" if bool(seen[..., keys].all()) else "some"),))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and the indices of all blocks of keys, those first.

    blocks: booleans [batch or 1, heads or 1, blocks of queries, blocks of keys].
    """
    numbers = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), numbers.to(torch.int32)
