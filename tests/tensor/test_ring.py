"""Transfers beside products have the bits of plain ones; threads are tensor ranks.

tests/fuzz compares gradients with one process.
"""

from __future__ import annotations

from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional

from evenpipe.tensor.gathered import Gathered
from evenpipe.tensor.ring import Ring
from evenpipe.tensor.threads import ThreadExchange, in_threads, thread_exchanges

ROWS, WIDTH = 16, 16  # kernels may treat the last rows of an odd number in another way


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_products_of_gathered_rows_and_sums_of_products(ranks: int, dtype: torch.dtype) -> None:
    """Sums bit for bit for two ranks; more are added in another order. The first rank alone has a bias."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((ROWS, WIDTH), (24, WIDTH), (8, WIDTH), (24,), *[(ranks * ROWS, WIDTH)] * 2)
    drawn = [[torch.randn(*size, generator=generator).to(dtype) for size in sizes] for _ in range(ranks)]

    def ring(exchange: ThreadExchange):
        rows, first, second, bias, factor, other = drawn[exchange.rank]
        bias_of_first = None if exchange.rank else bias
        return (
            *Ring(exchange).gather_products(rows, [first.t(), second.t()], [bias, None]),
            Ring(exchange).sum_products([(factor, first.t())], bias_of_first, None),
            Ring(exchange).sum_products([(factor, first.t()), (other, first.t())], None, factor @ first.t()),
        )

    def plain(exchange: ThreadExchange):
        _, first, _, bias, factor, other = drawn[exchange.rank]
        product = functional.linear(factor, first)
        one_product = functional.linear(factor, first, None if exchange.rank else bias)
        return exchange.scatter(one_product), exchange.scatter(product + other @ first.t() + product)

    all_rows = torch.cat([own[0] for own in drawn])
    exchanges, others = thread_exchanges(ranks), thread_exchanges(ranks)
    found = in_threads(exchanges, lambda rank: ring(exchanges[rank]))
    expected = in_threads(others, lambda rank: plain(others[rank]))
    for (whole, products, *sums), expected_sums, own in zip(found, expected, drawn, strict=True):
        _, first, second, bias, *_ = own
        assert torch.equal(whole, all_rows)
        assert torch.equal(products[0], functional.linear(all_rows, first, bias))
        assert torch.equal(products[1], functional.linear(all_rows, second))
        for ours, theirs in zip(sums, expected_sums, strict=True):
            assert ours.dtype == dtype
            error = (ours - theirs).double().norm() / theirs.double().norm()
            assert error <= (0 if ranks == 2 else 4 * ranks * torch.finfo(dtype).eps)


def test_all_rows_are_gathered_once_and_freed_after_their_last_use() -> None:
    def start_gather(rows: torch.Tensor) -> SimpleNamespace:
        gathers.append(rows)
        return SimpleNamespace(wait=lambda: torch.cat([rows, rows]))

    gathers: list[torch.Tensor] = []
    rows = torch.rand(2, 3)
    gathered = Gathered(rows, SimpleNamespace(size=2, overlap=None, start_gather=start_gather), keeps=False)
    saved = [gathered.save(layer) for layer in (nn.Identity(), nn.Identity())]
    gathered.close()
    whole = gathered.all_rows(saved[0])
    assert whole.shape == (4, 3) and whole is gathered.all_rows(saved[1]) and len(gathers) == 1
    watched = ref(whole)
    del whole
    assert watched() is None
