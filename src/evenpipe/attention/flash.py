"""Attention on pieces and on separate documents by torch's FlashAttention kernel on NVIDIA GPUs, without masks.

The kernel takes a packed batch of sequences of any lengths. If a sequence has more keys than queries, its causal mask
is aligned at the end (bottom-right): the last query sees all keys. So a block of queries becomes such a sequence, whose
keys are those that it sees: first all that lie before the block, then those of the block itself.

Blocks of a slice, or of documents, share no keys and go into one call. Chunks of one document on a context rank do
share keys, whose gradients would be written twice: every chunk goes into a call of its own (a `Round`).
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
"""Sizes of heads that the kernel takes."""
DTYPES = (torch.bfloat16, torch.float16)
OLDEST_GPU = (8, 0)
"""Compute capability: Ampere."""
FEW = 2
"""Rounds whose gradients are added in their own dtype."""


class Index(NamedTuple):
    """Tokens of a tensor [batch, heads, tokens, size]."""

    rows: Tensor
    """[n] int64"""
    tokens: Tensor
    """[n] int64"""


class Round(NamedTuple):
    """One call of the kernel: blocks of queries, and the keys that they see, no key twice."""

    queries: Index | None
    """None: all tokens in their order."""
    keys: Index | None
    query_ends: Tensor
    """[blocks + 1] int32: 0, and the number of queries up to the end of each block."""
    key_ends: Tensor
    """The same of keys."""
    most_queries: int
    """Of a block, and at least 2: the kernel treats single queries in a way of its own, which has no backward."""
    most_keys: int
    total_keys: int
    causal: bool
    """Whether the last keys of a block are those of its own queries; otherwise every query sees all keys."""


@dataclass
class _Collected:
    """Blocks of a round."""

    causal: bool
    reached: dict[int, int] = field(default_factory=dict)
    """By row, the end of its last keys."""
    queries: list[tuple[int, slice]] = field(default_factory=list)
    """Of each block its row, and its queries in the order of their places."""
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
        queries, keys, documents, valid: as of `causal_blocks`, on the host.
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
    # The first one needs no sum of gradients: best if it has most keys.
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
    """Return whether the kernel takes tensors of these dtypes and sizes, on the GPU that they are on."""
    size = query.shape[-1]
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < OLDEST_GPU:
        return False
    return query.dtype in DTYPES and value.shape[-1] <= size <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0


class Rounds(NamedTuple):
    """The calls that compute all queries of a pass."""

    rounds: Sequence[Round]
    window: int | None
    """Keys that a query sees at most, itself included; None: no limit."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return what queries attend to, [batch, heads, tokens, size of values], and the logarithms of the sums of
        exponentials of each round.

        Args:
            query: [batch, heads, tokens, size].
            keys, values: [batch, heads of keys, keys, size]; values may have a smaller size.
            scale: of products of queries and keys; None: one over the root of their size.
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
        if more than `FEW` rounds add to them.

        Args:
            query, keys, values, scale: as of `attend`.
            result, sums: what it returned.
        """
        batch, size = len(query), values.shape[-1]
        gradient, values, result = (padded(tensor, query) for tensor in (gradient, values, result))
        dtype = query.dtype if len(self.rounds) <= FEW else torch.promote_types(query.dtype, torch.float32)
        seed = query.new_zeros(2, dtype=torch.uint64)  # of the dropout that there is not
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
            if is_first:  # only now: the copies of keys and values are gone
                totals = torch.zeros_like(query), *(torch.zeros_like(each, dtype=dtype) for each in (keys, values))
            _write(totals[0], call.queries, gradients[0], batch)
            for total, tensor in zip(totals[1:], gradients[1:], strict=True):
                (_write if is_first else _add)(total, call.keys, tensor, batch)
            del gradients, tensor
        of_query, of_keys, of_values = totals or (torch.zeros_like(each) for each in (query, keys, values))
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
    """Add to tokens, each of which is there once."""
    if index is None:
        tensor += _whole(values, batch)
    else:
        tensor[index.rows, :, index.tokens] += values


def _whole(tensor: Tensor, batch: int) -> Tensor:
    """Return [batch, heads, tokens, size] of all tokens in their order."""
    return tensor.unflatten(0, (batch, -1)).transpose(1, 2)


def padded(rows: Tensor, query: Tensor) -> Tensor:
    """Return rows as wide as queries: the kernel knows one size."""
    missing = query.shape[-1] - rows.shape[-1]
    return functional.pad(rows, (0, missing)) if missing else rows
