"""The input of a block, of which a rank keeps only its local rows from F to the weight gradients.

The layers that multiply it save the local rows, and the rows of all ranks are gathered again for the weight gradients.
W gathers once for all layers. A backward that is not split gathers while it computes input gradients, and computes
weight gradients while the input's gradient is summed:

    B   [gather x again ........]                [sum of dx .........]
        dy Wq   dy Wk   dy Wv -> dx, to be summed   dy^T x of q, k, v

If the exchange can overlap transfers with products, F computes the products of these layers piece by piece while x
arrives, and all of them before the block begins, so that anything else that reads x finds all of it. I, whose weight
gradients come later, computes dx piece by piece while it is summed.

Korthikanti et al., arXiv 2205.05198, section 4.2.2, save the rows in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from evenpipe.model.products import PLAIN, products_of
from evenpipe.tensor.exchange import Exchange, formed
from evenpipe.tensor.operations import gathered_products
from evenpipe.work import Work


class Gathered:
    """The input of a block in one call, during which layers find it as `_source`."""

    def __init__(self, rows: Tensor, exchange: Exchange, *, keeps: bool) -> None:
        """keeps: whether layers save all rows: saved tensors are freed before the backward, which repeats this forward,
        or this is the repeated forward."""
        self._exchange = exchange
        self._keeps = keeps
        self._saved: ReferenceType[Tensor] | None = ref(rows)
        """The tensor that layers save during the call. Weak: nothing ends a repeated forward that has saved all."""
        self._address, self._elements, self._width = 0, rows.numel() * exchange.size, rows.shape[-1]
        self._empty = rows.new_empty(0)
        self._uses = 0
        self._started: Work | None = None
        self._all_rows: Tensor | None = None
        self._waiting: list[Callable[[], None]] = []
        self._products: dict[nn.Module, Tensor] = {}
        self._factors: list[tuple[Tensor, Tensor]] = []
        self.readers: list[nn.Module] = []
        """Layers that have multiplied the input in this call: their products can be computed while it arrives."""

    def gather(self, rows: Tensor, readers: Sequence[Any]) -> Tensor:
        """Return all rows [n, h] of [n/t, h].

        readers: linear layers that multiplied the input of earlier calls; their products may be computed meanwhile.
        """
        if self._exchange.overlap is None:
            return self._exchange.gather(rows)
        all_rows, products = gathered_products(rows, readers, self._exchange)
        self._products = dict(zip(readers, products, strict=False))
        return all_rows

    def opened(self, all_rows: Tensor) -> None:
        """Begin the call: `all_rows` is passed to the block."""
        self._address = all_rows.untyped_storage()._cdata
        if self._keeps:
            self._saved = ref(all_rows)

    def close(self) -> None:
        """End the call."""
        self._saved = None
        self._products.clear()

    def gave(self, hidden: Tensor) -> bool:
        """Return whether a layer's input is the entire gathered tensor, row by row."""
        is_all = hidden.numel() == self._elements and hidden.shape[-1] == self._width and hidden.is_contiguous()
        return self._saved is not None and is_all and hidden.untyped_storage()._cdata == self._address

    def save(self, layer: nn.Module) -> Tensor:
        """Return the tensor that a layer saves for its weight gradient."""
        saved = None if self._saved is None else self._saved()
        assert saved is not None
        self._uses += 1
        if products_of(layer) is PLAIN:
            self.readers.append(layer)
        return saved.detach()

    def product(self, layer: nn.Module) -> Tensor | None:
        """Return the layer's output [n, out], if it was computed while the input arrived."""
        return self._products.pop(layer, None)

    def start(self, saved: Tensor) -> None:
        """Start gathering again, in a backward that needs the rows soon."""
        if not self._is_whole(saved) and self._started is None and self._all_rows is None:
            self._started = self._exchange.start_gather(saved.reshape(-1, saved.shape[-1]).contiguous())

    def all_rows(self, saved: Tensor) -> Tensor:
        """Return all rows [n, h] from the tensor that a layer saved. Called once by each layer that saved it."""
        if self._is_whole(saved):
            return saved.reshape(-1, saved.shape[-1])
        if self._all_rows is None:
            self.start(saved)
            assert self._started is not None
            self._all_rows, self._started = self._started.wait(), None
        all_rows = self._all_rows
        self._uses -= 1
        if not self._uses:
            self._all_rows = None
        return all_rows

    def _is_whole(self, saved: Tensor) -> bool:
        """Return whether a layer has saved all rows."""
        return saved.numel() == self._elements

    def later(self, work: Callable[[], None]) -> None:
        """Schedule work for the time in which the input's gradient is summed."""
        self._waiting.append(work)

    def run(self) -> None:
        """Run the work scheduled by `later`."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def takes(self, gradient: Tensor, matrix: Tensor) -> bool:
        """Return whether [n, out] times [out, in] is computed while the input's gradient is summed."""
        if self._exchange.overlap is None:
            return False
        self._factors.append((gradient.reshape(-1, gradient.shape[-1]), matrix))
        return True

    def sum(self, gradient: Tensor | None) -> Tensor:
        """Return the local rows [n/t, h] of the input's gradient, summed over ranks.

        gradient: of all rows, [n, h], without the products that `takes` accepted; None if there is nothing else.
        """
        factors, self._factors = self._factors, []
        if factors:
            assert self._exchange.overlap is not None
            return self._exchange.overlap.sum_products(factors, addend=gradient)
        if gradient is None:  # nothing depends on the input
            gradient = self._empty.new_zeros(self._elements // self._width, self._width)
        summed = self._exchange.start_scatter(gradient)
        self.run()
        return summed.wait()


class GatherInput(torch.autograd.Function):
    """Local rows -> all rows, like `exchange.Gather`, overlapped with products in forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathered: Gathered, readers: Sequence[nn.Module], size: int) -> Tensor:
        """size: number of ranks."""
        ctx.gathered, ctx.shape = gathered, rows.shape
        *outer, length, width = rows.shape
        all_rows = gathered.gather(rows.reshape(-1, width).contiguous(), readers)
        output = formed(all_rows, (*outer, length * size, width))
        gathered.opened(output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor, None, None, None]:
        if gradient is not None:
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        return formed(ctx.gathered.sum(gradient), ctx.shape), None, None, None


def set_source(layers: Iterable[nn.Module], gathered: Gathered | None) -> None:
    """Tell layers which gathered tensor may be their input."""
    for layer in layers:
        layer.__dict__["_source"] = gathered
