"""One configuration: what every device holds, how much it has to compute again for that, and how long a step takes.

Recomputation where it is left open (`LEAST`): a device keeps everything if that fits; else as many of its layers as
needed keep the results of products only ("selective"); else all do, and as many as needed keep their input only
("full"). Layers of the device's first stages come first: there most microbatches are in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evenpipe.costs.analytic import step_end_seconds
from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Placement, Program
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.passes import Kind
from evenpipe.schedule.planning import BARRIERS
from evenpipe.simulate import simulate

from .configurations import LEAST, Configuration, Problem, costs_of
from .device_memory import DeviceUse, device_uses
from .programs import arranged, extended, program_of, short_steps

TRIES = 4
"""How often layers are added to those that are computed again, where the first guess does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What came of a configuration. Times in seconds, lists per device."""

    configuration: Configuration
    """With one checkpointing policy per layer where it fits."""
    devices: tuple[DeviceUse, ...]
    """Memory; of a plan that does not fit, with the policy that needs least."""
    kept: tuple[DeviceUse, ...] = ()
    """Memory if nothing were computed again, where that does not fit."""
    seconds: float = math.inf
    """Of a step; infinite where it does not fit."""
    pipeline_seconds: float = 0.0
    """Of that, passes and transfers."""
    end_seconds: float = 0.0
    """Of that, the sum over replicas and the optimizer."""
    busy: tuple[float, ...] = ()
    """Time in passes per microbatch."""
    again: tuple[float, ...] = ()
    """Of that, what is computed a second time."""
    fault: str = ""
    """Why there is no such plan, apart from memory."""
    late: bool = False
    """It was given up: `seconds` is what its step takes at least."""

    @property
    def fits(self) -> bool:
        """On every device."""
        return not self.fault and all(device.fits for device in self.devices)

    @property
    def worst(self) -> int:
        """The device that lacks most memory, or has least to spare."""
        return min(range(len(self.devices)), key=lambda device: self.devices[device].spare)

    @property
    def bubble_rate(self) -> float:
        """Idle share of the passes' time on the busiest device."""
        microbatches = self.configuration.layout.microbatches
        return 1 - max(self.busy) * microbatches / self.pipeline_seconds if self.pipeline_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON and for the cache."""
        layout = self.configuration.layout
        parallelism = layout.parallelism
        return {
            "name": self.configuration.name,
            **{axis: getattr(parallelism, axis) for axis in ("dp", "tp", "cp", "pp", "zero")},
            "microbatch_size": layout.microbatch_size,
            "microbatches": layout.microbatches,
            "schedule": self.configuration.schedule,
            "options": dict(self.configuration.options),
            "vocabulary": self.configuration.vocabulary,
            "layers_per_stage": list(self.configuration.layers_per_stage),
            "checkpointing": list(self.configuration.checkpointing),
            "fits": self.fits,
            "fault": self.fault,
            "seconds": None if math.isinf(self.seconds) else self.seconds,
            "pipeline_seconds": self.pipeline_seconds,
            "end_seconds": self.end_seconds,
            "bubble_rate": self.bubble_rate if self.busy else None,
            "busy": list(self.busy),
            "again": list(self.again),
            "devices": [device.to_dict() for device in self.devices],
            "devices_if_nothing_is_computed_again": [device.to_dict() for device in self.kept],
        }


def evaluate(problem: Problem, configuration: Configuration, limit: float = math.inf) -> Evaluation:
    """Memory first, then time. A configuration that has no order is told apart from one that does not fit; one whose
    step turns out to take `limit` seconds or more is not looked at any further."""
    layout = configuration.layout
    devices = layout.parallelism.pp
    sizes = short_steps(devices, layout.microbatches, sharded=bool(BARRIERS[configuration.vocabulary]))
    try:
        program = program_of(arranged(problem, configuration, sizes[0]))[1]
        uses, policies, kept = _memory(problem, configuration, program)
    except InputError as error:
        return Evaluation(configuration=configuration, devices=(), fault=str(error))
    if not all(use.fits for use in uses):
        return Evaluation(configuration=configuration, devices=uses, kept=kept)
    chosen = replace(configuration, checkpointing=policies)
    return replace(timed(problem, chosen, limit), devices=uses, kept=kept)


def timed(problem: Problem, configuration: Configuration, limit: float = math.inf) -> Evaluation:
    """Time only, with one checkpointing policy per layer. `limit` as for `evaluate`."""
    layout, sharded = configuration.layout, bool(BARRIERS[configuration.vocabulary])
    sizes = short_steps(layout.parallelism.pp, layout.microbatches, sharded=sharded)
    program = program_of(arranged(problem, configuration, sizes[0]))[1]
    placement = program.placement
    costs = costs_of(problem, configuration, placement)
    plain = replace(configuration, checkpointing=("none",) * problem.layers)
    busy = work_of(program, costs)
    mode = configuration.vocabulary
    without = least_work(costs_of(problem, plain, placement), placement, mode)
    found = Evaluation(
        configuration=configuration,
        devices=(),
        end_seconds=end_seconds(problem, configuration, placement),
        busy=tuple(busy),
        again=tuple(
            max(0.0, one - other) for one, other in zip(least_work(costs, placement, mode), without, strict=True)
        ),
        late=True,
    )
    least = max(busy) * layout.microbatches
    if least + found.end_seconds < limit:
        times = [simulate(program, costs).makespan]
        least = max(least, times[0] + max(busy) * (layout.microbatches - sizes[0]))
        if least + found.end_seconds < limit:
            for size in sizes[1:]:
                program = program_of(arranged(problem, configuration, size))[1]
                times.append(simulate(program, costs).makespan)
            least = extended(times, sizes, layout.microbatches, max(busy))
            found = replace(found, late=False)
    return replace(found, seconds=least + found.end_seconds, pipeline_seconds=least)


# --- time ----------------------------------------------------------------------------------------------------


def work_of(program: Program, costs: Costs) -> list[float]:
    """Seconds in passes per microbatch, per device."""
    order, times = program.order, PassTimes(costs, program.placement)
    whole = [math.fsum(times.of(item, device) for item in order.passes(device)) for device in range(order.devices)]
    return [seconds / order.microbatches for seconds in whole]


def least_work(costs: Costs, placement: Placement, mode: str) -> list[float]:
    """As `work_of`, of an order of any kind: backwards are whole or split, whatever is shorter."""
    work = [0.0] * placement.devices
    by_kind = costs.stage_times(placement)
    forward, backward, inputs, weights = (by_kind[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    assert forward and backward and inputs and weights
    for stage, device in enumerate(placement.stage_device):
        work[device] += forward[stage] + min(backward[stage], inputs[stage] + weights[stage])
    if BARRIERS[mode]:
        for times in costs.device_times(placement).values():
            work = [done + more for done, more in zip(work, times or (), strict=True)]
    return work


def end_seconds(problem: Problem, configuration: Configuration, placement: Placement) -> float:
    """What follows the last pass, on the device with the most parameters. All devices are busy with it."""
    setting = problem.setting(configuration.layout, together=True)
    most = max(parameters_per_device(problem, configuration, placement))
    return step_end_seconds(most, setting, zero=configuration.layout.parallelism.zero)


def parameters_per_device(problem: Problem, configuration: Configuration, placement: Placement) -> list[float]:
    """As many as a device holds, all divided by the tensor axis: norms are not, and are a few thousandths."""
    held = [0.0] * placement.devices
    first = 0
    for stage, count in enumerate(configuration.layers_per_stage):
        held[placement.device_of(stage)] += sum(work.parameters for work in problem.works[first : first + count])
        first += count
    matrix = float(problem.description.vocabulary_size * problem.description.hidden_size)
    if BARRIERS[configuration.vocabulary]:
        matrices = 1 if problem.description.tied else 2
        held = [count + matrices * matrix / placement.devices for count in held]
    else:
        held[placement.first_device] += matrix
        if not problem.description.tied or placement.first_device != placement.last_device:
            held[placement.last_device] += matrix
    return [count / configuration.layout.parallelism.tp for count in held]


# --- memory --------------------------------------------------------------------------------------------------


def _memory(
    problem: Problem, configuration: Configuration, program: Program
) -> tuple[tuple[DeviceUse, ...], tuple[str, ...], tuple[DeviceUse, ...]]:
    """What devices hold, the policy of each layer, and what devices would hold if nothing were computed again."""
    layers = problem.layers
    if configuration.checkpointing != (LEAST,):
        given = configuration.checkpointing
        policies = given * layers if len(given) == 1 else given
        return device_uses(problem, configuration, program, policies), policies, ()
    kept = ("none",) * layers
    none = device_uses(problem, configuration, program, kept)
    if all(use.fits for use in none):
        return none, kept, ()
    full = device_uses(problem, configuration, program, ("full",) * layers)
    if not all(use.fits for use in full):
        return full, ("full",) * layers, none
    selective = device_uses(problem, configuration, program, ("selective",) * layers)
    held = layers_of_devices(configuration, program.placement)
    wanted = {
        device: _Wanted.of(none[device], selective[device], full[device], len(held[device]))
        for device in range(program.devices)
        if not none[device].fits
    }
    for _ in range(TRIES):
        policies = _policies(layers, held, wanted)
        uses = device_uses(problem, configuration, program, policies)
        lacking = [device for device, use in enumerate(uses) if not use.fits]
        if not lacking:
            return uses, policies, none
        for device in lacking:
            wanted[device] = wanted[device].more(len(held[device]))
    policies = _policies(layers, held, {device: _Wanted("full", len(held[device])) for device in wanted})
    return device_uses(problem, configuration, program, policies), policies, none


@dataclass(frozen=True, slots=True)
class _Wanted:
    """`count` layers of a device have the policy; the others the one before it."""

    policy: str
    count: int

    @classmethod
    def of(cls, none: DeviceUse, selective: DeviceUse, full: DeviceUse, layers: int) -> _Wanted:
        """By straight lines between what was evaluated."""
        if selective.fits:
            return cls("selective", _share(none, selective, layers))
        return cls("full", _share(selective, full, layers))

    def more(self, layers: int) -> _Wanted:
        """One layer more."""
        if self.count < layers:
            return _Wanted(self.policy, self.count + 1)
        return _Wanted("full", 1 if self.policy == "selective" else layers)


def _share(more: DeviceUse, less: DeviceUse, layers: int) -> int:
    freed = more.peak_bytes - less.peak_bytes
    return min(layers, max(1, math.ceil(layers * -more.spare / freed))) if freed > 0 else layers


def _policies(layers: int, held: Sequence[Sequence[int]], wanted: dict[int, _Wanted]) -> tuple[str, ...]:
    policies = ["none"] * layers
    for device, choice in wanted.items():
        for place, layer in enumerate(held[device]):
            before = "none" if choice.policy == "selective" else "selective"
            policies[layer] = choice.policy if place < choice.count else before
    return tuple(policies)


def layers_of_devices(configuration: Configuration, placement: Placement) -> list[list[int]]:
    """Numbers of the layers that each device holds, in the order of its stages."""
    held: list[list[int]] = [[] for _ in range(placement.devices)]
    first = 0
    for stage, count in enumerate(configuration.layers_per_stage):
        held[placement.device_of(stage)] += range(first, first + count)
        first += count
    return held
