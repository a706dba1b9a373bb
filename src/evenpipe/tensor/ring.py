"""Transfers between tensor ranks beside products: piece by piece around a ring.

A rank multiplies the piece of rows that it has while the next one arrives, and multiplies the rows of another rank
while the sum for the one before is under way (t = 4, as rank 0 sees it; piece i is the rows of rank i):

    gather, then product    product      x0 W          x3 W          x2 W          x1 W
                            under way    x3 arrives    x2 arrives    x1 arrives
    product, then sum       product      y3 W          y2 W          y1 W          y0 W
                            under way                  sum 3 leaves, 2 arrives     2 leaves, 1 arrives ...

It moves as many bytes as the plain collectives. This is the capability of TileLink, arXiv 2503.20313, with pieces as
large as a rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.tensor.exchange import RingExchange
from evenpipe.tensor.operations import product


class Ring:
    """An `Overlap` of messages between neighbours."""

    adds_biases = True

    def __init__(self, exchange: RingExchange) -> None:
        self._exchange = exchange

    def gather_products(
        self, rows: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return all rows [n, in], gathered from [n/t, in], and their products [n, out] with [in, out], plus biases."""
        size, rank = self._exchange.size, self._exchange.rank
        whole = rows.new_empty(size * len(rows), rows.shape[1])
        products = [rows.new_empty(len(whole), matrix.shape[1]) for matrix in matrices]
        pieces, parts = whole.chunk(size), [one.chunk(size) for one in products]
        pieces[rank].copy_(rows)
        for step in range(size):
            piece, arriving = (rank - step) % size, None
            if step < size - 1:
                arriving = self._exchange.pass_on(pieces[piece], pieces[piece - 1], "rows")
            for matrix, bias, part in zip(matrices, biases, parts, strict=True):
                product(pieces[piece], matrix, bias, out=part[piece])
            if arriving is not None:
                arriving.wait()
        return whole, products

    def sum_products(
        self, pairs: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None, rest: Tensor | None = None
    ) -> Tensor:
        """Return the own rows [n/t, out] of the sum over ranks of products, bias and rest; see `Overlap`."""
        size, rank = self._exchange.size, self._exchange.rank
        factors = [(rows.chunk(size), matrix) for rows, matrix in pairs]
        others = None if rest is None else rest.chunk(size)

        def part(piece: int) -> Tensor:
            (rows, matrix), *more = factors
            total = product(rows[piece], matrix, bias)
            for rows, matrix in more:
                total += product(rows[piece], matrix, None)
            return total if others is None else total.add_(others[piece])

        total = part(rank - 1)
        for step in range(1, size):
            arriving = self._exchange.pass_on(total, torch.empty_like(total), "sum")
            own = part((rank - 1 - step) % size)
            total = arriving.wait().add_(own)
        return total
