"""Steps of pipelines that are simulated: the case, where its pass times come from, and how long its step takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from models import Model, costs_name

from evenpipe.compare.stage_costs import with_whole_vocabulary
from evenpipe.costs.analytic import BESIDE_COLLECTIVES
from evenpipe.costs.hardware import Wire, find_hardware
from evenpipe.costs.timed_model import pass_costs
from evenpipe.model import describe, head_flops, layer_flops
from evenpipe.plan.configuration import Configuration, costs_of
from evenpipe.plan.configuration_search import head_layers
from evenpipe.plan.evaluation import end_seconds
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.programs import Shape
from evenpipe.plan.space import Space, configurations
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, Link, Placement
from evenpipe.schedule.cost_values import spread
from evenpipe.schedule.files import read_costs
from evenpipe.schedule.registry import options_of
from evenpipe.schedule.vocabulary_mode import VocabularyMode
from evenpipe.simulate import makespan

STAGES_PER_DEVICE = 2
"""For schedules that leave a choice."""


@dataclass(frozen=True)
class Case:
    """A model on a number of devices, with so many stages on each."""

    model: Model
    devices: int
    stages_per_device: int
    tokens: int
    vocabulary: int
    microbatches: int
    hardware: str
    kernels: str

    @property
    def layout(self) -> Recipe:
        """A pipeline over all devices."""
        return Recipe.of(pp=self.devices, microbatches=self.microbatches, sequence_length=self.tokens)

    @property
    def problem(self) -> Problem:
        """As the planner has it."""
        return _problem(self)

    @property
    def flops(self) -> float:
        """Of a step."""
        model = self.problem.description
        return 3.0 * self.microbatches * self.tokens * (math.fsum(layer_flops(model, self.tokens)) + head_flops(model))

    def mfu(self, seconds: float) -> float:
        """Of a step that takes so long."""
        return self.flops / seconds / self.devices / self.problem.hardware.peak("bf16")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("devices", "stages_per_device", "tokens", "vocabulary")
        return {"model": self.model.name, **{name: getattr(self, name) for name in names}}


@cache
def _problem(case: Case) -> Problem:
    return problem_of(
        describe(case.model.config(case.vocabulary, case.tokens)),
        find_hardware(case.hardware),
        gpus=case.devices,
        sequence=case.tokens,
        sequences_per_step=case.microbatches,
        kernels=case.kernels,
    )


# --- pass times ----------------------------------------------------------------------------------------------


class DataSheet:
    """Pass times that follow from shapes and a data sheet."""

    def costs(self, case: Case, configuration: Configuration, placement: Placement) -> Costs:
        """Of all passes and transfers."""
        return with_hops(case, costs_of(case.problem, configuration))

    def head_seconds(self, case: Case, mode: str) -> float:
        """S, C and T of the whole vocabulary on one device."""
        alone = Recipe.of(microbatches=case.microbatches, vocabulary=mode, layers_per_stage=(case.model.layers,))
        return output_seconds(pass_costs(case.problem, alone, Placement.linear(1)))

    def head_layers(self, case: Case) -> float:
        """The whole output layer, in layers."""
        return head_layers(case.problem, case.layout)


@dataclass(frozen=True)
class Measured(DataSheet):
    """Pass times of the files that pass_times.py wrote; only transfers follow from the data sheet."""

    folder: Path

    def costs(self, case: Case, configuration: Configuration, placement: Placement) -> Costs:
        mode = configuration.recipe.vocabulary
        whole = not VocabularyMode(mode).sharded
        file = self._file(case, 1 if whole else case.devices, mode)
        layer = _layer_seconds(file, case.model.layers, 1 if whole else case.devices)
        beside = BESIDE_COLLECTIVES.get(mode, 1.0)
        stages: dict[str, Any] = {
            kind: tuple(beside * seconds * count for count in configuration.layers_per_stage)
            for kind, seconds in layer.items()
        }
        shards = {kind: getattr(file, kind) / (case.devices if whole else 1) for kind in "SCTEG"}
        assumed = super().costs(case, configuration, placement)
        costs = replace(assumed, **stages, **shards)
        return with_whole_vocabulary(costs, placement) if whole else costs

    def head_seconds(self, case: Case, mode: str) -> float:
        return output_seconds(self._file(case, 1, mode))

    def head_layers(self, case: Case) -> float:
        file = self._file(case, 1, "first-last")
        layer = _layer_seconds(file, case.model.layers, 1)
        return output_seconds(file) / (layer["F"] + layer["B"])

    def _file(self, case: Case, devices: int, mode: str) -> Costs:
        """Without shards as one device with one barrier; interlaced devices wait twice, as those of vocab-1."""
        mode = {"interlaced": "vocab-1"}.get(mode, "vocab-2" if not VocabularyMode(mode).sharded else mode)
        return _read(self.folder / costs_name(case.model.name, case.tokens, case.vocabulary, devices, mode))


def with_hops(case: Case, costs: Costs) -> Costs:
    """`costs` with hops by the wires that they take: across nodes from the last device of one to the first of the next,
    inside a node all others."""
    hardware = case.problem.hardware
    size = case.problem.setting(case.layout).hop_bytes(case.problem.description.hidden_size)

    def link(wire: Wire) -> Link:
        return Link(latency=wire.latency_seconds, bandwidth=wire.bandwidth, bytes=size)

    links = {"p2p": link(hardware.inside)}
    for last in range(hardware.devices_per_node - 1, case.devices - 1, hardware.devices_per_node):
        for kind in "FB":
            for hop in (f"{last}>{last + 1}", f"{last + 1}>{last}"):
                links[f"{kind}:{hop}"] = link(hardware.across)
    return replace(costs, p2p=0.0, links=links)


@cache
def _read(path: Path) -> Costs:
    return read_costs(path)


def _layer_seconds(file: Costs, layers: int, devices: int) -> dict[str, float]:
    """F, B, I and W of one layer."""
    times = {kind: spread(kind, getattr(file, kind), devices, "stage") for kind in "FBIW"}
    return {kind: math.fsum(seconds) / layers for kind, seconds in times.items() if seconds is not None}


def output_seconds(costs: Costs) -> float:
    """S, C and T of one device; all have the same."""
    times = (costs.S, costs.C, costs.T)
    assert all(isinstance(time, float) for time in times)
    return sum(time for time in times if isinstance(time, float))


def with_output(costs: Costs, seconds: float) -> Costs:
    """`costs` with S, C and T that take so long together."""
    factor = seconds / output_seconds(costs)
    return replace(costs, **{kind: factor * getattr(costs, kind) for kind in "SCT"})


def published_input_seconds(case: Case) -> float:
    """Embedding and its gradient of the whole vocabulary on one device, in the paper's runs: rows are read and written
    both ways, and a gradient of all rows is zeroed and added to another one, both of 16 bits. In its profile the
    backward of the first stage is as much longer (tests/costs/test_analytic.py)."""
    rows, tokens = case.vocabulary * case.model.hidden_size, case.tokens * case.model.hidden_size
    return case.problem.hardware.streaming_seconds(8.0 * (rows + tokens), 4)


# --- steps ---------------------------------------------------------------------------------------------------


def step_seconds(case: Case, configuration: Configuration, costs: Costs) -> float:
    """With the optimizer's step."""
    program = case.problem.programs.of(configuration.recipe, case.microbatches)[1]
    return makespan(program, costs) + end_seconds(case.problem, configuration)


def options_for(schedule: str) -> tuple[tuple[str, Any], ...]:
    """Of its generator."""
    return (("stages_per_device", STAGES_PER_DEVICE),) if "stages_per_device" in options_of(schedule) else ()


def fits(schedule: str, case: Case) -> bool:
    """Has it as many stages as the case?"""
    shape = _shape(schedule, case)
    return shape is not None and shape.placement.stages == case.stages_per_device * case.devices


def _shape(schedule: str, case: Case) -> Shape | None:
    return case.problem.programs.shape(schedule, options_for(schedule), case.devices)


def tries(case: Case, schedule: str, mode: str, source: DataSheet) -> Iterator[tuple[Configuration, Placement]]:
    """Ways to cut the layers: with redistribution such that the longest stage is short, or the busiest device."""
    space = Space(
        schedules=(schedule,),
        stages_per_device=(STAGES_PER_DEVICE,),
        vocabularies=(mode,),
        checkpointing=("none",),
    )
    shape = _shape(schedule, case)
    assert shape is not None
    for configuration in configurations(case.problem, space, case.layout, source.head_layers(case)):
        yield configuration, shape.placement
