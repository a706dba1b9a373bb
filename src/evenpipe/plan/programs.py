"""Orders and programs of configurations, arranged as in the runtime, and extrapolated steps of many microbatches.

Between its warm-up and its end a pipeline repeats itself, so the time of a step grows by the same amount for every
`devices` microbatches more. Two short steps are simulated, whose microbatches leave the same remainder when divided by
the devices (groups of interleaved schedules depend on it), and extrapolated. The memory of a device does not grow any
more, so the shorter step gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from evenpipe.schedule import Costs, Order, Program, generate, plan_program
from evenpipe.schedule.costs import ASSUMED_COPY, Cost
from evenpipe.schedule.effects import EFFECTS, Held, changes
from evenpipe.schedule.passes import Pass, parts_of
from evenpipe.schedule.planning import BARRIERS, costs_of_work
from evenpipe.schedule.timeline import peak_activations
from evenpipe.schedule.transforms.offload import without_offload

from .configurations import Configuration, Options, Problem, shape_of

WAITING, QUEUED = changes({Held.ACTIVATIONS}), changes({Held.WEIGHT_INPUTS})
"""Forwarded stages that wait for B or I, and stages that wait for W."""

SHORT, LONG = {False: 2, True: 3}, {False: 3, True: 4}
"""Microbatches per device, besides the remainder, of the two simulated steps, without and with vocabulary passes or
copies to the host. The lists of the vocabulary transform become periodic from three on: with two, steps of V-shaped
schedules were off by up to 2 %."""

Arranged = tuple[str, Options, int, int, str, tuple[int, ...], tuple[float, ...], float, str, tuple[float, ...]]
"""Everything an order depends on: schedule, its options, devices, microbatches, vocabulary mode, layers per stage,
forward FLOPs per token of each layer, and of the output layer; the choice for activations on the host, as for
`plan_order`, and the relative time of copies, as `OffloadOptions.copy_time`."""


def arranged(problem: Problem, configuration: Configuration, microbatches: int) -> Arranged:
    """Return everything that the order of a configuration depends on, for a step of `microbatches`."""
    offload, options = configuration.offload, configuration.options
    shape = shape_of(configuration.schedule, options, configuration.layout.parallelism.pp)
    if offload == "none" and not (shape is not None and shape.moves):
        offload = "scheduled"  # which is the same
    return (
        configuration.schedule,
        options,
        configuration.layout.parallelism.pp,
        microbatches,
        configuration.vocabulary,
        configuration.layers_per_stage,
        problem.flops,
        problem.head_flops,
        offload,
        configuration.copy_time,
    )


@lru_cache(maxsize=32)
def program_of(key: Arranged) -> tuple[Order, Program]:
    """Return the order and the checked program. Raises InputError if there is none of this size."""
    schedule, options, devices, microbatches, mode, layers_per_stage, flops, head, offload, copy_time = key
    costs = costs_of_work(flops, head, layers_per_stage, devices, mode)
    shape = shape_of(schedule, options, devices)
    moves = shape is not None and shape.moves
    if shape is not None:
        costs = costs.with_copies(shape.placement, copy_time or ASSUMED_COPY)
    if offload != "scheduled" and not moves:  # an order with copies is the order without copies, plus copies
        order, _ = program_of((*key[:-2], "scheduled", ()))
    else:  # modes with the same stage costs have the same order below their vocabulary passes
        copies = costs.O if moves else None
        order = _base_order(schedule, options, devices, microbatches, costs.F, costs.B, copies)
    return plan_program(order, devices, microbatches, mode, costs, offload=offload)


@lru_cache(maxsize=64)
def _base_order(  # noqa: PLR0917 - all of it is the key
    schedule: str,
    options: Options,
    devices: int,
    microbatches: int,
    forward: Cost | None,
    backward: Cost | None,
    copies: Cost | None,
) -> Order:
    costs = Costs(F=forward, B=backward, I=forward, W=forward, O=copies, L=copies)
    return generate(schedule, devices, microbatches, costs=costs, **dict(options))


@dataclass(frozen=True, slots=True)
class InFlight:
    """Activations in flight of an order without vocabulary passes. Lists are per device."""

    stages: tuple[int, ...]
    """Most stage activations."""
    moments: tuple[tuple[tuple[int, int, int], ...], ...]
    """At the same moment: forwarded layers that wait for B or I; layers that wait for W; layers of the device that have
    had a backward, so that their gradients exist. Moments that another one exceeds in all three are left out."""


@lru_cache(maxsize=512)
def in_flight(
    schedule: str, options: Options, devices: int, microbatches: int, layers_per_stage: tuple[int, ...]
) -> InFlight:
    """Return the activations in flight of a schedule's order for equal stages, with everything on the device. With the
    costs of a model some generators hold as much, arranged otherwise."""
    order = _equal_order(schedule, options, devices, microbatches)
    rows = [list(order.passes(device)) for device in range(devices)]
    return InFlight(
        tuple(int(peak_activations(row)) for row in rows),
        tuple(_moments(row, layers_per_stage) for row in rows),
    )


@lru_cache(maxsize=64)
def _equal_order(schedule: str, options: Options, devices: int, microbatches: int) -> Order:
    return without_offload(generate(schedule, devices, microbatches, **dict(options)))


def _moments(row: list[Pass], layers_per_stage: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    seen: set[tuple[int, int, int]] = set()
    begun: set[int] = set()
    waiting = queued = gradients = 0
    for item in row:
        for part in parts_of(item):
            assert part.stage is not None
            layers = layers_per_stage[part.stage]
            if Held.ACTIVATIONS in EFFECTS[part.kind].frees and part.stage not in begun:
                begun.add(part.stage)
                gradients += layers
            waiting += layers * WAITING.get(part.kind, 0)
            queued += layers * QUEUED.get(part.kind, 0)
            seen.add((waiting, queued, gradients))
    kept: list[tuple[int, int, int]] = []
    for one in sorted(seen, reverse=True):  # by falling number of waiting layers: only earlier ones can exceed it
        if not any(other[1] >= one[1] and other[2] >= one[2] for other in kept):
            kept.append(one)
    return tuple(kept)


def short_steps(devices: int, microbatches: int, *, planned: bool) -> tuple[int, ...]:
    """Return the numbers of microbatches to simulate for a step of `microbatches`: two short ones, or the step itself.
    planned: the order has vocabulary passes or copies to the host."""
    rest = microbatches % devices
    short, long = SHORT[planned] * devices + rest, LONG[planned] * devices + rest
    return (short, long) if microbatches > long else (microbatches,)


def steps_of(configuration: Configuration) -> tuple[int, ...]:
    """Return the same for a configuration."""
    layout, planned = configuration.layout, bool(BARRIERS[configuration.vocabulary]) or configuration.moves
    return short_steps(layout.parallelism.pp, layout.microbatches, planned=planned)


def extended(times: Sequence[float], sizes: Sequence[int], microbatches: int, least: float) -> float:
    """Return the time of a step of `microbatches` from those of `sizes`, which `short_steps` gave. least: the work of
    the busiest device per microbatch, the least growth of a step."""
    if len(sizes) == 1:
        return times[0]
    slope = max(least, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    return times[1] + slope * (microbatches - sizes[1])
