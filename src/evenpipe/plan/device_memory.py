"""Memory of every device of a configuration, as `evenpipe estimate` computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from evenpipe.costs.step import Parameters
from evenpipe.memory.device import copied_bytes
from evenpipe.memory.estimate import device_estimate, settings_of
from evenpipe.memory.optimizers import Trained
from evenpipe.memory.parameters import Held
from evenpipe.memory.programs import Planned
from evenpipe.memory.states import Casts, part_bytes, state_bytes
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Program

from .configuration import Configuration
from .problem import Problem


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The memory of a device."""

    peak_bytes: int
    """Most bytes allocated."""
    spare: int
    """Memory left if everything besides tensors takes the most ever measured; negative if it does not fit."""
    event: str
    """The moment of the peak."""
    host_bytes: int = 0
    """Most bytes of activations in the host's memory."""

    @property
    def fits(self) -> bool:
        """Whether it certainly fits, according to calibration."""
        return self.spare >= 0


def device_uses(problem: Problem, configuration: Configuration, program: Program) -> tuple[DeviceUse, ...]:
    """Return the memory of all devices. Raises InputError for a model that cannot be cut this way."""
    return tuple(device_use(problem, configuration, program, device) for device in range(program.devices))


def device_use(problem: Problem, configuration: Configuration, program: Program, device: int) -> DeviceUse:
    """Return the memory of a device. Raises as `device_uses`."""
    source, recipe = problem.bytes, _running(configuration, program)
    share = configuration.host_share or 0.0
    settings = settings_of(problem.description, recipe, offloaded=share, **how_estimated(problem))
    source.parameters.check(recipe.parallelism.tp)
    estimate = device_estimate(source, source.planned(recipe), settings, device, problem.memory_bytes)
    return DeviceUse(
        peak_bytes=estimate.peak_allocated,
        spare=problem.memory_bytes - round(estimate.process.process.high),
        event=estimate.binding_event,
        host_bytes=estimate.host,
    )


def copied(problem: Problem, configuration: Configuration, program: Program) -> tuple[int, ...]:
    """Return, by stage, the bytes of a copy of a microbatch's activations to the host. Arguments and errors as for
    `device_uses`."""
    settings = settings_of(problem.description, _running(configuration, program), **how_estimated(problem))
    return copied_bytes(problem.bytes, Planned(program, configuration.layers_per_stage), settings)


def _running(configuration: Configuration, program: Program) -> Recipe:
    """Return the recipe of a configuration that runs this program of its schedule."""
    recipe = configuration.recipe
    batch = replace(recipe.batch, microbatches=program.microbatches)
    return replace(recipe, batch=batch, schedule=program, schedule_options=())


def check_estimate(problem: Problem, layout: Recipe) -> None:
    """Raise InputError if the memory of a layout cannot be estimated, whatever the schedule."""
    source, layers = problem.bytes, {id(work): layer for layer, work in enumerate(problem.works)}
    settings = settings_of(problem.description, layout, **how_estimated(problem))
    for piece in settings.pieces(problem.description, source.row_work)[:1]:
        for layer in layers.values():
            source.layer(layer, settings, split=False, piece=piece)


def how_estimated(problem: Problem) -> dict[str, Any]:
    """Return the arguments that estimates of all configurations share."""
    return {
        "kernels": problem.kernels_name,
        "dtypes": problem.dtypes,
        "hardware": problem.hardware,
        "skew": problem.skew,
        "loss": problem.loss,
    }


class StateFloor(NamedTuple):
    """The least bytes that parameters take."""

    always: float
    """Parameters and optimizer state, from the first pass to the last."""
    gradients: float
    """Gradients that may be allocated as late as the first backward."""
    gathered: float
    """Parameters gathered for their passes, beyond what stays allocated afterwards."""


def state_floor(problem: Problem, layout: Recipe, parameters: Parameters, host_share: float = 0.0) -> StateFloor:
    """Return the least bytes of a device with these parameters. host_share: share of the optimizer's state on the
    host."""
    sizes, floors = layout.parallelism, []
    for count in (sizes.shards, sizes.shards // sizes.ep):
        key = (_floor_of_each, sizes.zero, sizes.reshard, sizes.prefetch, count, host_share)
        floors.append(problem.once(key, partial(_floor_of_each, problem, layout, count, host_share)))
    kinds = zip(*floors, strict=True)
    return StateFloor(*(sum(count * each for count, each in zip(parameters, kind, strict=True)) for kind in kinds))


def _floor_of_each(problem: Problem, layout: Recipe, replicas: int, host_share: float) -> StateFloor:
    """Return the same for a single parameter that this many replicas share."""
    parallelism, framework = layout.parallelism, problem.framework
    elements = 10**6
    held, dtypes = Held(elements=elements, optimized=Trained(elements=elements)), problem.dtypes
    zero = parallelism.zero
    casts: Casts = "instead" if problem.kernels.parameters == "cast" else "none"
    state = state_bytes(held, dtypes, framework, zero=zero, replicas=replicas, casts=casts, offloaded=host_share)
    if framework.gradients_exist:
        return StateFloor(state.total / elements, 0.0, 0.0)
    buffers = part_bytes(held, dtypes, framework, zero=zero, replicas=replicas)
    always, gathered = state.total - state.gradients, 0
    if buffers.reduced is not None and not parallelism.reshard and parallelism.prefetch is None:
        summed = min(buffers.gathered, buffers.reduced - buffers.gradients)  # gathered, and later summed
        always, gathered = always + summed, buffers.gathered - summed
    return StateFloor(always / elements, buffers.gradients / elements, gathered / elements)
