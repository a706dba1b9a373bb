"""What a pipeline says of itself: in a line, in a notebook, and of what its context ranks exchange."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

import pytest
import torch
from harness import lines_logged, run_processes
from small_llama import described
from transformers import LlamaConfig

from evenpipe import Pipeline

# --- what context ranks exchange by themselves: what moves less, and computes the same --------------------------------


def step(heads_of_keys: int, **options: Any) -> tuple[str | None, float, list[str]]:
    """What is said of the exchange, the loss, and what is logged."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=heads_of_keys, vocab_size=64)
    with (
        lines_logged(logging.INFO) as said,
        contextlib.closing(Pipeline(config, microbatches=1, self_check=False, **options)) as pipeline,
    ):
        loss = pipeline.step(torch.arange(32).view(2, 16)).loss
    return pipeline.context_exchange, loss, [line for line in said if line.startswith("context ranks exchange")]


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
    for (heads, _, expected), of_first, of_second in zip(CASES, first, second, strict=True):
        whole, loss, said = step(heads)
        assert whole is None and said == []
        assert of_first == (expected, pytest.approx(loss, rel=1e-5), [f"context ranks exchange {expected}"])
        assert of_second == (expected, of_first[1], [])


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
