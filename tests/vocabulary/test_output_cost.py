"""Matrix products of S, C and T. `tests/memory/test_vocabulary_bytes.py` counts their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary_reference import problem

from evenpipe.memory.tracker import Tracker
from evenpipe.vocabulary import LossOptions, backward_shard, combine, forward_shard, hidden_gradient, split

TOKENS, HIDDEN, VOCABULARY = 64, 16, 512
PRODUCT = TOKENS * HIDDEN * VOCABULARY


class Products(TorchDispatchMode):
    """Sizes of matrix products: rows, inner dimension, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[:2] if name == "mm" else args[1:3]
            self.sizes.append((*left.shape, right.shape[1]))
        return function(*args, **(kwargs or {}))


def measured(run: Callable[..., Any], *arguments: Any) -> tuple[int, set[int], Any]:
    """Multiplications, the inner dimensions of the products, and the result."""
    with Products() as products:
        result = run(*arguments)
    sizes = products.sizes
    return sum(rows * inner * columns for rows, inner, columns in sizes), {inner for _, inner, _ in sizes}, result


PRODUCTS = {
    # whether there is one barrier, what is kept -> products in S, in C, in T
    (True, "probabilities"): (2, 0, 1),
    (False, "probabilities"): (1, 0, 2),
    (True, "nothing"): (2, 0, 2),
    (False, "nothing"): (1, 0, 3),
}


@pytest.mark.parametrize("ignored", [0, TOKENS // 2])
def test_matrix_products(ignored: int) -> None:
    """Three in all, of tokens x hidden_size x rows; a fourth only when nothing is kept. Ignored tokens cost nothing,
    and the weight gradient sums all others at once."""
    (shard,), trained = split(VOCABULARY, 1), TOKENS - ignored
    for dtype, (one_barrier, keep) in itertools.product((torch.float32, torch.bfloat16), PRODUCTS):
        inputs = problem(TOKENS, HIDDEN, VOCABULARY, ignored=range(ignored)).to(dtype)
        hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
        options = LossOptions(keep=keep, rows_per_block=8, z_loss=1e-3)
        in_forward, _, (statistics, state) = measured(
            forward_shard, hidden, weight, None, labels, shard, options, one_barrier
        )
        combined = combine(statistics[None], inputs.token_weights, labels, options, VOCABULARY)
        in_combination = measured(hidden_gradient, state, combined, weight)[0] if one_barrier else 0
        gradient = torch.zeros(VOCABULARY, HIDDEN)
        in_backward, inner, _ = measured(backward_shard, state, combined, weight, gradient)
        counts = [count * TOKENS / PRODUCT / trained for count in (in_forward, in_combination, in_backward)]
        assert tuple(counts) == PRODUCTS[one_barrier, keep], (dtype, one_barrier, keep)
        if one_barrier:
            assert inner == {trained} | ({HIDDEN} if keep == "nothing" else set())


def test_an_evaluation_makes_no_tensor_of_all_tokens_and_rows() -> None:
    (shard,), inputs = split(VOCABULARY, 1), problem(TOKENS, HIDDEN, VOCABULARY).to(torch.float32)
    options = LossOptions(rows_per_block=8, soft_cap=5.0)
    with Tracker() as tracker, tracker.span() as span:
        forward_shard(inputs.hidden, inputs.weight, None, inputs.labels, shard, options, True, gradients=False)
    assert span.above < TOKENS * VOCABULARY * 4 / 2
