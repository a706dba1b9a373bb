"""How rows are shared out, and which options are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.vocabulary import LossOptions, Shard, split


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
        (lambda: split(10, 0), "parts must be at least 1, not 0"),
        (lambda: split(0, 2), "vocabulary must be at least 1, not 0"),
        (lambda: split(10, 2, padded_rows=9), r"padded_rows must be at least the vocabulary \(10\), not 9"),
        (lambda: Shard(3, 2, 10), "0 <= start <= stop, not 3 and 2"),
    ]
    for make, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            make()


def test_options_out_of_range() -> None:
    nan, inf = float("nan"), float("inf")
    refused: dict[str, tuple[tuple[Any, ...], str]] = {
        "label_smoothing": ((1.5, -0.1, nan), "must lie between 0 and 1"),
        "z_loss": ((-1.0, inf), "must be at least 0"),
        "soft_cap": ((0.0, nan), "must be greater than 0, or None for no soft-cap"),
        "logit_scale": ((0.0,), "must be a finite number other than 0"),
        "keep": (("everything",), 'must be "probabilities" or "nothing"'),
        "rows_per_block": ((0,), "must be at least 1, or None"),
    }
    for option, (values, accepted) in refused.items():
        for value in values:
            with pytest.raises(InputError) as caught:
                LossOptions(**{option: value})
            assert str(caught.value) == f"{option} {accepted}, not {value!r}."
