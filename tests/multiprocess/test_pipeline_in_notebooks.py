"""A pipeline and a step's result show themselves in a line, and in a notebook as a table."""

from __future__ import annotations

import re

import torch
from harness import run_processes
from small_llama import described

from evenpipe import Pipeline


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
