"""Transfers between tensor ranks that overlap with products: piece by piece around a ring.

A rank multiplies the piece of rows that it has while the next piece arrives, and multiplies the rows of one rank while
the sum for the previous rank is in flight (t = 4, as seen by rank 0; piece i is the rows of rank i):

    gather, then product    product      x0 W          x3 W          x2 W          x1 W
                            in flight    x3 arrives    x2 arrives    x1 arrives
    product, then sum       product      y3 W          y2 W          y1 W          y0 W
                            in flight                  sum 3 leaves, 2 arrives     2 leaves, 1 arrives ...

It moves as many bytes as the plain collectives. TileLink, arXiv 2503.20313, offers the same overlap; here a piece is a
rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.tensor.exchange import RingExchange
from evenpipe.tensor.operations import product


class Ring:
    """An `Overlap` that sends messages between neighbours."""

    adds_biases = True

    def __init__(self, exchange: RingExchange) -> None:
        self._exchange = exchange

    def gather_products(
        self, rows: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return all rows [n, in], gathered from [n/t, in], and their products [n, out] with [in, out], plus biases."""
        size, rank = self._exchange.size, self._exchange.rank
        all_rows = rows.new_empty(size * len(rows), rows.shape[1])
        products = [rows.new_empty(len(all_rows), matrix.shape[1]) for matrix in matrices]
        pieces, output_pieces = all_rows.chunk(size), [output.chunk(size) for output in products]
        pieces[rank].copy_(rows)
        for step in range(size):
            index, arriving = (rank - step) % size, None
            if step < size - 1:
                arriving = self._exchange.shift(pieces[index], pieces[index - 1], "rows")
            for matrix, bias, output in zip(matrices, biases, output_pieces, strict=True):
                product(pieces[index], matrix, bias, out=output[index])
            if arriving is not None:
                arriving.wait()
        return all_rows, products

    def sum_products(
        self, pairs: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        """Return the local rows [n/t, out] of the sum over ranks of products, bias and addend; see `Overlap`."""
        size, rank = self._exchange.size, self._exchange.rank
        factors = [(rows.chunk(size), matrix) for rows, matrix in pairs]
        addend_pieces = None if addend is None else addend.chunk(size)

        def partial_sum(index: int) -> Tensor:
            (rows, matrix), *further_factors = factors
            total = product(rows[index], matrix, bias)
            for rows, matrix in further_factors:
                total += product(rows[index], matrix, None)
            return total if addend_pieces is None else total.add_(addend_pieces[index])

        total = partial_sum(rank - 1)
        for step in range(1, size):
            arriving = self._exchange.shift(total, torch.empty_like(total), "sum")
            partial = partial_sum((rank - 1 - step) % size)
            total = arriving.wait().add_(partial)
        return total
