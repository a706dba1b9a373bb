"""Sums over tensor ranks, and products overlapped with an exchange, as torch operations.

This way "selective" checkpointing keeps their results like those of other products, and repeats neither them nor their
transfers: of a sum it keeps a rank's rows [n/t, h], not the rank's partial result [n, h].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from evenpipe.layers.own_operations import own_operation

if TYPE_CHECKING:
    from evenpipe.tensor.exchange import Exchange

_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
"""By the number that identifies them in the arguments of an operation."""


def sum_rows(partial: Tensor, exchange: Exchange) -> Tensor:
    """Return the local rows [n/t, h] of the sum over ranks of [n, h]."""
    rows: Tensor = torch.ops.evenpipe.sum_rows(partial, _number(exchange))
    return rows


def sum_product(hidden: Tensor, matrix: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
    """Return the local rows [n/t, out] of the sum over ranks of [n, in] times [in, out], plus the bias [out]."""
    rows: Tensor = torch.ops.evenpipe.sum_product(hidden, matrix, bias, _number(exchange))
    return rows


def gathered_products(
    rows: Tensor, layers: Sequence[nn.Linear | Conv1D], exchange: Exchange
) -> tuple[Tensor, list[Tensor]]:
    """Return all rows [n, in], gathered from [n/t, in], and the outputs [n, out] of each linear layer for them.

    If checkpointing kept the results of an earlier call, those are returned (fewer, if fewer layers were known then),
    and only rows are gathered. Checkpointing expects the same operations in both calls, so weights are not transposed
    here.
    """
    exchange.arrived = None
    products = torch.ops.evenpipe.gathered_products(
        rows,
        [layer.weight for layer in layers],
        [not isinstance(layer, Conv1D) for layer in layers],
        [layer.bias for layer in layers],
        _number(exchange),
    )
    return torch.ops.evenpipe.arrived_rows(rows, _number(exchange)), products


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return [n, in] times [in, out], plus the bias [out]."""
    if bias is None:
        return torch.mm(rows, matrix, out=out)
    return torch.addmm(bias, rows, matrix, out=out)


def _number(exchange: Exchange) -> int:
    _exchanges[id(exchange)] = exchange
    return id(exchange)


def _sum_rows(partial: Tensor, number: int) -> Tensor:
    return _exchanges[number].scatter(partial)


def _sum_product(hidden: Tensor, matrix: Tensor, bias: Tensor | None, number: int) -> Tensor:
    exchange = _exchanges[number]
    if exchange.overlap is None:
        return exchange.scatter(product(hidden, matrix, bias))
    return exchange.overlap.sum_products([(hidden, matrix)], bias)


def _gathered_products(
    rows: Tensor, weights: list[Tensor], transposed: list[bool], biases: list[Tensor | None], number: int
) -> list[Tensor]:
    exchange = _exchanges[number]
    assert exchange.overlap is not None
    matrices = [
        weight.t() if is_transposed else weight for weight, is_transposed in zip(weights, transposed, strict=True)
    ]
    exchange.arrived, products = exchange.overlap.gather_products(rows, matrices, biases)
    return products


def _arrived_rows(rows: Tensor, number: int) -> Tensor:
    exchange = _exchanges[number]
    arrived, exchange.arrived = exchange.arrived, None
    return exchange.gather(rows) if arrived is None else arrived


own_operation("sum_rows(Tensor partial, int exchange) -> Tensor", _sum_rows)
own_operation("sum_product(Tensor hidden, Tensor matrix, Tensor? bias, int exchange) -> Tensor", _sum_product)
own_operation(
    "gathered_products(Tensor rows, Tensor[] weights, bool[] transposed, Tensor?[] biases, int exchange) -> Tensor[]",
    _gathered_products,
)
own_operation("arrived_rows(Tensor rows, int exchange) -> Tensor", _arrived_rows, is_product=False)
