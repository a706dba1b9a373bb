"""What a run says of itself: figures of every step, the console, and what has changed when it continues."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import run_outcomes
from test_training import StoppedError, logged, train_config_until, write_config

from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_data, prepare

MATRICES = 4 * (16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 32)
"""Elements in the layers of the model of test_training.py; attention has 4 layers of 2 heads of 8."""


def train_part(path: str, overrides: tuple[str, ...], until: int | None) -> None:
    train_config_until(load_config(Path(path), overrides), until)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, ("pipeline.vocabulary=vocab-1",)),
        (2, ("pipeline.replicas=2", "pipeline.data_parallel=shard")),
        (2, ("pipeline.tensor_parallel=2",)),
    ],
    ids=["devices", "shards", "tensor ranks"],
)
@pytest.mark.sampled(2)
def test_a_run_and_what_it_says_when_it_continues(processes: int, layout: tuple[str, ...], tmp_path: Path) -> None:
    path = write_config(tmp_path, steps=6)
    path.write_text(path.read_text().replace("[model]\n", "[model]\nself_check = false\n"))
    prepare(load_config(path), say=lambda text: None)
    outcomes = run_outcomes(train_part, processes, str(path), layout, 5)
    assert all(isinstance(outcome.exception, StoppedError) for outcome in outcomes)
    changes = ("optimizer.learning_rate=0.005", "pipeline.microbatches=6", "training.seed=1")
    first = run_outcomes(train_part, processes, str(path), (*layout, *changes), None)[0]
    assert first.exception is None
    values = "pipeline.microbatches: 4 -> 6, optimizer.learning_rate: 0.01 -> 0.005, training.seed: 0 -> 1"
    assert f"changed since then: {values}\n" in first.printed

    vocabulary = open_data(load_config(path)).tokenizer_size
    per_token = 6 * (MATRICES + vocabulary * 16) + 12 * 4 * 33 / 2 * 16
    steps = [line for line in logged(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    for line in steps:
        figure = per_token * line["tokens_per_second"] / processes / 1e12
        assert line["teraflops_per_second"] == pytest.approx(figure, rel=1e-12)
        assert len(line["peak_memory_bytes"]) == processes
        assert all(size > 20 << 20 for size in line["peak_memory_bytes"])
        assert "model_flops_utilization" not in line, "nobody knows the peak of this CPU"
    last = steps[-1]
    shown = f"rate {last['learning_rate']:.1e}  norm {last['gradient_norm']:.3g}  "
    assert re.search(rf"^step 6/6  epoch .* {re.escape(shown)}[\d,]+ tokens/s  busy \d+ \d+ %$", first.printed, re.M)
