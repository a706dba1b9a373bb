"""Where the tokens of a call of experts go, and which experts they meet there.

Rows travel, not pairs of a token and an expert: a token goes once to each member of the group that holds any of its
experts, and one row comes back, the sum over those experts.

    token 0 chose experts 1, 5     2 members of 4 experts each      row of token 0 stays, and goes to member 1
    token 1 chose experts 0, 2                                      row of token 1 stays

Own rows stand before those of other members. On the side of the experts, pairs (a row and one of its experts there) are
sorted by expert, in each by row. A choice that names no expert, with the index behind the last one, meets nobody.

A layout depends on the router's choices only. That of a forward is kept: the backward and a repeated forward use it
again, so that all members agree on what travels, whatever rounding does to a repeated router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from evenpipe.model.products import Groups
from evenpipe.work import Work


class Exchange(Protocol):
    """Moves rows between the members of an expert group. All members call all methods in the same order."""

    size: int
    rank: int

    def counts(self, table: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Exchange [members, numbers]: each member gets its row. Return the own table and what others sent; waits for
        the device."""
        ...

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str) -> Work:
        """Send rows [sum of sent, ...], sorted by member, and receive the `output` [sum of received, ...], likewise.
        Both must stay as they are until the wait."""
        ...


@dataclass(eq=False, kw_only=True)
class Layout:
    """Of one call on one member. Rows and pairs are those on the side of the experts, if nothing else is said."""

    tokens: int
    pairs: int
    """Their number. Alone, choices of no expert are pairs too, with the last expert and a weight of 0: so no device has
    to be read."""
    local_rows: int
    """Rows that stay."""
    sent: list[int]
    """Rows that go to each member; 0 to itself."""
    received: list[int]
    """Rows that come from each member."""
    token_of_row: Tensor | None
    """[own + sent rows]: on the side of the tokens, own rows first, then by member; None: every token is a row that
    stays."""
    present: Tensor | None
    """[own + sent rows, choices]: on the side of the tokens, whether a choice is an expert of the row's member; None:
    every one is."""
    row: Tensor
    """[pairs]"""
    slot: Tensor
    """[pairs]: which choice of the token."""
    expert: Tensor
    """[pairs]: the member's own experts are counted from 0."""
    groups: Groups
    """The pairs by expert."""
    pairs_by_source: list[int]
    """Of each member's rows."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.local_rows + sum(self.received)

    @cached_property
    def by_row(self) -> Sums:
        """Of pairs."""
        return Sums(self.row, self.rows)

    @cached_property
    def by_token(self) -> Sums:
        """Of rows on the side of the tokens."""
        assert self.token_of_row is not None
        return Sums(self.token_of_row, self.tokens)

    @cached_property
    def own_first(self) -> list[Arrival]:
        """The pairs of own rows, and those of the rows of other members."""
        local, *remote = self._pairs_by_sender
        return self._arrivals(self.row >= self.local_rows, [local, sum(remote)])

    @cached_property
    def by_sender(self) -> list[Arrival]:
        """The pairs of own rows, and those of each member's rows: none for the member itself."""
        stops = torch.tensor([self.local_rows, *self.received], device=self.row.device).cumsum(0)
        return self._arrivals(torch.bucketize(self.row, stops, right=True), self._pairs_by_sender)

    @property
    def _pairs_by_sender(self) -> list[int]:
        remote = [pairs if rows else 0 for pairs, rows in zip(self.pairs_by_source, self.received, strict=True)]
        return [self.pairs - sum(remote), *remote]

    def _arrivals(self, arrival_of_pair: Tensor, counts: list[int]) -> list[Arrival]:
        """arrival_of_pair: [pairs], the number of the arrival that each pair belongs to."""
        # Stable: in each part by expert, as before. A sort of all instead of reading how many there are of each.
        order = torch.argsort(arrival_of_pair, stable=True)
        every = torch.arange(len(self.groups.ends), device=order.device)
        arrivals = []
        for indices in order.split(counts):
            ends = torch.searchsorted(self.expert[indices], every, right=True, out_int32=True)
            arrivals.append(Arrival(indices, Groups(ends)))
        return arrivals


class Sums:
    """Sums of entries that belong together, in a fixed order and rounded once."""

    def __init__(self, index: Tensor, count: int) -> None:
        """index: [entries], to which of `count` sums each belongs."""
        sorted_index, self._order = torch.sort(index, stable=True)
        self._starts = torch.searchsorted(sorted_index, torch.arange(count, device=index.device))

    def sum(self, entries: Tensor) -> Tensor:
        """Return [count, ...] of [entries, ...]; zeros for a sum of nothing."""
        if not len(entries):
            return entries.new_zeros(len(self._starts), *entries.shape[1:])
        return functional.embedding_bag(self._order, entries, self._starts, mode="sum")


@dataclass(frozen=True, eq=False)
class Arrival:
    """Pairs whose rows arrive at one time."""

    indices: Tensor
    """Among all pairs: those of an expert follow each other, because rows of one member do."""
    groups: Groups


def alone(index: Tensor, experts: int) -> Layout:
    """Return the layout of a process that holds all experts.

    index: [tokens, choices], numbers of experts.
    """
    tokens, choices = index.shape
    present = index < experts
    expert, order = torch.sort(index.clamp(max=experts - 1).reshape(-1), stable=True)
    every = torch.arange(experts, device=index.device)
    return Layout(
        tokens=tokens,
        pairs=tokens * choices,
        local_rows=tokens,
        sent=[0],
        received=[0],
        token_of_row=None,
        present=present,
        row=order // choices,
        slot=order % choices,
        expert=expert,
        groups=Groups(torch.searchsorted(expert, every, right=True, out_int32=True)),
        pairs_by_source=[tokens * choices],
    )


def spread(index: Tensor, experts: int, exchange: Exchange) -> Layout:
    """Return the layout of a member of a group; two exchanges, and one wait for the device.

    Experts are spread as `torch.chunk` does: each member has the next ceil(experts / members), the last ones fewer.
    """
    tokens, choices = index.shape
    members, rank = exchange.size, exchange.rank
    local = -(-experts // members)
    owner = torch.where(index >= experts, members, index // local)
    order_of_members = [rank, *(member for member in range(members) if member != rank)]
    goes = torch.stack([(owner == member).any(1) for member in order_of_members])
    meets = torch.stack([(owner == member).sum() for member in range(members)])
    rows = goes.sum(1)[torch.argsort(torch.tensor(order_of_members, device=index.device))]
    sent_counts, received_counts = exchange.counts(torch.stack([rows, meets], 1))
    sent, received = [entry[0] for entry in sent_counts], [entry[0] for entry in received_counts]
    pairs_by_source = [entry[1] for entry in received_counts]
    local_rows, sent[rank], received[rank] = sent[rank], 0, 0
    # Flags first, in order: like nonzero, but the number of rows is known already.
    selected = torch.argsort(goes.reshape(-1).logical_not(), stable=True)[: local_rows + sum(sent)]
    token_of_row = selected % tokens
    member_of_row = torch.tensor(order_of_members, device=index.device)[selected // tokens]
    present = owner[token_of_row] == member_of_row[:, None]
    ids = torch.where(present, index[token_of_row] - (member_of_row * local)[:, None], local).to(torch.int32)
    row_ids = ids.new_empty(local_rows + sum(received), choices)
    row_ids[:local_rows] = ids[:local_rows]
    exchange.start(row_ids[local_rows:], ids[local_rows:], received, sent, "choices").wait()
    pairs = sum(pairs_by_source)
    expert, order = torch.sort(row_ids.reshape(-1), stable=True)
    expert, order = expert[:pairs], order[:pairs]
    held = max(0, min(local, experts - rank * local))
    every = torch.arange(held, device=index.device, dtype=expert.dtype)
    return Layout(
        tokens=tokens,
        pairs=pairs,
        local_rows=local_rows,
        sent=sent,
        received=received,
        token_of_row=token_of_row,
        present=present,
        row=order // choices,
        slot=order % choices,
        expert=expert.long(),
        groups=Groups(torch.searchsorted(expert, every, right=True, out_int32=True)),
        pairs_by_source=pairs_by_source,
    )
