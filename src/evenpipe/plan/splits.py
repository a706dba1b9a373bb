"""Candidates for the number of layers of each stage.

These are an even split, or with "redistribute" the splits that minimize the time of the busiest device. If devices then
lack memory, there is also the best split when each device recomputes as much as its memory requires: fewer layers where
many microbatches are in flight or a vocabulary matrix is held, more where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from evenpipe.costs.hardware import known_gpu
from evenpipe.costs.step import Parameters
from evenpipe.costs.timed_model import arranging_model, extra_times, layer_times, split_times
from evenpipe.errors import InputError
from evenpipe.recipe.layout import layers_per_stage, runnable_order
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import VocabularyMode, even_split
from evenpipe.schedule.layers import best_split, over_stages, splits_by_cost

from .bounds import logits_bytes, usable
from .configuration import POLICIES, Configuration
from .device_memory import state_floor
from .evaluation import Evaluation, evaluate, layers_of_devices, parameters_per_device
from .layer_memory import LayerUse, mean_uses
from .problem import Problem
from .programs import Shape

DIGITS = 2
"""Decimal places of the times, in layers, by which layers are split, so that few splits differ."""

TRIES = 4
"""Number of splits of a run to evaluate besides the split by time, each with the room that the previous ones
revealed."""

Split = tuple[int, ...]


def splits(problem: Problem, layout: Recipe, shape: Shape, mode: str, head_layers: float) -> tuple[Split, ...]:
    """Return the distinct candidates for a schedule and a vocabulary mode: an even split and its mirror image, or with
    "redistribute" the splits of `splits_by_cost`, with and without regard to activations in flight. The split by memory
    comes first, if it is another one; "first-last" keeps the usual splits.

    head_layers: the output layer's time, in layers.
    """
    even = even_split(problem.layers, shape.placement.stages)
    candidates: tuple[Split, ...] = (even, even[::-1])
    if mode == "redistribute":
        relative = _relative_times(problem, layout)
        key = (splits_by_cost, shape.placement, shape.in_flight, round(head_layers, DIGITS), relative)
        candidates = problem.once(key, partial(_by_cost, shape, key[3], relative))
    if mode != "first-last" and layout.devices > 1 and not shape.moves:
        recipe = replace(layout, vocabulary=mode, layers_per_stage=candidates[0])
        usual = Configuration(recipe=recipe, shape=shape, open=("activation_checkpointing",))
        candidates = (*_by_memory(problem, usual, 0.0 if VocabularyMode(mode).sharded else head_layers), *candidates)
    return tuple(dict.fromkeys(candidates))


def split_that_fits(problem: Problem, recipe: Recipe, host_share: float = 0.0) -> Split | None:
    """Return the layers of each stage with which a run of a "redistribute" recipe fits, if its split by time does not;
    None if that split fits by the estimate, if none fits, or if there is no choice.

    problem: the machine and the batch of the run. host_share: share of the optimizer's moments on the host. Unlike a
    plan, the run recomputes exactly what its recipe says. Raises InputError for options that the schedule does not
    have, and for more stages than layers.
    """
    is_fixed = recipe.layers_per_stage is not None or recipe.batch.slices == "auto"
    if recipe.vocabulary != "redistribute" or recipe.devices == 1 or is_fixed or not isinstance(recipe.schedule, str):
        return None
    shape = problem.programs.shape(recipe.schedule, recipe.schedule_options, recipe.devices)
    if shape is None or not set(recipe.checkpointing_of(problem.layers)) <= set(POLICIES):
        return None
    model = arranging_model(problem.description, recipe, known_gpu(problem.hardware.name), problem.dtype, problem.loss)
    usual_split = layers_per_stage(recipe, model, runnable_order(recipe))
    configuration = Configuration(
        recipe=replace(recipe, layers_per_stage=usual_split), shape=shape, host_share=host_share
    )
    if configuration.moves:
        return None
    evaluation = evaluate(problem, configuration)
    if evaluation.fits or evaluation.fault:
        return None
    layers, head = split_times(problem, recipe)
    devices = _Devices.of(problem, configuration, head / layers[-1])
    for _ in range(TRIES):
        split = devices.best(problem.layers)
        if split is None:
            return None
        evaluation = evaluate(problem, configuration.decided(layers_per_stage=split))
        if evaluation.fits:
            return split
        if evaluation.fault:
            return None
        devices = devices.as_evaluated(evaluation)
    return None


def _relative_times(problem: Problem, layout: Recipe) -> tuple[float, ...]:
    """Return the time of each layer, relative to the last one."""
    times = layer_times(problem, replace(layout, vocabulary="redistribute"))
    seconds = [time.forward + time.backward for time in times]
    return tuple(round(time / seconds[-1], DIGITS) for time in seconds)


def _by_cost(shape: Shape, head: float, relative: Sequence[float]) -> tuple[Split, ...]:
    """Return the splits by time. With memory to spare, more layers on the first devices are better, in 1F1B by one
    forward per device: a long first stage computes ahead while it waits for its first backward; the last one cannot."""
    in_flight = shape.in_flight, [0.0] * len(shape.in_flight)
    return tuple(
        dict.fromkeys(split for held in in_flight for split in splits_by_cost(relative, shape.placement, head, held))
    )


def _by_memory(problem: Problem, usual: Configuration, head_layers: float) -> tuple[Split, ...]:
    """Return the best split with the recomputation that it needs, if recomputation is open; empty if the usual split
    fits without any. head_layers: the time of the output layer on the last device, in layers."""
    devices = _Devices.of(problem, usual, head_layers)
    held = map(len, layers_of_devices(usual))
    if all(devices.shortfall(device, layers) <= 0 for device, layers in enumerate(held)):
        return ()
    split = devices.best(problem.layers)
    return () if split is None else (split,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    """Times and bytes of the devices of a layout. Times are relative to that of the last layer. Memory of layers and
    the cost of recomputation are averages over layers."""

    shape: Shape
    cumulative_times: tuple[float, ...]
    """Cumulative time: entry n is the time of the first n layers."""
    alike: bool
    """Whether all layers take the same time."""
    heads: tuple[float, ...]
    """By device, the time of its part of the output layer."""
    room: tuple[float, ...]
    """By device, the bytes available for its layers."""
    bytes: tuple[tuple[float, ...], ...]
    """By device, the most bytes of a layer under each policy: none, selective, full; only the recipe's if not open."""
    recomputation: tuple[float, ...]
    """Recomputation time under each of these policies except the first."""

    @classmethod
    def of(cls, problem: Problem, configuration: Configuration, head_layers: float) -> _Devices:
        """Return the devices of a configuration with any split. head_layers: the output layer's time on the last
        device, in layers."""
        recipe, placement, layers = configuration.recipe, configuration.placement, problem.layers
        setting, barriers = problem.setting(recipe), recipe.mode.barriers
        times = layer_times(problem, recipe)
        relative = _relative_times(problem, recipe)
        uses = mean_uses(problem, recipe, split=configuration.shape.split)
        passing = max(use.passing for use in uses)
        dense, experts = _parameters(problem, recipe.parallelism.tp, recipe.parallelism.ep)
        state = sum(state_floor(problem, recipe, Parameters(math.fsum(dense), math.fsum(experts)))) / layers
        room, free = [], usable(problem, recipe)
        logits = [
            size * (1 if barriers else configuration.shape.at_the_end)
            for size in logits_bytes(problem, configuration, setting)
        ]
        for device, held in enumerate(layers_of_devices(configuration)):
            parameters = parameters_per_device(problem, configuration)[device]
            ends = Parameters(max(0.0, parameters.others - sum(dense[layer] for layer in held)), 0.0)
            room.append(free - sum(state_floor(problem, recipe, ends)) - logits[device] - passing)
        policies: tuple[str, ...] = POLICIES
        if "activation_checkpointing" not in configuration.open:  # if policies differ, the one that keeps most
            policies = (min(configuration.checkpointing, key=POLICIES.index),)
        held_by_barriers = barriers * placement.devices / placement.stages
        in_flight = [
            [(min(waiting + held_by_barriers, recipe.microbatches), queued) for waiting, queued in moments]
            for moments in configuration.shape.moments
        ]
        return cls(
            shape=configuration.shape,
            cumulative_times=(0.0, *accumulate(relative)),
            alike=len(set(relative)) == 1,
            heads=tuple(head_layers * (device == placement.last_device) for device in range(placement.devices)),
            room=tuple(room),
            bytes=tuple(_most_bytes(state, uses, moments, policies) for moments in in_flight),
            recomputation=tuple(
                max(0.0, sum(extra_times(problem, recipe, policy)) / layers / (times[-1].forward + times[-1].backward))
                for policy in policies[1:]
            ),
        )

    @property
    def mean(self) -> float:
        """Mean time of a layer."""
        return self.cumulative_times[-1] / (len(self.cumulative_times) - 1)

    def as_evaluated(self, evaluation: Evaluation) -> _Devices:
        """Return the devices with no more room than the evaluation of a split revealed."""
        held = map(len, layers_of_devices(evaluation.configuration))
        devices = zip(self.room, held, self.bytes, evaluation.devices, strict=True)
        room = tuple(min(free, layers * sizes[0] + use.spare) for free, layers, sizes, use in devices)
        return replace(self, room=room)

    def best(self, layers: int) -> Split | None:
        """Return the split that minimizes the time of the busiest device; None if no split fits."""
        placement = self.shape.placement
        try:
            if placement.stages == placement.devices:
                return best_split(layers, placement.stages, self.load_of_stage, alike=self.alike)
            split = best_split(layers, placement.devices, self.load, alike=True)
        except InputError:
            return None
        return over_stages(split, placement, self.heads[placement.last_device], self.mean)

    def shortfall(self, device: int, layers: int) -> float:
        """Return the bytes that a device lacks for this many layers without recomputation; negative if there is
        room."""
        return layers * self.bytes[device][0] - self.room[device]

    def load(self, device: int, first: int, last: int) -> tuple[float, float]:
        """Return the `Load` of a device with these layers: its time with recomputation, and the bytes that it lacks
        without it."""
        return self._load(device, last - first, (last - first) * self.mean)

    def load_of_stage(self, stage: int, first: int, last: int) -> tuple[float, float]:
        """Return the same for the device of a stage, if it has only this stage."""
        return self._load(
            self.shape.placement.device_of(stage),
            last - first,
            self.cumulative_times[last] - self.cumulative_times[first],
        )

    def _load(self, device: int, layers: int, seconds: float) -> tuple[float, float]:
        shortfall = self.shortfall(device, layers)
        return seconds + self.heads[device] + self._recomputation_time(device, layers, shortfall), max(0.0, shortfall)

    def _recomputation_time(self, device: int, layers: int, shortfall: float) -> float:
        """Return the time of the least recomputation: some layers use the next policy, or all of them do and some use
        the one after it."""
        if shortfall <= 0:
            return 0.0
        seconds = 0.0
        for (larger, smaller), next_seconds in zip(pairwise(self.bytes[device]), self.recomputation, strict=True):
            if layers * (larger - smaller) >= shortfall:
                return layers * seconds + math.ceil(shortfall / (larger - smaller)) * max(0.0, next_seconds - seconds)
            shortfall, seconds = shortfall - layers * (larger - smaller), next_seconds
        return math.inf


def _parameters(problem: Problem, ranks: int, members: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the parameters of each layer on one tensor rank and expert-group member: without experts, and of
    experts."""

    def parameters() -> tuple[tuple[float, ...], tuple[float, ...]]:
        works = problem.works
        dense = tuple((work.parameters - work.expert_parameters) / ranks for work in works)
        return dense, tuple(work.expert_parameters / ranks / members for work in works)

    return problem.once((_parameters, ranks, members), parameters)


def _most_bytes(
    state: float, uses: Sequence[LayerUse], moments: Sequence[tuple[float, float]], policies: Sequence[str]
) -> tuple[float, ...]:
    """Return the most bytes of a layer under each policy. state: the bytes that are always allocated."""
    sizes = [state + max(held * use.waiting + later * use.queued for held, later in moments) for use in uses]
    smallest = tuple(accumulate(sizes, min))
    return tuple(smallest[POLICIES.index(policy)] for policy in policies)
