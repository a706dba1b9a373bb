"""What a pipeline says of itself: in a line, in a notebook, and of what its context ranks exchange."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

import pytest
import torch
from harness import run_processes
from small_llama import described
from transformers import LlamaConfig

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.parallel.context_ranks import ContextRanks, HeadRanks

TOKENS = 16


# --- what context ranks exchange by themselves: what moves less, and computes the same --------------------------------


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


# --- in a line and in a notebook --------------------------------------------------------------------------------------


def shown() -> list[str]:
    pipeline = Pipeline(described(97, False, torch.float64), schedule="zbv", microbatches=4, self_check=False)
    result = pipeline.step(torch.arange(24).view(4, 6))
    assert f"loss {result.loss:.6g}" in repr(result) and f"<td>{result.loss:.6g}</td>" in result._repr_html_()
    return [repr(pipeline), pipeline._repr_html_(), repr(result)]


def test_what_a_pipeline_and_a_result_show() -> None:
    first, second = run_processes(shown, 2)
    pipeline, table, result = first
    numbers = r"LlamaForCausalLM of 4 layers and [\d,]+ parameters"
    assert re.fullmatch(
        rf"<Pipeline: {numbers}, device 0 of 2, 4 stages, 4 microbatches, vocabulary vocab-2>", pipeline
    )
    assert "device 1 of 2" in second[0]
    assert re.fullmatch(r"<StepResult: loss \S+, 20 valid tokens, \d+\.\d{3} s>", result)
    cells = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", table)][1:]
    assert cells == [["0", "0:1, 3:4", "0:49", "0:49"], ["1", "1:2, 2:3", "49:97", "49:97"]]
    assert "<caption>&lt;Pipeline" in table
