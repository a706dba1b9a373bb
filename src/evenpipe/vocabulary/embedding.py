"""E and G: the input embedding, of which each device holds some rows.

Every device knows the token ids, and so the owner of every row and the sizes of all messages. Rows travel from their
owners to the first stage; their gradients travel back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.vocabulary.copies import to_device
from evenpipe.vocabulary.shards import Shard, outside


@dataclass(frozen=True, slots=True)
class Routes:
    """The owner of the row of each token of a microbatch. Made once per microbatch, by `route`."""

    shards: tuple[Shard, ...]
    token_ids: Tensor
    """[tokens] int64, sorted by owner; tokens of an owner keep their order."""
    order: Tensor | None
    """[tokens] int64: `token_ids[k]` is at position `order[k]` of the microbatch. None: at position k."""
    counts: tuple[int, ...]
    """Number of tokens per shard: the sizes of all messages."""
    trained: tuple[Tensor | None, ...]
    """Per shard, which of its tokens are not the padding token: [.] int64, counted from its first. None: all."""

    @property
    def tokens(self) -> int:
        return self.token_ids.shape[0]

    def span(self, shard: int) -> slice:
        """Return the slice of `token_ids` and `order` with the tokens owned by a shard."""
        start = sum(self.counts[:shard])
        return slice(start, start + self.counts[shard])

    def positions(self, shard: int) -> Tensor:
        """Return the positions in the microbatch, ascending, whose rows a shard owns."""
        span = self.span(shard)
        if self.order is None:
            return torch.arange(span.start, span.stop, device=self.token_ids.device)
        return self.order[span]


@torch.no_grad()
def route(
    token_ids: Tensor,
    shards: Sequence[Shard],
    torch_device: torch.device | str | None = None,
    *,
    padding_index: int | None = None,
) -> Routes:
    """Find the owner of each token's row.

    token_ids: [tokens] int64 (any shape is flattened). Best on the host: the sizes of messages are read from them.
    shards: all shards of the matrix, in the order of their rows.
    torch_device: device of the indices; default that of token_ids.
    padding_index: the token whose row gets no gradient, as in torch.nn.Embedding.
    Raises InputError for a token id outside the vocabulary.
    """
    ids = token_ids.reshape(-1)
    vocabulary = shards[0].vocabulary
    wrong = outside(ids, vocabulary)
    if wrong is not None:
        raise InputError(f"Token id {wrong} is outside the vocabulary, which has the ids 0 to {vocabulary - 1}.")
    device = ids.device if torch_device is None else torch.device(torch_device)
    order: Tensor | None = None
    counts = [ids.numel()]
    if len(shards) > 1:
        owners = _owners(ids, shards)
        order = torch.argsort(owners, stable=True)
        counts = [int(count) for count in torch.bincount(owners, minlength=len(shards)).tolist()]
        ids = ids[order]
    return Routes(
        shards=tuple(shards),
        token_ids=to_device(ids, device),
        order=None if order is None else to_device(order, device),
        counts=tuple(counts),
        trained=tuple(_other_tokens(shard_ids, padding_index, device) for shard_ids in torch.split(ids, counts)),
    )


def _owners(ids: Tensor, shards: Sequence[Shard]) -> Tensor:
    """Return the number of the shard of each token. Bytes, where they suffice: they are sorted many times as fast."""
    size = shards[0].rows
    if [shard.start for shard in shards] == [min(number * size, shards[-1].stop) for number in range(len(shards))]:
        owners = ids.div(size, rounding_mode="floor")
    else:
        owners = torch.bucketize(ids, torch.tensor([shard.stop for shard in shards], device=ids.device), right=True)
    return owners.to(torch.uint8) if len(shards) <= 256 else owners


def _other_tokens(ids: Tensor, padding_index: int | None, device: torch.device) -> Tensor | None:
    """Return positions in `ids` of tokens other than the padding token; None: all."""
    if padding_index is None:
        return None
    is_other = ids != padding_index
    return None if bool(is_other.all()) else to_device(is_other.nonzero().squeeze(1), device)


@torch.no_grad()
def gather_rows(weight: Tensor, routes: Routes, part: int) -> Tensor:
    """E: return the rows of shard `part`, [counts[part], hidden_size], in the order of `routes.positions(part)`.

    weight: [rows of the shard, hidden_size].
    """
    shard = routes.shards[part]
    ids = routes.token_ids[routes.span(part)]
    return weight.index_select(0, ids - shard.start if shard.start else ids)


@torch.no_grad()
def place_rows(rows: Sequence[Tensor], routes: Routes, parts: Sequence[int] | None = None) -> Tensor:
    """At the first stage: put the rows of shards in place; return [tokens, hidden_size].

    parts: the shards, ascending; None: all of them. Rows of other shards are zeros.
    """
    if routes.order is None:
        return rows[0]
    make = rows[0].new_empty if parts is None else rows[0].new_zeros
    hidden = make((routes.tokens, rows[0].shape[1]))
    for part, shard_rows in zip(range(len(rows)) if parts is None else parts, rows, strict=True):
        if routes.counts[part]:
            hidden.index_copy_(0, routes.positions(part), shard_rows)
    return hidden


@torch.no_grad()
def pick_row_gradients(gradient: Tensor, routes: Routes, parts: Sequence[int] | None = None) -> Tensor:
    """At the first stage: return the gradient [tokens, hidden_size] sorted by owner; `routes.span(part)` is a
    shard's.

    parts: only rows of these shards, ascending; None: of all.
    """
    if routes.order is None:
        return gradient
    owned = routes.order if parts is None else torch.cat([routes.positions(number) for number in parts])
    return gradient.index_select(0, owned)


@torch.no_grad()
def add_row_gradients(weight_gradient: Tensor, rows_gradient: Tensor, routes: Routes, part: int) -> None:
    """G: add the gradient of each owned row, those of a row always in the same order: every run gives the same bits.

    weight_gradient: [rows of the shard, hidden_size], added to in place; not to the row of the padding token.
    rows_gradient: [counts[part], hidden_size], the shard's span of the result of `pick_row_gradients`.
    """
    shard = routes.shards[part]
    ids = routes.token_ids[routes.span(part)]
    trained = routes.trained[part]
    if trained is not None:
        ids, rows_gradient = ids.index_select(0, trained), rows_gradient.index_select(0, trained)
    if ids.numel():
        rows, added = ids - shard.start, rows_gradient.to(weight_gradient.dtype)
        if weight_gradient.is_cuda:  # sorted by row; index_add_ adds there in the order in which threads come
            weight_gradient.index_put_((rows,), added, accumulate=True)
        else:
            weight_gradient.index_add_(0, rows, added)
