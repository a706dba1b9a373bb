"""Which steps a run measures, and when it takes another order for it; what a hardware profile makes of traces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from traced_steps import measured

from evenpipe.costs import one_by_one, with_backward
from evenpipe.errors import InputError
from evenpipe.recipe.layout import Layout, ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, add_communication, plan_order
from evenpipe.schedule.trace import Trace
from evenpipe.schedule.trace_file import trace_to_dict
from evenpipe.train.arrangement import Arrangement
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.hardware_profile import passes_from
from evenpipe.train.input_sections import DataConfig, ModelConfig, TokenizerConfig
from evenpipe.train.pipeline_sections import PipelineConfig
from evenpipe.train.profile import ALONE, AS_IT_IS

EQUAL = Costs(F=4.0, I=4.0, W=4.0, S=1.5, T=3.0, E=0.0, G=0.0, p2p=0.02)
"""Four layers on each of two devices, and an output layer like three layers."""
SLOW = replace(EQUAL, F=(6.0, 4.0), I=(6.0, 4.0), W=(6.0, 4.0), S=(2.25, 1.5), T=(4.5, 3.0))
"""The first device takes 1.5 times as long."""


class FakePipeline:
    """A pipeline whose passes take the times in `takes`."""

    devices, replicas, context_ranks, replica, feeds, order_matters = 2, 1, 1, 0, True, False

    def __init__(self, takes: Costs = EQUAL) -> None:
        self.recipe = Recipe.of(pp=2, microbatches=2, schedule="zb-h1", vocabulary="vocab-1")
        self.takes = takes
        self.arranged: list[Costs] = []
        self.layout = self.layout_by(None)

    @property
    def program(self) -> Any:
        return self.layout.program

    def layout_by(self, costs: Costs | None) -> Layout:
        model = ModelCosts(layers=(1.0,) * 8, head=3.0)
        return Layout.of(replace(self.recipe, costs=costs), model, 64, 64, tied=False)

    def arrange(self, costs: Costs) -> None:
        self.arranged.append(costs)
        self.layout = self.layout_by(costs)

    def trace(self, result: Any) -> Trace:
        return measured(self.program, self.takes)

    def slice_lengths(self, tokens: int) -> tuple[int, ...]:
        return (tokens,)

    def from_the_first(self, text: str | None, label: str) -> str | None:
        return text


def configured(**changes: Any) -> Config:
    values = {"processes": 2, "schedule": "zb-h1", "vocabulary": "vocab-1", "microbatches": 2, **changes}
    return config_from_dict({"model": {"source": "unread"}, "pipeline": values, "data": {"files": [__file__]}})


def run(arrangement: Arrangement, steps: range) -> list[str]:
    """Take these steps; return what is said."""
    said = [arrangement.observe(step, SimpleNamespace()) for step in steps if arrangement.records(step)]
    return [sentence for sentence in said if sentence is not None]


def recorded(arrangement: Arrangement, steps: range) -> list[int]:
    return [step for step in steps if arrangement.records(step)]


def begun(pipeline: FakePipeline, state: dict[str, Any] | None = None, step: int = 0, **changes: Any) -> Arrangement:
    arrangement = Arrangement(pipeline, configured(**changes))  # type: ignore[arg-type]
    arrangement.begin(step, state)
    return arrangement


def test_steps_3_to_6_are_recorded_and_then_one_of_100() -> None:
    arrangement, steps = begun(FakePipeline()), []
    for step in filter(arrangement.records, range(1, 310)):
        steps.append(step)
        arrangement.observe(step, SimpleNamespace())
    assert steps == [3, 4, 5, 6, 106, 206, 306]


def test_passes_that_drift_are_measured_again() -> None:
    pipeline = FakePipeline()
    arrangement = begun(pipeline)
    assert run(arrangement, range(1, 100)) == []
    pipeline.takes = replace(EQUAL, F=(4.16, 4.0))
    assert run(arrangement, range(100, 200)) == []
    assert not arrangement.records(107)
    pipeline.takes = SLOW
    assert run(arrangement, range(200, 207)) == []
    (said,) = run(arrangement, range(207, 211))
    assert "steps 207 to 210" in said
    assert arrangement.records(310)


def test_a_resumed_run_measures_again_in_the_middle_and_with_another_layout() -> None:
    """Where nothing has changed it has the order of before: tests/multiprocess/test_arrangement.py."""
    before = begun(FakePipeline(takes=SLOW))
    run(before, range(1, 5))
    arrangement = begun(FakePipeline(takes=SLOW), before.state(), step=4)
    assert recorded(arrangement, range(5, 20)) == [7, 8, 9, 10]
    run(before, range(5, 50))
    assert recorded(begun(FakePipeline(), before.state(), step=50), range(51, 200)) == [106]
    other = FakePipeline(takes=SLOW)
    arrangement = begun(other, before.state(), step=50, microbatches=4)
    assert not other.arranged, "times of another layout do not count"
    assert recorded(arrangement, range(51, 100)) == [53, 54, 55, 56]


def test_an_order_with_more_in_flight_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = FakePipeline(takes=SLOW)
    held = iter([2, 3, 2, 2])  # devices of the new order, then those of the one that runs
    monkeypatch.setattr("evenpipe.train.arrangement.peak_activations", lambda row: next(held))
    assert run(begun(pipeline), range(1, 10)) == []
    assert next(held, None) is None


def test_times_that_arrange_nothing_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = FakePipeline(takes=SLOW)

    def refuse(self: FakePipeline, costs: Costs) -> Layout:
        raise InputError("costs: R has no time")

    monkeypatch.setattr(FakePipeline, "layout_by", refuse)
    (said,) = run(begun(pipeline), range(1, 10))
    assert said == "the order stays: it cannot be arranged by measured passes (costs: R has no time)"


# ---- passes for a hardware file, from traces of the pipelines that a hardware profile runs


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
