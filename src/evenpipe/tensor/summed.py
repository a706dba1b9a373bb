"""The last linear layer of a block: its outputs are summed over tensor ranks, and each rank keeps its local rows.

A layer whose weight gradient is ours (`layers/weight_gradients.py`) calls this itself, so that the sum can overlap with
the product. Otherwise (a frozen weight, a pass without a graph, a compiled layer) a hook sums the layer's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.tensor.exchange import Exchange, Scatter
from evenpipe.tensor.operations import sum_product


class Summed:
    """The end of a block at a layer, which finds this object as `_sums`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.result: Tensor | None = None
        """The layer's last output, if it is already summed."""

    def rows_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's rows [.., s/t, h] of [.., s, h]."""
        return (*shape[:-2], shape[-2] // self._exchange.size, shape[-1])

    def product(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return the local rows [n/t, out] of the sum over ranks of [n, in] times [in, out], plus the bias."""
        return sum_product(hidden, matrix, bias, self._exchange)

    def gather(self, gradient: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients [n, out] of all rows, from a rank's [n/t, out], and their product with [out, in]."""
        overlap, gradient = self._exchange.overlap, gradient.contiguous()
        if overlap is None:
            all_rows = self._exchange.gather(gradient)
            return all_rows, all_rows @ matrix
        all_rows, (product,) = overlap.gather_products(gradient, [matrix], [None])
        return all_rows, product

    @torch.compiler.disable
    def sum(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Forward hook of the layer: sum its output, unless it is already summed."""
        result, self.result = self.result, None
        return output if output is result else Scatter.apply(output, self._exchange)
