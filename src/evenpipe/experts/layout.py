"""Where the tokens of a call of experts are sent, and which experts process them there.

Rows are sent, not pairs of a token and an expert: a token is sent once to each member of the group that holds any of
its experts, and one row comes back, the sum over those experts.

    token 0 chose experts 1, 5     2 members of 4 experts each      row of token 0 stays, and goes to member 1
    token 1 chose experts 0, 2                                      row of token 1 stays

Local rows come before those of other members. On the side of the experts, pairs (a row and one of its experts there)
are sorted by expert, then by row. A choice of no expert, with the index after the last one, is not processed.

A layout depends only on the router's choices. The layout of a forward is kept and reused by the backward and by a
repeated forward, so that all members agree on what is sent, even if rounding changes the choices of a repeated router.
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
        """Exchange a table [members, numbers]: each member gets its row. Return the local table and the received rows;
        waits for the device."""
        ...

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str) -> Work:
        """Send rows [sum of sent, ...], sorted by member, and receive `output` [sum of received, ...], sorted likewise.
        Neither may be changed before the wait."""
        ...


@dataclass(eq=False, kw_only=True)
class Layout:
    """The layout of a call on a member. Rows and pairs are on the side of the experts, unless stated otherwise."""

    tokens: int
    pairs: int
    """Number of pairs. In a single process, choices of no expert also count, with the last expert and a weight of 0, so
    that nothing has to be read from the device."""
    local_rows: int
    """Number of rows that stay."""
    sent: list[int]
    """Rows that go to each member; 0 to itself."""
    received: list[int]
    """Rows that come from each member."""
    token_of_row: Tensor | None
    """[local + sent rows]: on the side of the tokens, local rows first, then by member; None: every token is a row that
    stays."""
    present: Tensor | None
    """[local + sent rows, choices]: on the side of the tokens, whether a choice is an expert of the row's member; None:
    every choice is."""
    row: Tensor
    """[pairs]"""
    slot: Tensor
    """[pairs]: index of the choice of the token."""
    expert: Tensor
    """[pairs]: the member's own experts are counted from 0."""
    groups: Groups
    """The pairs by expert."""
    pairs_by_source: list[int]
    """Number of pairs of each member's rows."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.local_rows + sum(self.received)

    @cached_property
    def by_row(self) -> Sums:
        """Sums pairs by row."""
        return Sums(self.row, self.rows)

    @cached_property
    def by_token(self) -> Sums:
        """Sums rows by token, on the side of the tokens."""
        assert self.token_of_row is not None
        return Sums(self.token_of_row, self.tokens)

    @cached_property
    def own_first(self) -> list[Arrival]:
        """The pairs of local rows, and those of the rows of other members."""
        local, *remote = self._pairs_by_sender
        return self._arrivals(self.row >= self.local_rows, [local, sum(remote)])

    @cached_property
    def by_sender(self) -> list[Arrival]:
        """The pairs of local rows, and those of each member's rows; none for the member itself."""
        stops = torch.tensor([self.local_rows, *self.received], device=self.row.device).cumsum(0)
        return self._arrivals(torch.bucketize(self.row, stops, right=True), self._pairs_by_sender)

    @property
    def _pairs_by_sender(self) -> list[int]:
        remote = [pairs if rows else 0 for pairs, rows in zip(self.pairs_by_source, self.received, strict=True)]
        return [self.pairs - sum(remote), *remote]

    def _arrivals(self, arrival_of_pair: Tensor, counts: list[int]) -> list[Arrival]:
        """arrival_of_pair: [pairs], the number of the arrival that each pair belongs to."""
        # Stable: each arrival stays sorted by expert. A sort of all needs no counts from the device.
        order = torch.argsort(arrival_of_pair, stable=True)
        every = torch.arange(len(self.groups.ends), device=order.device)
        arrivals = []
        for indices in order.split(counts):
            ends = torch.searchsorted(self.expert[indices], every, right=True, out_int32=True)
            arrivals.append(Arrival(indices, Groups(ends)))
        return arrivals


class Sums:
    """Sums entries by index, in a fixed order and rounded once."""

    def __init__(self, index: Tensor, count: int) -> None:
        """index: [entries], the sum to which each entry belongs, below `count`."""
        sorted_index, self._order = torch.sort(index, stable=True)
        self._starts = torch.searchsorted(sorted_index, torch.arange(count, device=index.device))

    def sum(self, entries: Tensor) -> Tensor:
        """Return the sums [count, ...] of [entries, ...]; empty sums are 0."""
        if not len(entries):
            return entries.new_zeros(len(self._starts), *entries.shape[1:])
        return functional.embedding_bag(self._order, entries, self._starts, mode="sum")


@dataclass(frozen=True, eq=False)
class Arrival:
    """Pairs whose rows arrive together."""

    indices: Tensor
    """Indices among all pairs; the pairs of an expert are contiguous, because the rows of a member are."""
    groups: Groups


def alone(index: Tensor, experts: int) -> Layout:
    """Return the layout of a process that holds all experts.

    index: [tokens, choices], indices of experts.
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
    """Return the layout of a member of a group. Needs two exchanges and waits for the device once.

    Experts are divided like by `torch.chunk`: each member has the next ceil(experts / members), the last ones fewer.
    """
    tokens, choices = index.shape
    members, rank = exchange.size, exchange.rank
    per_member = -(-experts // members)
    owner = torch.where(index >= experts, members, index // per_member)
    order_of_members = [rank, *(member for member in range(members) if member != rank)]
    is_sent = torch.stack([(owner == member).any(1) for member in order_of_members])
    pair_counts = torch.stack([(owner == member).sum() for member in range(members)])
    rows = is_sent.sum(1)[torch.argsort(torch.tensor(order_of_members, device=index.device))]
    sent_counts, received_counts = exchange.counts(torch.stack([rows, pair_counts], 1))
    sent, received = [entry[0] for entry in sent_counts], [entry[0] for entry in received_counts]
    pairs_by_source = [entry[1] for entry in received_counts]
    local_rows, sent[rank], received[rank] = sent[rank], 0, 0
    # Set flags first, in order: like nonzero, but the number of rows is already known.
    selected = torch.argsort(is_sent.reshape(-1).logical_not(), stable=True)[: local_rows + sum(sent)]
    token_of_row = selected % tokens
    member_of_row = torch.tensor(order_of_members, device=index.device)[selected // tokens]
    present = owner[token_of_row] == member_of_row[:, None]
    ids = torch.where(present, index[token_of_row] - (member_of_row * per_member)[:, None], per_member).to(torch.int32)
    row_ids = ids.new_empty(local_rows + sum(received), choices)
    row_ids[:local_rows] = ids[:local_rows]
    exchange.start(row_ids[local_rows:], ids[local_rows:], received, sent, "choices").wait()
    pairs = sum(pairs_by_source)
    expert, order = torch.sort(row_ids.reshape(-1), stable=True)
    expert, order = expert[:pairs], order[:pairs]
    held = max(0, min(per_member, experts - rank * per_member))
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
