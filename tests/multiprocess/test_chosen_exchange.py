"""What context ranks exchange by themselves: what moves less, which they say, and which computes the same."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from harness import run_processes
from transformers import LlamaConfig

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.parallel.context_ranks import ContextRanks, HeadRanks

TOKENS = 16


def config(heads_of_keys: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=heads_of_keys,
        vocab_size=64,
    )


def step(heads_of_keys: int, **options: Any) -> tuple[str | None, type, float, list[str]]:
    """What is said, how, the loss, and what is logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("evenpipe.runtime.pieces")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    ids = torch.arange(2 * TOKENS).view(2, TOKENS)
    pipeline = Pipeline(describe(config(heads_of_keys)), microbatches=1, self_check=False, **options)
    logger.removeHandler(handler)
    with contextlib.closing(pipeline):
        loss = pipeline.step(ids).loss
        exchange = None if pipeline._pieces is None else type(pipeline._pieces.context)
        return pipeline.context_exchange, exchange, loss, said


CASES = [
    (4, {}, "heads: gathered keys would move 1.50 times as much"),
    (1, {}, "keys: heads for tokens would move 2.00 times as much"),  # the only head of keys is repeated
    (4, {"context_exchange": "keys"}, "keys: as given"),
    (4, {"slices": 2}, "keys: heads for tokens would move 1.00 times as much"),
]


def two_ranks() -> list[Any]:
    return [step(heads, context_parallel=2, **options) for heads, options, _ in CASES]


def test_the_choice_is_said_and_computes_the_same() -> None:
    first, second = run_processes(two_ranks, 2)
    for (heads, options, expected), of_first, of_second in zip(CASES, first, second, strict=True):
        assert of_first[0] == of_second[0] == expected
        assert of_first[1] is (HeadRanks if expected.startswith("heads") else ContextRanks), options
        assert (of_first[3], of_second[3]) == ([f"context ranks exchange {expected}"], [])
        whole, _, loss, said = step(heads)
        assert whole is None and said == []
        assert of_first[2] == of_second[2] == pytest.approx(loss, rel=1e-5)
