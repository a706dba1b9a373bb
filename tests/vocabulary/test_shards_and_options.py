"""How rows are shared out, and which options are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.vocabulary import LossOptions, Shard, split


@pytest.mark.parametrize(
    ("vocabulary", "parts", "rows"),
    [
        (1003, 1, [1003]),
        (1003, 4, [251, 251, 251, 250]),
        (9, 4, [3, 3, 3, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (1, 3, [1, 0, 0]),
        (1024, 3, [342, 342, 340]),
    ],
)
def test_rows(vocabulary: int, parts: int, rows: list[int]) -> None:
    assert [shard.rows for shard in split(vocabulary, parts)] == rows


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
    with pytest.raises(ValueError, match="parts must be at least 1, not 0"):
        split(10, 0)
    with pytest.raises(ValueError, match="vocabulary must be at least 1, not 0"):
        split(0, 2)
    with pytest.raises(ValueError, match=r"padded_rows must be at least the vocabulary \(10\), not 9"):
        split(10, 2, padded_rows=9)
    with pytest.raises(ValueError, match="0 <= start <= stop, not 3 and 2"):
        Shard(3, 2, 10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing must lie between 0 and 1, not 1.5."),
        ({"label_smoothing": -0.1}, "label_smoothing must lie between 0 and 1, not -0.1."),
        ({"label_smoothing": float("nan")}, "label_smoothing must lie between 0 and 1, not nan."),
        ({"z_loss": -1.0}, "z_loss must be at least 0, not -1.0."),
        ({"z_loss": float("inf")}, "z_loss must be at least 0, not inf."),
        ({"soft_cap": 0.0}, "soft_cap must be greater than 0, or None for no soft-cap, not 0.0."),
        ({"soft_cap": float("nan")}, "soft_cap must be greater than 0, or None for no soft-cap, not nan."),
        ({"logit_scale": 0.0}, "logit_scale must be a finite number other than 0, not 0.0."),
        ({"keep": "everything"}, 'keep must be "probabilities" or "nothing", not \'everything\'.'),
        ({"rows_per_block": 0}, "rows_per_block must be at least 1, or None, not 0."),
    ],
)
def test_options_out_of_range(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        LossOptions(**options)
    assert str(caught.value) == sentence


def test_statistics_per_token() -> None:
    assert LossOptions().statistics == 3
    assert LossOptions(z_loss=1e-4, soft_cap=30.0).statistics == 3
    assert LossOptions(label_smoothing=0.1).statistics == 5
