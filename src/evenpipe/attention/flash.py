"""Attention on pieces and separate documents with torch's FlashAttention kernel on NVIDIA GPUs, without masks.

The kernel takes a packed batch of sequences of any lengths. If a sequence has more keys than queries, its causal mask
is aligned at the end (bottom-right): the last query sees all keys. So each block of queries becomes such a sequence,
with the keys that it sees: first all keys before the block, then the keys of the block.

Blocks of a slice, or of documents, share no keys and are computed in one call. Chunks of a document on a context rank
do share keys, whose gradients would be written twice, so each chunk is computed in a separate call (a `Round`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from evenpipe.attention.blocks import causal_blocks
from evenpipe.vocabulary.copies import to_device

LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Largest head size of the kernel, and the number that head sizes must be a multiple of."""
DTYPES = (torch.bfloat16, torch.float16)
OLDEST_GPU = (8, 0)
"""Oldest supported compute capability: Ampere."""
FEW = 2
"""Largest number of rounds whose gradients are added in their own dtype."""


class Index(NamedTuple):
    """Indices of tokens in a tensor [batch, heads, tokens, size]."""

    rows: Tensor
    """[n] int64"""
    tokens: Tensor
    """[n] int64"""


class Round(NamedTuple):
    """A call of the kernel: blocks of queries and the keys that they see, each key at most once."""

    queries: Index | None
    """None: all tokens in order."""
    keys: Index | None
    query_ends: Tensor
    """[blocks + 1] int32: 0, then the number of queries up to the end of each block."""
    key_ends: Tensor
    """The same for keys."""
    most_queries: int
    """Most queries of a block, and at least 2: the kernel has a special case for single queries, without backward."""
    most_keys: int
    total_keys: int
    causal: bool
    """Whether the last keys of a block belong to its queries; otherwise every query sees all keys."""


@dataclass
class _Collected:
    """The blocks of a round, while rounds are formed."""

    causal: bool
    reached: dict[int, int] = field(default_factory=dict)
    """By row, the end of the last keys in this round."""
    queries: list[tuple[int, slice]] = field(default_factory=list)
    """For each block, its row and its queries, sorted by position."""
    keys: list[list[tuple[int, slice]]] = field(default_factory=list)
    """The same for each range of keys of each block."""


def rounds_of(
    queries: Tensor,
    keys: Tensor,
    documents: Tensor | None,
    valid: Tensor | None,
    *,
    batch: int,
    torch_device: torch.device,
) -> list[Round]:
    """Return the calls that compute causal attention.

    Args:
        queries, keys, documents, valid: as for `causal_blocks`, on the host.
    """
    of_queries, of_keys = queries.argsort(), keys.argsort()  # so that blocks are as long as possible
    collected: list[_Collected] = []
    for block in causal_blocks(queries[of_queries], keys[of_keys], documents, valid):
        if not block.key_ranges:
            continue
        first, last = block.key_ranges[0], block.key_ranges[-1]
        for row in range(*block.sequences.indices(batch)):
            causal = last.how == "diagonal"
            fitting = (
                candidate
                for candidate in collected
                if candidate.causal == causal and candidate.reached.get(row, 0) <= first.keys.start
            )
            target = next(fitting, None)
            if target is None:
                collected.append(target := _Collected(causal))
            target.reached[row] = last.keys.stop
            target.queries.append((row, block.queries))
            target.keys.append([(row, key_range.keys) for key_range in block.key_ranges])
    rounds = [_round(blocks, of_queries, of_keys, batch, torch_device) for blocks in collected]
    # The gradients of the first round need no addition: best if it has the most keys.
    return sorted(rounds, key=lambda call: call.total_keys, reverse=True)


def _round(collected: _Collected, of_queries: Tensor, of_keys: Tensor, batch: int, torch_device: torch.device) -> Round:
    query_lengths = [span.stop - span.start for _, span in collected.queries]
    key_lengths = [sum(span.stop - span.start for _, span in ranges) for ranges in collected.keys]
    return Round(
        queries=_index(collected.queries, of_queries, batch, torch_device),
        keys=_index([key_span for ranges in collected.keys for key_span in ranges], of_keys, batch, torch_device),
        query_ends=to_device(_ends(query_lengths), torch_device),
        key_ends=to_device(_ends(key_lengths), torch_device),
        most_queries=max(2, *query_lengths),
        most_keys=max(key_lengths),
        total_keys=sum(key_lengths),
        causal=collected.causal,
    )


def _index(ranges: Sequence[tuple[int, slice]], order: Tensor, batch: int, torch_device: torch.device) -> Index | None:
    rows = torch.cat([torch.full((span.stop - span.start,), row) for row, span in ranges])
    tokens = torch.cat([order[span] for _, span in ranges])
    if torch.equal(rows * len(order) + tokens, torch.arange(batch * len(order))):
        return None
    return Index(to_device(rows, torch_device), to_device(tokens, torch_device))


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def fits(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these dtypes and sizes on the GPU of the tensors."""
    size = query.shape[-1]
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < OLDEST_GPU:
        return False
    return query.dtype in DTYPES and value.shape[-1] <= size <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0


class Rounds(NamedTuple):
    """The calls that compute attention for all queries of a pass."""

    rounds: Sequence[Round]
    window: int | None
    """Most keys that a query sees, including itself; None: no limit."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the result of attention [batch, heads, tokens, size of values], and the log-sum-exp of each round.

        Args:
            query: [batch, heads, tokens, size].
            keys, values: [batch, heads of keys, keys, size]; values may have a smaller size.
            scale: factor of the products of queries and keys; None: 1 / sqrt(size).
        """
        batch, heads, tokens, _ = query.shape
        size, values = values.shape[-1], padded(values, query)
        is_single = len(self.rounds) == 1 and self.rounds[0].queries is None
        result = None if is_single else query.new_zeros((batch, tokens, heads, size)).transpose(1, 2)
        sums = []
        for call in self.rounds:
            output, of_round = torch.ops.aten._flash_attention_forward(
                *(_taken(query, call.queries), _taken(keys, call.keys), _taken(values, call.keys)),
                *(call.query_ends, call.key_ends, call.most_queries, call.most_keys),
                *(0.0, call.causal and self.window is None, False),
                scale=scale,
                **self._options,
            )[:2]
            sums.append(of_round)
            if result is None:
                return _whole(output, batch)[..., :size], sums
            _write(result, call.queries, output[..., :size], batch)
        assert result is not None
        return result, sums

    def gradients(
        self,
        gradient: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        result: Tensor,
        sums: Sequence[Tensor],
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, given that of `result`. Those of keys and values are fp32
        if there are more than `FEW` rounds.

        Args:
            query, keys, values, scale: as for `attend`.
            result, sums: returned by `attend`.
        """
        batch, size = len(query), values.shape[-1]
        gradient, values, result = (padded(tensor, query) for tensor in (gradient, values, result))
        dtype = query.dtype if len(self.rounds) <= FEW else torch.promote_types(query.dtype, torch.float32)
        seed = query.new_zeros(2, dtype=torch.uint64)  # for dropout, which is not used
        totals: Sequence[Tensor] = ()
        for call, of_round in zip(self.rounds, sums, strict=True):
            gradients = torch.ops.aten._flash_attention_backward(
                *(_taken(gradient, call.queries), _taken(query, call.queries)),
                *(_taken(keys, call.keys), _taken(values, call.keys)),
                *(_taken(result, call.queries), of_round),
                *(call.query_ends, call.key_ends, call.most_queries, call.most_keys),
                *(0.0, call.causal and self.window is None, seed, query.new_empty(0)),
                scale=scale,
                **self._options,
            )
            if len(self.rounds) == 1 and call.queries is None and call.keys is None:
                of_query, of_keys, of_values = (_whole(tensor, batch) for tensor in gradients)
                return of_query, of_keys, of_values[..., :size]
            is_first = not totals
            if is_first:  # not earlier: by now the copies of keys and values are freed
                totals = torch.zeros_like(query), *(torch.zeros_like(like, dtype=dtype) for like in (keys, values))
            _write(totals[0], call.queries, gradients[0], batch)
            for total, tensor in zip(totals[1:], gradients[1:], strict=True):
                (_write if is_first else _add)(total, call.keys, tensor, batch)
            del gradients, tensor
        of_query, of_keys, of_values = totals or (torch.zeros_like(like) for like in (query, keys, values))
        return of_query, of_keys, of_values[..., :size]

    @property
    def _options(self) -> dict[str, int]:
        return {} if self.window is None else {"window_size_left": self.window - 1, "window_size_right": 0}


def _taken(tensor: Tensor, index: Index | None) -> Tensor:
    """Return tokens [tokens, heads, size] of a tensor [batch, heads, tokens, size]."""
    return tensor.transpose(1, 2).flatten(0, 1) if index is None else tensor[index.rows, :, index.tokens]


def _write(tensor: Tensor, index: Index | None, values: Tensor, batch: int) -> None:
    if index is None:
        tensor.copy_(_whole(values, batch))
    else:
        tensor[index.rows, :, index.tokens] = values


def _add(tensor: Tensor, index: Index | None, values: Tensor, batch: int) -> None:
    """Add to tokens, each of which occurs once in `index`."""
    if index is None:
        tensor += _whole(values, batch)
    else:
        tensor[index.rows, :, index.tokens] += values


def _whole(tensor: Tensor, batch: int) -> Tensor:
    """Return [batch, heads, tokens, size] of all tokens in order."""
    return tensor.unflatten(0, (batch, -1)).transpose(1, 2)


def padded(rows: Tensor, query: Tensor) -> Tensor:
    """Return rows padded to the size of queries: the kernel supports a single size."""
    padding = query.shape[-1] - rows.shape[-1]
    return functional.pad(rows, (0, padding)) if padding else rows
