"""How tensor ranks exchange rows within a pass, under autograd.

Between blocks every rank has its local rows [n/t, h] of the n flattened tokens of a microbatch; a block sees all rows:

    rows [n/t, h] -> gather -> block with 1/t of its heads or columns -> partial [n, h] -> scatter -> rows [n/t, h]
    backward:        scatter                                                              gather

Inside and outside of blocks every gradient is partial: the gradient of a replicated parameter is the sum over ranks.
For sequence parallelism see arXiv 2205.05198, section 4.2.2; splitting rows instead of every sequence needs no copy.

Hidden states [b, s, h] remain three-dimensional: a rank has [b, s/t, h]. With several sequences these are consecutive
rows of the flattened tokens, not a piece of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from evenpipe.tensor.operations import sum_rows
from evenpipe.work import Work


class Overlap(Protocol):
    """Exchanges rows piece by piece, overlapped with products of other pieces. All ranks call the same operations in
    the same order; the number of matrices may differ."""

    adds_biases: bool
    """Whether `sum_products` accepts a bias."""

    def gather_products(
        self, rows: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return all rows [n, in], gathered from [n/t, in], and their products [n, out] with [in, out], plus biases."""
        ...

    def sum_products(
        self, pairs: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        """Return the local rows [n/t, out] of the sum over ranks of products, bias and addend.

        Args:
            pairs: factors [n, in] and [in, out]; at least one pair; the products are added in this order.
            bias: [out].
            addend: [n, out].
        """
        ...


class Exchange(Protocol):
    """The group of tensor ranks, as seen by one of them. All ranks call the same operations in the same order."""

    size: int
    rank: int
    overlap: Overlap | None
    """How transfers overlap with products; None: they run before or after them."""
    arrived: Tensor | None
    """All rows of the last gather, from `operations.py`."""

    @property
    def repeats(self) -> bool:
        """Whether the current pass repeats a forward that its backward follows immediately."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Return [n, ...]: the rows [n/t, ...] of all ranks, in rank order."""
        ...

    def scatter(self, partial: Tensor) -> Tensor:
        """Return the local rows [n/t, ...] of the sum over ranks of [n, ...]."""
        ...

    def start_gather(self, rows: Tensor) -> Work:
        """Start `gather`. `rows` must not change until it completes."""
        ...

    def start_scatter(self, partial: Tensor) -> Work:
        """Start `scatter`."""
        ...

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks, a new tensor."""
        ...

    def table(self, local: Tensor) -> Tensor:
        """Return [t, ...]: the tensors of all ranks, stacked."""
        ...


class RingExchange(Exchange, Protocol):
    """Ranks that can also pass rows around a ring."""

    def shift(self, rows: Tensor, buffer: Tensor, label: str) -> Work:
        """Start sending rows to the next rank (the first follows the last), and receiving those of the previous rank in
        the buffer, which is the result."""
        ...


def own_rows(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Return a rank's rows [b, s/t, ...] of [b, s, ...], or [n/t, h] of [n, h]; a view."""
    *outer, length = tensor.shape[:-1]
    rows = tensor.reshape(-1, tensor.shape[-1])
    count = len(rows) // exchange.size
    local_rows = rows[exchange.rank * count : (exchange.rank + 1) * count]
    return local_rows.view(*outer, length // exchange.size, tensor.shape[-1])


def all_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """Return all ranks' rows [b, s, ...] of [b, s/t, ...], or [n, h] of [n/t, h]."""
    *outer, length, width = rows.shape
    gathered = exchange.gather(rows.reshape(-1, width).contiguous())
    return formed(gathered, (*outer, length * exchange.size, width))


def _summed(partial: Tensor, exchange: Exchange) -> Tensor:
    *outer, length, width = partial.shape
    total = sum_rows(partial.reshape(-1, width).contiguous(), exchange)
    return formed(total, (*outer, length // exchange.size, width))


def formed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in another shape that is not a view: some models modify it in place, which autograd forbids for a
    view returned by a function."""
    formed: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return formed


class Gather(torch.autograd.Function):
    """Local rows -> all rows; the gradient of all rows is partial."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return all_rows(rows, exchange)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.exchange), None


class Scatter(torch.autograd.Function):
    """Partial result for all rows -> local rows of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _summed(partial, exchange)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_rows(gradient, ctx.exchange), None


class OwnRows(torch.autograd.Function):
    """A result computed by all ranks -> local rows. Its gradient on a rank is partial: zero in the rows of others."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, tensor.shape
        return own_rows(tensor, exchange).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        full_gradient = gradient.new_zeros(ctx.shape)
        own_rows(full_gradient, ctx.exchange).copy_(gradient)
        return full_gradient, None


class Sum(torch.autograd.Function):
    """A partial sum -> the sum over ranks. Each rank uses it for its own part, so its gradient is partial too."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.sum(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.sum(gradient), None
