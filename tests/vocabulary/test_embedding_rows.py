"""How rows are shared out, E and G on shards against torch.nn.functional.embedding on the whole matrix, and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding
from vocabulary_reference import frobenius, leaf

from evenpipe.errors import InputError
from evenpipe.vocabulary import (
    LossOptions,
    Shard,
    add_row_gradients,
    gather_rows,
    pick_row_gradients,
    place_rows,
    route,
    split,
)
from evenpipe.words import show


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_ids_of(tokens: int, vocabulary: int, *, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))


def sharded_embedding(
    weight: Tensor, token_ids: Tensor, gradient: Tensor, parts: int, padding_index: int | None
) -> tuple[Tensor, Tensor]:
    """Hidden states and weight gradient; the messages between shards and the first stage are lists."""
    shards = split(weight.shape[0], parts)
    routes = route(token_ids, shards, padding_index=padding_index)
    rows = [gather_rows(weight[shard.start : shard.stop], routes, part) for part, shard in enumerate(shards)]
    assert [len(sent) for sent in rows] == list(routes.counts)
    assert sum(routes.counts) == len(token_ids)
    weight_gradient = torch.zeros_like(weight)
    sent_back = pick_row_gradients(gradient, routes)
    for part, shard in enumerate(shards):
        add_row_gradients(weight_gradient[shard.start : shard.stop], sent_back[routes.span(part)], routes, part)
    return place_rows(rows, routes), weight_gradient


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 40), st.integers(0, 1000), st.none() | st.integers(0, 29))
def test_every_layout(vocabulary: int, parts: int, tokens: int, seed: int, padding_index: int | None) -> None:
    """Each token is on exactly one route, with its owner, and positions ascend; embedding and gradient are torch's."""
    padding_index = None if padding_index is None else padding_index % vocabulary
    token_ids, shards = token_ids_of(tokens, vocabulary, seed=seed), split(vocabulary, parts)
    routes = route(token_ids, shards)
    seen: list[int] = []
    for part, shard in enumerate(shards):
        positions = routes.positions(part)
        assert positions.tolist() == sorted(positions.tolist())
        assert bool(((token_ids[positions] >= shard.start) & (token_ids[positions] < shard.stop)).all())
        assert torch.equal(routes.token_ids[routes.span(part)], token_ids[positions])
        seen += positions.tolist()
    assert sorted(seen) == list(range(tokens))
    weight, gradient = random(vocabulary, 8, seed=1), random(tokens, 8, seed=2)
    whole = leaf(weight)
    expected = embedding(token_ids, whole, padding_idx=padding_index)
    expected.backward(gradient)
    hidden, weight_gradient = sharded_embedding(weight, token_ids, gradient, parts, padding_index)
    assert torch.equal(hidden, expected)
    assert frobenius(weight_gradient, whole.grad) <= 1e-14
    assert padding_index is None or not bool(weight_gradient[padding_index].any())


def test_gradients_accumulate_in_fp32_in_the_same_order_every_time() -> None:
    """Many repeated tokens, bf16 messages, a gradient that is not empty."""
    token_ids = token_ids_of(400, 7)
    shards = split(7, 2)
    routes = route(token_ids, shards)
    messages = [random(count, 16, seed=3).bfloat16() for count in routes.counts]
    begun = random(7, 16, seed=4).float()

    def run() -> Tensor:
        total = begun.clone()
        for part, shard in enumerate(shards):
            add_row_gradients(total[shard.start : shard.stop], messages[part], routes, part)
        return total

    expected = begun.double()
    for part in range(2):
        expected.index_add_(0, token_ids[routes.positions(part)], messages[part].double())
    first = run()
    assert frobenius(first, expected) <= 1e-6
    assert torch.equal(first, run())


def test_shards_of_any_sizes_and_of_any_number() -> None:
    token_ids = token_ids_of(500, 400)
    uneven = [Shard(0, 300, 400), Shard(300, 300, 400), Shard(300, 310, 400), Shard(310, 400, 400)]
    for shards in (uneven, split(400, 399), split(400, 256), split(400, 257)):
        routes = route(token_ids, shards)
        for part, shard in enumerate(shards):
            own = ((token_ids >= shard.start) & (token_ids < shard.stop)).nonzero().squeeze(1)
            assert torch.equal(routes.positions(part), own) and routes.counts[part] == len(own)


def test_unknown_token_ids_are_refused() -> None:
    assert route(token_ids_of(12, 30).view(3, 4), split(30, 2)).tokens == 12
    for wrong in (30, -1):
        with pytest.raises(InputError, match=f"Token id {wrong} is outside the vocabulary, which has the ids 0 to 29"):
            route(torch.tensor([1, wrong, 2]), split(30, 2))


# --- shards and options ----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 5000), st.integers(1, 40))
def test_shards_are_those_of_torch_chunk(vocabulary: int, parts: int) -> None:
    shards = split(vocabulary, parts)
    chunks = torch.arange(vocabulary).chunk(parts)
    assert len(shards) == parts
    for shard, chunk in zip(shards, chunks, strict=False):
        assert list(range(shard.start, shard.stop)) == chunk.tolist()
    assert all(shard.start == shard.stop == vocabulary for shard in shards[len(chunks) :])


def test_rows_that_pad_the_vocabulary() -> None:
    shards = split(1003, 4, padded_rows=1024)
    assert [shard.rows for shard in shards] == [256, 256, 256, 256]
    assert [shard.tokens for shard in shards] == [256, 256, 256, 235]
    assert [shard.tokens for shard in split(5, 4, padded_rows=16)] == [4, 1, 0, 0]
    assert Shard(8, 12, 5).tokens == 0


def test_impossible_shards_are_refused() -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: split(10, 0), "parts is 0; it must be at least 1"),
        (lambda: split(0, 2), "vocabulary is 0; it must be at least 1"),
        (lambda: split(10, 2, padded_rows=9), "padded_rows is 9; it must be at least 10, the vocabulary"),
        (lambda: Shard(3, 2, 10), "0 <= start <= stop, not 3 and 2"),
    ]
    for make, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            make()


def test_options_out_of_range() -> None:
    nan, inf = float("nan"), float("inf")
    refused: dict[str, tuple[tuple[Any, ...], str]] = {
        "label_smoothing": ((1.5, -0.1, nan), "between 0 and 1"),
        "z_loss": ((-1.0, inf), "at least 0"),
        "soft_cap": ((0.0, nan), "greater than 0, or None for no soft-cap"),
        "logit_scale": ((0.0,), "a finite number other than 0"),
        "keep": (("all",), "one of probabilities, nothing"),
        "rows_per_block": ((0,), "at least 1, or None"),
    }
    for option, (values, accepted) in refused.items():
        for value in values:
            with pytest.raises(InputError) as caught:
                LossOptions(**{option: value})
            assert str(caught.value) == f"{option} is {show(value)}; it must be {accepted}"
