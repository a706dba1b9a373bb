"""Lower bounds on the step times of configurations, each computed in microseconds, so that the search can skip most.

    layout          the mean work of all devices, or the work of the fewest layers that the busiest device can have,
                    whichever is larger, x microbatches + the end of the step
    configuration   first the work of the busiest device with its recomputation, then the bound of
                    `simulate.best_bound` with that recomputation; + the end of the step

The necessary recomputation follows from a lower bound on memory: parameters and their states; the activations of the
layers in flight before vocabulary passes are added (`layer_memory`); and, for the output layer, one exponential per
logit of a microbatch. If a device exceeds its memory even when every layer keeps only its input, the configuration
cannot fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import add

from evenpipe.costs.analytic import Setting, head_time, least_seconds, whole_head_time
from evenpipe.costs.step import Overlap, Parameters, step_end_seconds
from evenpipe.costs.timed_model import extra_times, layer_times
from evenpipe.memory.reserved import CUDA, communicators_of, process_memory
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, Kind, Placement
from evenpipe.simulate import best_bound
from evenpipe.simulate.bounds import either_backward
from evenpipe.sizes import GIB

from .configuration import LEAST, POLICIES, Configuration, costs_of
from .device_memory import state_floor
from .evaluation import (
    end_seconds,
    exchanged_parts,
    layers_of_devices,
    least_work,
    parameters_per_device,
    vocabulary_shard,
)
from .in_flight import InFlight
from .layer_memory import LayerUse, least_floors, least_uses
from .problem import Problem


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the step time. shortfall: the least bytes that `device` lacks, with full recomputation; 0 if it
    may fit. recomputation: the least seconds of recomputation per microbatch on each device, as far as known.
    """

    seconds: float
    shortfall: int = 0
    device: int = 0
    recomputation: tuple[float, ...] = ()


def layout_bound(problem: Problem, layout: Recipe, host_share: float = 0.0, *, slices: bool = True) -> Bound:
    """Return a bound that holds for all configurations of a layout. host_share: the largest share of the optimizer's
    moments on the host. slices: some configurations may cut sequences."""
    parallelism = layout.parallelism
    setting = problem.setting(layout)
    description = problem.description
    # As if there were slices, which need one gather of keys less and have no eager attention.
    span = (0, problem.sequence) if slices or parallelism.cp > 1 else None
    work, busiest = math.inf, math.inf
    for mode in ("first-last", "vocab-2"):
        times = layer_times(problem, replace(layout, vocabulary=mode), span)
        layers = sorted(time.forward + time.backward for time in times)
        work = min(work, sum(layers))
        busiest = min(busiest, sum(layers[: -(-len(layers) // parallelism.pp)]))
    shape = description.hidden_size, description.vocabulary_size
    work += min(head_time(*shape, setting).seconds, least_seconds(whole_head_time(*shape, setting)))
    matrices = 1 if description.tied else 2
    experts = sum(layer.expert_parameters for layer in problem.works)
    dense = sum(layer.parameters for layer in problem.works) - experts
    dense += matrices * description.vocabulary_size * description.hidden_size
    devices = parallelism.tp * parallelism.pp
    share = Parameters(dense / devices, experts / devices / parallelism.ep)
    step_setting = problem.setting(layout, all_devices=True)
    pass_seconds = max(work / parallelism.pp, busiest) * layout.microbatches
    by_layer, by_part = exchanged_parts(problem, layout)
    parts = -(-problem.layers // parallelism.pp) if by_part else 1
    exchanges = layout.microbatches if by_layer else 1
    overlapped = Overlap(parts, math.inf, math.inf, exchanges)  # the most parts there can be, all but one overlapped
    seconds = pass_seconds + step_end_seconds(share, step_setting, zero=parallelism.zero, overlap=overlapped)
    shortfall = state_floor(problem, layout, share, host_share)[0] - usable(problem, layout)
    return Bound(seconds, max(0, math.ceil(shortfall)))


def work_bound(problem: Problem, configuration: Configuration, *, traced: bool = False) -> Bound:
    """Return the bound of a configuration: the work of its busiest device, including recomputation. traced: trace
    the memory of layers, which takes longer."""
    recomputation, shortfall, device = _memory_floor(problem, configuration, traced=traced)
    busy = least_work(problem, configuration)
    work = (
        max(seconds + repeated for seconds, repeated in zip(busy, recomputation, strict=True))
        * configuration.recipe.microbatches
    )
    return Bound(work + end_seconds(problem, configuration), shortfall, device, tuple(recomputation))


def order_bound(problem: Problem, configuration: Configuration, recomputation: Sequence[float] = ()) -> float:
    """Return a bound of a configuration without recomputation except that of `work_bound`: no order of its passes
    that holds as few microbatches is shorter."""
    shape, mode = configuration.shape, configuration.recipe.mode
    stages = shape.placement.stages // shape.placement.devices
    slices = configuration.recipe.slices
    costs_of_slices = list(costs_of(problem, configuration).by_slice(slices))
    if stages == slices == 1:  # otherwise it is unknown which passes take longer
        costs_of_slices, recomputation = (
            [_longer_backwards(costs, shape.placement, recomputation) for costs in costs_of_slices],
            (),
        )
    bound = best_bound(
        shape.placement,
        configuration.recipe.microbatches * slices,
        [either_backward(costs, shape.placement) for costs in costs_of_slices] if shape.split else costs_of_slices,
        split=shape.split,
        vocabulary=mode,
        max_in_flight=[held + mode.barriers * stages for held in _in_flight(problem, configuration).stages],
        recomputation=[seconds / slices for seconds in recomputation],
        proved=True,
    )
    return bound.value + end_seconds(problem, configuration)


def _longer_backwards(costs: Costs, placement: Placement, recomputation: Sequence[float]) -> Costs:
    """Return costs for one stage per device whose backwards begin with the recomputation."""
    times = costs.stage_times(placement)
    backwards, inputs = times[Kind.B], times[Kind.I]
    assert backwards and inputs
    repeated = [recomputation[device] if recomputation else 0.0 for device in placement.stage_device]
    return replace(costs, B=tuple(map(add, backwards, repeated)), I=tuple(map(add, inputs, repeated)))


def _in_flight(problem: Problem, configuration: Configuration) -> InFlight:
    recipe, slices = configuration.recipe, configuration.recipe.slices
    size = recipe.devices, configuration.steps[0] * slices
    return problem.programs.in_flight(
        configuration.schedule, recipe.schedule_options, size, configuration.layers_per_stage, slices
    )


def usable(problem: Problem, layout: Recipe) -> float:
    """Return the bytes that a device has for tensors if everything else takes the most memory ever measured."""
    if problem.hardware.torch_device == "cpu":
        return problem.memory_bytes
    framework, parallelism = problem.framework, layout.parallelism
    transfers = (2 + 2 * layout.mode.sharded) * (layout.devices > 1)  # one communicator each, shared per kind
    key = communicators_of(parallelism, framework, transfers, vocabulary=layout.mode.sharded), parallelism.cp > 1
    return problem.once((usable, *key), partial(_usable, problem, *key))


def _usable(problem: Problem, communicators: int, context_parallel: bool) -> float:
    process_bytes = [
        process_memory(size, CUDA, communicators=communicators, context_parallel=context_parallel).process.high
        for size in (0, GIB)
    ]
    return (problem.memory_bytes - process_bytes[0]) / (process_bytes[1] - process_bytes[0]) * GIB


def _memory_floor(problem: Problem, configuration: Configuration, *, traced: bool) -> tuple[list[float], int, int]:
    """Return the least seconds of recomputation per microbatch on each device, the bytes that a device lacks even with
    full recomputation (0 if none does), and that device."""
    recipe, shape = configuration.recipe, configuration.shape
    setting, devices = problem.setting(recipe), recipe.devices
    barriers = recipe.mode.barriers
    parameters = parameters_per_device(problem, configuration)
    share = configuration.host_share
    on_host = 1.0 if share is None else share
    in_flight = _in_flight(problem, configuration)
    shard_state = state_floor(problem, recipe, vocabulary_shard(problem, recipe) if barriers else Parameters(0.0, 0.0))
    logits = logits_bytes(problem, configuration, setting)
    # Any share of the activations may be on the host.
    uses = (
        [LayerUse(0.0, 0.0, 0.0)] * len(POLICIES)
        if configuration.moves
        else least_uses(problem, recipe, split=shape.split)
        if traced
        else least_floors(problem, recipe)
    )
    turns_back = shape.placement == problem.once((Placement, devices), lambda: Placement.v_shape(devices))
    extra = [extra_times(problem, recipe, policy) for policy in POLICIES[1:]]
    turning, sharpest = min(use.turning for use in uses), min(use.sharpest for use in uses)
    policy_or_least = configuration.checkpointing[0]
    recomputation = [0.0] * devices
    tolerance = 0.1 * problem.memory_bytes if shape.by_costs else 0.0
    free = usable(problem, recipe)
    for device, layers in enumerate(layers_of_devices(configuration)):
        stages = shape.placement.stages_of(device)
        # Each barrier keeps one more microbatch's activation of every stage; with looped stages, of one stage.
        barrier_layers = barriers * (len(layers) if turns_back else len(layers) / len(stages))
        state = state_floor(problem, recipe, parameters[device], on_host)
        room = free + (tolerance - state.always)
        gradients = (state.gradients - shard_state.gradients) / max(1, len(layers))
        gathered = (state.gathered - shard_state.gathered) / max(1, len(layers))
        # The most layers released before the backward of a given slice begins.
        earlier = len(layers) * (recipe.slices - 1)
        # A device's only stage keeps a microbatch's logits until W; with several stages, a long queue may hold none.
        queued_logits = logits[device] if len(stages) == 1 else 0.0
        held = [
            max(
                # The next backward starts with all of this except what is queued and, without I and W, the logits.
                max(
                    (waiting + min(barrier_layers, ahead)) * use.waiting
                    + max(
                        queued * use.queued + (queued_logits if queued else 0.0),
                        max(logits[device], turning) if waiting else 0.0,
                    ),
                    (waiting + min(barrier_layers, ahead) - earlier) * use.waiting + sharpest
                    if waiting > earlier
                    else 0.0,
                )
                + begun * gradients
                + opened * gathered
                # After the last forward, S and T may be complete.
                + (shard_state.gradients + shard_state.gathered if begun and ahead else 0.0)
                for waiting, queued, begun, opened, ahead in in_flight.moments[device]
            )
            for use in uses
        ]
        none, selective, full = accumulate(held, min)
        needed = full if policy_or_least == LEAST else held[POLICIES.index(policy_or_least)]
        if needed > room:
            return recomputation, math.ceil(needed - room), device
        if policy_or_least == LEAST and none > room:
            selective_seconds, full_seconds = (sum(times[layer] for layer in layers) for times in extra)
            # With several stages, layers of those with more microbatches in flight free more memory.
            count = len(layers) if len(stages) == 1 else 0
            if selective <= room:
                recomputation[device] = selective_seconds * _share(none - room, none - selective, count)
            else:
                recomputation[device] = selective_seconds + (full_seconds - selective_seconds) * _share(
                    selective - room, selective - full, count
                )
    return recomputation, 0, 0


def _share(shortfall: float, freed: float, layers: int) -> float:
    """Return the share of a device's layers that must recompute, if recomputation of all of them frees `freed` bytes;
    a whole number of layers if `layers` is not 0."""
    share = shortfall / max(1.0, freed)
    return math.ceil(layers * share) / layers if layers else share


def logits_bytes(problem: Problem, configuration: Configuration, setting: Setting) -> list[float]:
    """Return the bytes of a microbatch's logits, or of tensors of that size, per device."""
    placement = configuration.shape.placement
    devices = placement.devices
    if setting.kernels.loss == "chunked":
        return [0.0] * devices
    size = float(setting.tokens * problem.description.vocabulary_size // setting.tensor * setting.element)
    size /= configuration.recipe.slices
    if configuration.recipe.mode.sharded:
        return [size / devices] * devices
    return [size if device == placement.last_device else 0.0 for device in range(devices)]
