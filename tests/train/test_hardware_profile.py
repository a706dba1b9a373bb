"""Passes for a hardware file, from traces of the pipelines that a hardware profile runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traced_steps import measured

from evenpipe.costs import one_by_one, with_backward
from evenpipe.schedule import Costs, add_communication, plan_order
from evenpipe.schedule.trace_file import trace_to_dict
from evenpipe.train.config import Config
from evenpipe.train.hardware_profile import passes_from, pipelines_to_measure
from evenpipe.train.input_sections import DataConfig, ModelConfig, TokenizerConfig
from evenpipe.train.pipeline_sections import PipelineConfig
from evenpipe.train.profile import ALONE, AS_IT_IS

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
CONFIG = Config(
    model=ModelConfig(architecture="llama", config=SHAPE, self_check=False),
    data=DataConfig(corpus="python-standard-library", sequence_length=8),
    tokenizer=TokenizerConfig(vocabulary_size=300),
    pipeline=PipelineConfig(processes=2),
)
KINDS = ("F", "B", "I", "W")
MICROBATCHES = 32
"""So many that devices are alone for a small part of a step."""
BESIDE = 0.5
"""What each pass of a stage takes beside its layers."""


def stages(count: int, contention: float) -> Costs:
    """Costs of all layers in so many stages."""
    seconds = {name: layers / count + BESIDE for name, layers in zip(KINDS, (8.0, 16.0, 8.0, 8.0), strict=True)}
    return Costs(**seconds, S=1.0, C=0.25, T=0.5, E=0.25, G=0.25, contention=contention)


def result(schedule: str, mode: str, costs: Costs, *, alone: bool = False) -> list[dict[str, Any]]:
    """What `measure_pipeline` returns on two devices, with split backwards, where all takes what `costs` say."""
    order = plan_order(schedule, 2, MICROBATCHES, mode, costs)
    orders = {AS_IT_IS: order, "split": with_backward(order, "split")} | ({ALONE: one_by_one(order)} if alone else {})
    steps = {name: measured(add_communication(one, costs), costs) for name, one in orders.items()}
    return [{"traces": {name: [trace_to_dict(step)] for name, step in steps.items()}, "shorter": [], "sizes": {}}]


def test_pipelines_without_an_order_of_microbatches_alone_have_the_contention_of_the_one_with_it() -> None:
    """Ranks of devices that share cores are hardly ever alone: then all passes of other orders take as long."""
    few, many = stages(2, contention=2.0), stages(4, contention=1.0)
    crowded = replace(many, **{name: 2 * getattr(many, name) for name in (*KINDS, "S", "C", "T", "E", "G")})
    found = {
        "sharded": result("1f1b", "vocab-2", few, alone=True),
        "whole": result("1f1b", "first-last", few),
        "looped": result("interleaved", "vocab-2", crowded),
    }
    passes = passes_from(found, CONFIG, "cpu")
    assert passes.contention == 2.0
    for name in KINDS:
        bubble = 0.03 * getattr(few, name)  # the part of a step in which a device is alone
        assert passes.seconds[f"stage_{name}"] == pytest.approx(BESIDE, abs=bubble), name
        assert passes.seconds[name] == pytest.approx(2 * (getattr(few, name) - BESIDE), abs=2 * bubble), name


@pytest.mark.parametrize(
    ("context", "exchange", "ways"),
    [(1, "auto", ["auto"]), (2, "auto", ["keys", "heads"]), (2, "heads", ["heads"]), (4, "auto", ["auto"])],
)
def test_passes_are_measured_with_every_exchange_and_on_shorter_sequences(context, exchange, ways):
    """Four ranks cannot share two heads: they exchange keys."""
    pipeline = replace(CONFIG.pipeline, processes=2 * context, context_parallel=context, context_exchange=exchange)
    config = replace(CONFIG, pipeline=pipeline, data=replace(CONFIG.data, sequence_length=64))
    found = [one["sharded"] for one in pipelines_to_measure(config, pipeline.processes, (1, 4))]
    shapes = [(one.pipeline.context_exchange, one.data.sequence_length, one.pipeline.microbatch_size) for one in found]
    assert shapes == [(way, *shape) for way in ways for shape in ((64, 1), (64, 4), (8, 1))]
