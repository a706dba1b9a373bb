"""Evaluate one configuration: the memory of every device, the recomputation that it needs, and the time of a step.

Recomputation, if it is open (`LEAST`): a device keeps everything if that fits. Otherwise as many of its layers as
needed keep only the results of products ("selective"). If that is not enough, all of them do, and as many as needed
keep only their input ("full"). Layers of the device's first stages come first, because these have the most microbatches
in flight.

Copies to the host, if they are open: none if everything fits; otherwise the copies that cost no time ("free"), and
recomputation for the remaining memory.

The share of the optimizer's moments on the host, if it is open: 0 if everything fits; otherwise 0 or the least share
that avoids recomputation, whichever is faster.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

from evenpipe.costs.step import Overlap, Parameters, step_end_seconds
from evenpipe.costs.timed_model import computing
from evenpipe.errors import InputError
from evenpipe.recipe.layout import bounds_of
from evenpipe.recipe.parallelism import AXES
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, Placement, Program
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.passes import Kind
from evenpipe.simulate import makespan

from .configuration import LEAST, Configuration, costs_of
from .device_memory import DeviceUse, copied, device_use, device_uses, state_floor
from .problem import Problem
from .programs import extended

SHARES = 4
"""The share of the optimizer's moments on the host is a multiple of 1 over this number."""

COPY_STEPS = 100
"""The relative time of copies is rounded up to multiples of 1 over this number: orders are arranged by it, and so few
of them differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result for a configuration. Times are in seconds; tuples have one entry per device."""

    configuration: Configuration
    """The evaluated configuration, with one checkpointing policy per layer if it fits."""
    devices: tuple[DeviceUse, ...]
    """Memory; if the plan does not fit, the memory with the policy that needs the least."""
    without_recomputation: tuple[DeviceUse, ...] = ()
    """Memory without recomputation, if that does not fit."""
    seconds: float = math.inf
    """Time of a step; infinite if it does not fit."""
    pipeline_seconds: float = 0.0
    """Part of the step spent on passes and transfers."""
    end_seconds: float = 0.0
    """Part of the step spent on summing gradients over replicas and on the optimizer."""
    busy: tuple[float, ...] = ()
    """Time spent in passes per microbatch."""
    recomputation: tuple[float, ...] = ()
    """Part of `busy` spent on recomputation."""
    fault: str = ""
    """Why there is no such plan, for reasons other than memory."""
    late: bool = False
    """Whether the evaluation was abandoned: `seconds` is then a lower bound on the step time."""

    @property
    def fits(self) -> bool:
        return not self.fault and all(device.fits for device in self.devices)

    @property
    def worst(self) -> int:
        """Return the device that lacks the most memory, or has the least left."""
        return min(range(len(self.devices)), key=lambda device: self.devices[device].spare)

    @property
    def bubble_rate(self) -> float:
        """Idle share of the pass time on the busiest device."""
        return 1 - self._share(max(self.busy)) if self.pipeline_seconds else 0.0

    @property
    def mean_busy(self) -> float:
        """Share of the pass time that devices compute, on average over all of them."""
        return self._share(sum(self.busy) / len(self.busy)) if self.pipeline_seconds else 0.0

    def _share(self, busy: float) -> float:
        """Return `busy` seconds per microbatch as a share of the pass time."""
        return busy * self.configuration.recipe.microbatches / self.pipeline_seconds

    def to_dict(self) -> dict[str, Any]:
        recipe = self.configuration.recipe
        return {
            "name": self.configuration.name,
            **{axis: getattr(recipe.parallelism, axis) for axis in (*AXES, "zero")},
            "microbatch_size": recipe.batch.microbatch_size,
            "microbatches": recipe.microbatches,
            "slices": recipe.slices,
            "context_exchange": recipe.parallelism.context_exchange,
            "schedule": self.configuration.schedule,
            "options": recipe.options,
            "vocabulary": recipe.vocabulary,
            "layers_per_stage": list(self.configuration.layers_per_stage),
            "checkpointing": list(self.configuration.checkpointing),
            "offload": self.configuration.offload,
            "host_share": self.configuration.host_share,
            "copy_time": list(self.configuration.copy_time),
            "fits": self.fits,
            "fault": self.fault,
            "seconds": None if math.isinf(self.seconds) else self.seconds,
            "pipeline_seconds": self.pipeline_seconds,
            "end_seconds": self.end_seconds,
            "mean_busy": self.mean_busy if self.busy else None,
            "bubble_rate": self.bubble_rate if self.busy else None,
            "busy": list(self.busy),
            "again": list(self.recomputation),
            "devices": [asdict(device) for device in self.devices],
            "devices_if_nothing_is_computed_again": [asdict(device) for device in self.without_recomputation],
        }


def evaluate(problem: Problem, configuration: Configuration, limit: float = math.inf) -> Evaluation:
    """Evaluate time and memory. A configuration without an order is distinguished from one that does not fit. The
    evaluation is abandoned once the step is known to take `limit` seconds or more."""
    if configuration.host_share is not None:
        return _evaluate(problem, configuration, limit)
    resident = _evaluate(problem, replace(configuration, host_share=0.0), limit)
    if resident.fault or not (resident.without_recomputation or not resident.fits):
        return resident
    share = _share_on_host(problem, resident)
    offloaded = _evaluate(problem, replace(configuration, host_share=share), min(limit, resident.seconds))
    return offloaded if offloaded.fits and (not resident.fits or offloaded.seconds < resident.seconds) else resident


def _share_on_host(problem: Problem, resident: Evaluation) -> float:
    """Return the least share, in quarters, with which everything else certainly fits on the devices; 1 if none does."""
    configuration, uses = resident.configuration, resident.without_recomputation or resident.devices
    parameters = parameters_per_device(problem, configuration)
    share = max(
        -use.spare / _moments(problem, configuration.recipe, held) for use, held in zip(uses, parameters, strict=True)
    )
    return min(1.0, math.ceil(SHARES * share) / SHARES)


def _evaluate(problem: Problem, configuration: Configuration, limit: float) -> Evaluation:
    """Evaluate with a given share of the optimizer's moments on the host."""
    try:
        # Time first, if it may show that the step is too long: for many models memory takes longer to evaluate.
        known = not configuration.moves and limit < math.inf
        quickest = timed(problem, _without_recomputation(configuration), limit) if known else None
        if quickest is not None and quickest.late:
            return replace(quickest, configuration=configuration)
        memory = _memory(problem, configuration, configuration.steps[0], limit)
    except InputError as error:
        return Evaluation(configuration=configuration, devices=(), fault=str(error))
    if not memory.fits or memory.late:
        return replace(memory, configuration=configuration)
    decided = memory.configuration
    if quickest is None or set(decided.checkpointing) != set(quickest.configuration.checkpointing):
        quickest = timed(problem, decided, limit)
    return replace(
        quickest, configuration=decided, devices=memory.devices, without_recomputation=memory.without_recomputation
    )


def _without_recomputation(configuration: Configuration) -> Configuration:
    """Return the configuration without recomputation, unless it prescribes some."""
    return (
        configuration.decided(activation_checkpointing="none")
        if "activation_checkpointing" in configuration.open
        else configuration
    )


def timed_whole(problem: Problem, plan: Evaluation) -> Evaluation:
    """Return an evaluated plan with the time of its whole step simulated, which takes longer than extrapolation."""
    sizes = (plan.configuration.recipe.microbatches,)
    if plan.configuration.steps[-1:] == sizes:
        return plan
    simulated = timed(problem, plan.configuration, sizes=sizes)
    return replace(plan, seconds=simulated.seconds, pipeline_seconds=simulated.pipeline_seconds)


def timed(
    problem: Problem,
    configuration: Configuration,
    limit: float = math.inf,
    *,
    sizes: Sequence[int] | None = None,
) -> Evaluation:
    """Evaluate only the time, of an evaluated configuration or of one without copies that has one checkpointing policy
    per layer. `limit` as for `evaluate`. sizes: microbatches of the simulated steps, as returned by `short_steps`."""
    recipe, sizes = configuration.recipe, sizes or configuration.steps
    evaluation = _with_least_work(problem, configuration)
    if evaluation.seconds >= limit:
        return evaluation
    program = problem.arranged(recipe, sizes[0])
    costs = costs_of(problem, configuration)
    busy = work_of(program, costs)
    pipeline_seconds, times = max(busy) * recipe.microbatches, list[float]()
    for size in sizes:
        if pipeline_seconds + evaluation.end_seconds >= limit:
            break
        times.append(makespan(problem.arranged(recipe, size), costs))
        pipeline_seconds = max(pipeline_seconds, times[-1] + max(busy) * (recipe.microbatches - size))
    else:
        pipeline_seconds = extended(times, sizes, recipe.microbatches, max(busy))
        evaluation = replace(evaluation, late=False)
    return replace(
        evaluation,
        busy=tuple(busy),
        seconds=pipeline_seconds + evaluation.end_seconds,
        pipeline_seconds=pipeline_seconds,
    )


def _with_least_work(problem: Problem, configuration: Configuration) -> Evaluation:
    """Return what is known about the time without an order: the step takes at least the work of the busiest device."""
    busy = least_work(problem, configuration)
    plain = least_work(problem, configuration.decided(activation_checkpointing="none"))
    pipeline_seconds, end = max(busy) * configuration.recipe.microbatches, end_seconds(problem, configuration)
    return Evaluation(
        configuration=configuration,
        devices=(),
        seconds=pipeline_seconds + end,
        pipeline_seconds=pipeline_seconds,
        end_seconds=end,
        busy=tuple(busy),
        recomputation=tuple(max(0.0, total - plain_seconds) for total, plain_seconds in zip(busy, plain, strict=True)),
        late=True,
    )


# --- time ----------------------------------------------------------------------------------------------------


def work_of(program: Program, costs: Costs) -> list[float]:
    """Return, per device, the seconds spent in passes per microbatch."""
    order, times = program.order, PassTimes(costs, program.placement, program.slices)
    seconds_per_device = [
        math.fsum(times.of(item, device) for item in order.passes(device)) for device in range(order.devices)
    ]
    return [seconds / order.microbatches for seconds in seconds_per_device]


def least_work(problem: Problem, configuration: Configuration) -> list[float]:
    """Return the same as `work_of` for any order: with whole or split backwards, whichever are shorter."""
    recipe = configuration.recipe
    sizes = computing(recipe.parallelism), recipe.batch.microbatch_size, recipe.slices
    split = configuration.placement, configuration.layers_per_stage, recipe.activation_checkpointing, recipe.vocabulary
    return problem.cached((least_work, sizes, split), lambda: _least_work(problem, configuration))


def _least_work(problem: Problem, configuration: Configuration) -> list[float]:
    costs, placement = costs_of(problem, configuration), configuration.placement
    work, slices = [0.0] * placement.devices, configuration.recipe.slices
    by_kind = costs.stage_times(placement)
    forward, backward, inputs, weights = (by_kind[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    assert forward and backward and inputs and weights
    for stage, device in enumerate(placement.stage_device):
        work[device] += forward[stage] + min(backward[stage], inputs[stage] + weights[stage])
    if configuration.recipe.mode.sharded:
        for times in costs.device_times(placement).values():
            work = [seconds + extra for seconds, extra in zip(work, times or (), strict=True)]
    return [slices * seconds for seconds in work]


def end_seconds(problem: Problem, configuration: Configuration) -> float:
    """Return the time after the last pass, on the device with the most parameters. All devices are busy during it."""
    recipe, parameters = configuration.recipe, parameters_per_device(problem, configuration)
    device = max(range(len(parameters)), key=lambda device: parameters[device].all)
    largest, setting = parameters[device], problem.setting(recipe, all_devices=True)
    overlapped = overlapped_passes(problem, configuration, device)
    seconds = step_end_seconds(largest, setting, zero=recipe.parallelism.zero, overlap=overlapped)
    if not configuration.host_share:
        return seconds
    # Moments on the host are copied in and out at the same time, overlapped with the shorter update (`HostAdamW`).
    moved = configuration.host_share * _moments(problem, recipe, largest)
    return seconds + moved / problem.hardware.host_bandwidth


def overlapped_passes(problem: Problem, configuration: Configuration, device: int) -> Overlap:
    """Return the passes that a device computes while replicas exchange its parameters and gradients."""
    recipe, stages = configuration.recipe, configuration.placement.stages_of(device)
    by_layer, by_part = exchanged_parts(problem, recipe)
    if recipe.parallelism.replicas == 1 or not by_part:
        return Overlap()
    layers = sum(configuration.layers_per_stage[stage] for stage in stages)
    by_kind = costs_of(problem, configuration).stage_times(configuration.placement)
    forward, backward, inputs, weights = (by_kind[kind] or () for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    return Overlap(
        parts=max(1, layers) if by_layer else len(stages),
        forward=recipe.slices * sum(forward[stage] for stage in stages),
        backward=recipe.slices * sum(min(backward[stage], inputs[stage] + weights[stage]) for stage in stages),
        times=recipe.microbatches if by_layer else 1,
        every_pass=by_layer,
    )


def exchanged_parts(problem: Problem, layout: Recipe) -> tuple[bool, bool]:
    """Return whether replicas exchange layer by layer, for every microbatch, and whether they exchange part by part at
    all. Frameworks whose programs do not gather parameters hold the full parameters of a layer at a time."""
    exchanges, zero = problem.implementation.exchanges, layout.parallelism.zero
    by_layer = zero == 3 and exchanges in {"layers", "whole"}
    return by_layer, by_layer or (zero in {0, 3} and exchanges != "whole")


def _moments(problem: Problem, recipe: Recipe, parameters: Parameters) -> float:
    """Return the bytes of a device's optimizer moments that may be on the host."""
    on_device, on_host = (state_floor(problem, recipe, parameters, share)[0] for share in (0.0, 1.0))
    return on_device - on_host


def parameters_per_device(problem: Problem, configuration: Configuration) -> list[Parameters]:
    """Return the number of parameters on each device. All are divided by the size of the tensor axis; norms, which are
    not sharded, are only a few thousandths of them."""
    recipe, sizes = configuration.recipe, configuration.recipe.parallelism
    split = configuration.placement, configuration.layers_per_stage, recipe.mode.sharded
    key = (parameters_per_device, split, sizes.tp, sizes.ep)
    return problem.once(key, lambda: _parameters_per_device(problem, configuration))


def _parameters_per_device(problem: Problem, configuration: Configuration) -> list[Parameters]:
    recipe, placement = configuration.recipe, configuration.placement
    works = [[problem.works[layer] for layer in layers] for layers in layers_of_devices(configuration)]
    held = [float(sum(work.parameters - work.expert_parameters for work in device_works)) for device_works in works]
    experts = [sum(work.expert_parameters for work in device_works) / recipe.parallelism.ep for device_works in works]
    ranks = recipe.parallelism.tp
    if recipe.mode.sharded:
        held = [count + ranks * vocabulary_shard(problem, recipe).others for count in held]
    else:
        matrix = float(problem.description.vocabulary_size * problem.description.hidden_size)
        held[placement.first_device] += matrix
        if not problem.description.tied or placement.first_device != placement.last_device:
            held[placement.last_device] += matrix
    return [Parameters(count / ranks, expert_count / ranks) for count, expert_count in zip(held, experts, strict=True)]


def vocabulary_shard(problem: Problem, recipe: Recipe) -> Parameters:
    """Return the parameters of the vocabulary layers on each device of a pipeline that shards these layers."""
    matrices, description = 1 if problem.description.tied else 2, problem.description
    elements = float(matrices * description.vocabulary_size * description.hidden_size)
    return Parameters(elements / recipe.devices / recipe.parallelism.tp, 0.0)


# --- memory --------------------------------------------------------------------------------------------------


def _memory(problem: Problem, configuration: Configuration, microbatches: int, limit: float) -> Evaluation:
    """Return the memory of a configuration, with its policies and copies; not computed if the configuration is late."""
    if configuration.offload != LEAST:
        return _recomputing(problem, configuration, microbatches, limit)
    policies = _fixed_policies(problem, configuration) or ("none",) * problem.layers
    scheduled = _memory_with(problem, configuration.with_offload("scheduled"), policies, microbatches)
    if scheduled.fits:
        return scheduled
    return replace(
        _recomputing(problem, configuration.with_offload("free"), microbatches, limit),
        without_recomputation=scheduled.devices,
    )


def _fixed_policies(problem: Problem, configuration: Configuration) -> tuple[str, ...] | None:
    """Return the checkpointing policies, one per layer; None if they are open."""
    return (
        None
        if "activation_checkpointing" in configuration.open
        else configuration.recipe.checkpointing_of(problem.layers)
    )


def _memory_with(
    problem: Problem, configuration: Configuration, policies: tuple[str, ...], microbatches: int, *, quick: bool = False
) -> Evaluation:
    """Return the memory with these policies. quick: in an order arranged without recomputation, which is arranged only
    once for all policies and needs about as much memory."""
    configuration = configuration.decided(activation_checkpointing=policies)
    if configuration.moves:
        configuration = _with_copies(problem, configuration, microbatches)
    recipe = configuration.decided(activation_checkpointing="none").recipe if quick else configuration.recipe
    devices = device_uses(problem, configuration, problem.arranged(recipe, microbatches))
    return Evaluation(configuration=configuration, devices=devices)


def _with_copies(problem: Problem, configuration: Configuration, microbatches: int) -> Configuration:
    """Return the configuration with the time of each stage's copy on this hardware, in seconds and relative to the
    stage's forward and backward."""
    program = problem.arranged(configuration.with_offload("none").recipe, microbatches)
    sizes = copied(problem, configuration, program)
    seconds = tuple(size / problem.hardware.host_bandwidth for size in sizes)
    times = costs_of(problem, configuration).stage_times(configuration.placement)
    forward, backward = times[Kind.F], times[Kind.B]
    assert forward is not None and backward is not None
    shares = (
        copy / (forward_seconds + backward_seconds)
        if forward_seconds + backward_seconds
        else 0.0  # a stage without layers
        for copy, forward_seconds, backward_seconds in zip(seconds, forward, backward, strict=True)
    )
    rounded = tuple(math.ceil(COPY_STEPS * share) / COPY_STEPS for share in shares)
    return replace(configuration.with_offload(configuration.offload, copy_time=rounded), copy_seconds=seconds)


def _recomputing(problem: Problem, configuration: Configuration, microbatches: int, limit: float) -> Evaluation:
    """Return the memory with as little recomputation as needed, if recomputation is open."""
    fixed_policies = _fixed_policies(problem, configuration)
    if fixed_policies is not None:
        return _memory_with(problem, configuration, fixed_policies, microbatches)
    keeping_all = _memory_with(problem, configuration, ("none",) * problem.layers, microbatches)
    if keeping_all.fits:
        return keeping_all
    layers, ladders, steps = layers_of_devices(configuration), dict[int, list[tuple[str, ...]]](), dict[int, int]()

    def policies() -> tuple[str, ...]:
        chosen = ["none"] * problem.layers
        for device, step in steps.items():
            for layer, policy in zip(layers[device], ladders[device][step], strict=True):
                chosen[layer] = policy
        return tuple(chosen)

    # In an order arranged without recomputation, which needs about as much memory.
    program = problem.arranged(keeping_all.configuration.decided(activation_checkpointing="none").recipe, microbatches)

    def use(device: int, step: int) -> DeviceUse:
        steps[device] = step
        return device_use(
            problem, keeping_all.configuration.decided(activation_checkpointing=policies()), program, device
        )

    def fits(device: int, step: int) -> bool:
        return use(device, step).fits

    for device, memory in enumerate(keeping_all.devices):
        if memory.fits:
            continue
        count = len(layers[device])
        ladders[device] = _ladder(count)
        if use(device, count).peak_bytes >= memory.peak_bytes:  # with "none" the host holds more than this accounts for
            ladders[device] = _ladder(count, middle="none")
        last = len(ladders[device]) - 1
        if not fits(device, last):
            full = _memory_with(problem, configuration, ("full",) * problem.layers, microbatches, quick=True)
            return replace(full, without_recomputation=keeping_all.devices)
        steps[device] = bisect_left(range(last), True, 1, key=partial(fits, device))
    lower_bound = _with_least_work(problem, configuration.decided(activation_checkpointing=policies()))
    if lower_bound.seconds >= limit:
        return lower_bound

    def evaluated() -> Evaluation:
        return replace(
            _memory_with(problem, configuration, policies(), microbatches), without_recomputation=keeping_all.devices
        )

    attempt = evaluated()
    while overfull := [device for device, use in enumerate(attempt.devices) if not use.fits]:
        if all(device in steps and steps[device] == len(ladders[device]) - 1 for device in overfull):
            return attempt
        for device in overfull:
            ladders.setdefault(device, _ladder(len(layers[device])))
            steps[device] = min(steps.get(device, 0) + 1, len(ladders[device]) - 1)
        attempt = evaluated()
    while configuration.moves and any(steps.values()):  # with less recomputation, copies take less time and are more
        steps = {device: max(0, step - 1) for device, step in steps.items()}
        lighter = evaluated()
        if not lighter.fits:
            break
        attempt = lighter
    return attempt


def _ladder(layers: int, middle: str = "selective") -> list[tuple[str, ...]]:
    """Return the policies of a device's layers, in steps of increasing recomputation. middle: the policy of layers
    before they keep only their input."""
    steps = [("none", middle)] * (middle != "none") + [(middle, "full")]
    ladder = [("none",) * layers]
    for weaker, stronger in steps:
        ladder += [(stronger,) * count + (weaker,) * (layers - count) for count in range(1, layers + 1)]
    return ladder


def layers_of_devices(configuration: Configuration) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each device's layers, in the order of its stages."""
    return _layers_of_devices(configuration.placement, configuration.layers_per_stage)


@lru_cache(maxsize=4096)
def _layers_of_devices(placement: Placement, layers_per_stage: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    held: list[tuple[int, ...]] = [()] * placement.devices
    for device, bounds in zip(placement.stage_device, bounds_of(layers_per_stage), strict=True):
        held[device] += tuple(range(*bounds))
    return tuple(held)
