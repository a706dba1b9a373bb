"""Transfers beside products, with threads as tensor ranks: what the plain exchange and one product give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from evenpipe.tensor.ring import Ring
from evenpipe.tensor.threads import ThreadExchange, in_threads, thread_exchanges

ROWS, WIDTH = 16, 16  # kernels may treat the last rows of an odd number in another way
CASES = [(ranks, dtype) for ranks in (2, 3, 4) for dtype in (torch.float64, torch.float32, torch.bfloat16)]


def drawn(ranks: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """For each rank: rows, two weights [out, in], a bias, and all rows of two factors and of what else is summed."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((ROWS, WIDTH), (24, WIDTH), (8, WIDTH), (24,), *[(ranks * ROWS, WIDTH)] * 3)
    return [[torch.randn(*size, generator=generator).to(dtype) for size in sizes] for _ in range(ranks)]


def exchanged(ranks: int, work):
    exchanges = thread_exchanges(ranks)
    return in_threads(exchanges, lambda rank: work(exchanges[rank]))


def test_products_of_gathered_rows_have_the_bits_of_one_product() -> None:
    for ranks, dtype in CASES:
        tensors = drawn(ranks, dtype)

        def work(exchange: ThreadExchange, tensors: list[list[torch.Tensor]] = tensors):
            rows, first, second, bias = tensors[exchange.rank][:4]
            return Ring(exchange).gather_products(rows, [first.t(), second.t()], [bias, None])

        all_rows = torch.cat([own[0] for own in tensors])
        for (whole, products), (_, first, second, bias, *_) in zip(exchanged(ranks, work), tensors, strict=True):
            assert torch.equal(whole, all_rows)
            assert torch.equal(products[0], functional.linear(all_rows, first, bias)), (ranks, dtype)
            assert torch.equal(products[1], functional.linear(all_rows, second)), (ranks, dtype)


def test_without_products_it_is_a_gather() -> None:
    results = exchanged(3, lambda exchange: Ring(exchange).gather_products(torch.full((2, 1), exchange.rank), [], []))
    for whole, products in results:
        assert whole.flatten().tolist() == [0, 0, 1, 1, 2, 2] and products == []


@pytest.mark.parametrize(("ranks", "dtype"), CASES)
@pytest.mark.parametrize("more", [False, True])
def test_sums_of_products(ranks: int, dtype: torch.dtype, more: bool) -> None:
    """Bit for bit for two ranks; more are added in another order. The first rank alone has a bias."""
    given = drawn(ranks, dtype)

    def of(rank: int):
        _, _, _, _, one, other, rest = given[rank]
        weight = given[rank][1]
        pairs = [(one, weight.t())] + ([(other, weight.t())] if more else [])
        bias = given[rank][3] if rank == 0 and not more else None
        return pairs, bias, torch.cat([rest, rest[:, :8]], 1) if more else None

    def plain(exchange: ThreadExchange):
        pairs, bias, rest = of(exchange.rank)
        total = functional.linear(pairs[0][0], pairs[0][1].t(), bias)
        for rows, matrix in pairs[1:]:
            total = total + rows @ matrix
        return exchange.scatter(total if rest is None else total + rest)

    found = exchanged(ranks, lambda exchange: Ring(exchange).sum_products(*of(exchange.rank)))
    for one, expected in zip(found, exchanged(ranks, plain), strict=True):
        assert one.dtype == dtype
        if ranks == 2:
            assert torch.equal(one, expected)
        else:
            error = (one - expected).double().norm() / expected.double().norm()
            assert error < 4 * ranks * torch.finfo(dtype).eps
