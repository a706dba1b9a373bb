"""Orders and programs of configurations, arranged as in the runtime, and extrapolated steps of many microbatches.

Between its warm-up and its end a pipeline repeats itself, so the time of a step grows by the same amount for every
`devices` microbatches more. Two short steps are simulated, whose microbatches leave the same remainder when divided by
the devices (groups of interleaved schedules depend on it), and extrapolated; the second is the step itself if that has
no more microbatches than both. The memory of a device does not grow any more, so the shorter step gives it.

Not every order repeats itself soon. With a remainder, devices of interleaved schedules use up slack for many groups
before one waits; lists of V-Half and V-Min with shards may have no period at all, and which of the lists that are tried
is the best depends on the length. So a search times whole steps of the plans that it finds fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from evenpipe.errors import InputError
from evenpipe.recipe.batch_shape import BatchShape
from evenpipe.recipe.layout import ModelCosts, arranging_times, order_by
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.parallelism import Parallelism
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, Order, Placement, Program, VocabularyMode, generate
from evenpipe.schedule.costs import EQUAL_COSTS
from evenpipe.schedule.held import peak_activations
from evenpipe.schedule.layers import in_flight_per_layer
from evenpipe.schedule.passes import Kind
from evenpipe.schedule.planning import with_offload
from evenpipe.schedule.registry import takes_costs
from evenpipe.schedule.transforms.communication import add_communication
from evenpipe.schedule.transforms.offload import offloaded, without_offload
from evenpipe.schedule.transforms.slices import add_slices

from .in_flight import HeldByStage, InFlight

SHORT = {False: 2, True: 3}
"""Microbatches per device, besides the remainder, of the shorter simulated step: 3 with vocabulary passes or copies to
the host, whose lists repeat themselves only from about three on, and with a remainder."""

APART = {False: (1, 12), True: (2, 48)}
"""Least difference of the two steps, in microbatches per device, and in all. Warm-up and end of an order that repeats
itself every 2, 3, 4, 6 or 8 microbatches differ by up to half a microbatch between lengths."""

SLICED = 3
"""Microbatches besides these, if sequences are cut: a step repeats itself only after some whole sequences."""

Options = tuple[tuple[str, Any], ...]
"""Options of a generator, as in a `Recipe`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of a schedule that do not depend on its size."""

    placement: Placement
    split: bool
    """Whether its backwards are split into I and W."""
    by_costs: bool
    """Whether its generator plans by costs, so activations in flight are only nearly those of equal stages."""
    moves: bool
    """Whether it moves activations to the host."""
    slices: bool
    """Whether sequences can be cut into slices."""
    in_flight: tuple[float, ...]
    """As `in_flight_per_layer`."""
    moments: tuple[tuple[tuple[float, float], ...], ...]
    """By device, at the same moment: microbatches of a layer that wait for B or I, and that wait for W, on average over
    its stages. Moments that another one exceeds in both are left out."""
    at_the_end: float
    """Microbatches that the last stage holds at most, also for W."""


class Programs:
    """The orders and programs of one model, for the time of a search: equal ones are arranged once."""

    def __init__(self, model: ModelCosts) -> None:
        self._model = model
        self.shape = cache(_shape)
        self.in_flight = lru_cache(maxsize=512)(self._in_flight)
        self._program = lru_cache(maxsize=64)(self._arranged)
        self._generated = lru_cache(maxsize=64)(_generated)
        self._time_independent_order = lru_cache(maxsize=64)(_time_independent_order)
        self._by_stage = lru_cache(maxsize=512)(_held_by_stage)

    def of(self, recipe: Recipe, microbatches: int, *, roughly: bool = False) -> tuple[Order, Program]:
        """Return the order and the program of a recipe with the name of a schedule, for a step of `microbatches`. The
        program is not proven sound again: the run that it is a plan of does that.

        roughly: if its order does not depend on times, its transfers stand as among passes of equal length. So layouts
            share one program. Steps take up to 0.3 % longer than with programs of their own (0.06 % among the plans of
            Llama-3.1-405B), and devices hold 0.05 % more or less on average, 1.4 % at most.

        Raises InputError if there is none of this size.
        """
        shape, split = self._shape_of(recipe), recipe.layers_per_stage
        assert split is not None
        options = recipe.offload
        offload = OffloadOptions(
            activations=options.activations, copy_time=options.copy_time, host_memory=options.host_memory
        )
        if offload.activations == "none" and not shape.moves:
            offload = replace(offload, activations="scheduled")  # which is the same
        if roughly and _fixed(shape, recipe.vocabulary, offload):
            costs = EQUAL_COSTS
        else:
            costs = arranging_times(recipe, self._model, shape.placement, split)
        return self._program(
            Recipe(  # everything that an order depends on
                parallelism=Parallelism(pp=recipe.devices),
                batch=BatchShape(microbatches=microbatches, slices=recipe.slices),
                schedule=recipe.schedule,
                schedule_options=recipe.schedule_options,
                vocabulary=recipe.vocabulary,
                offload=offload,
                costs=costs,
            )
        )

    def _shape_of(self, recipe: Recipe) -> Shape:
        assert isinstance(recipe.schedule, str)
        shape = self.shape(recipe.schedule, recipe.schedule_options, recipe.devices)
        assert shape is not None, "the space has no schedules without an order"
        return shape

    def _arranged(self, recipe: Recipe) -> tuple[Order, Program]:
        shape = self._shape_of(recipe)
        assert recipe.costs is not None and isinstance(recipe.schedule, str)
        costs = recipe.costs.with_copies(shape.placement, recipe.offload.copy_time)
        if recipe.offload.activations != "scheduled" and not shape.moves:
            # An order with copies is the order without copies, plus copies.
            order, _ = self._program(replace(recipe, offload=OffloadOptions()))
            order = with_offload(order, costs, recipe.offload.activations, recipe.offload.host_memory)
        elif _fixed(shape, recipe.vocabulary, recipe.offload):
            order = self._time_independent_order(replace(recipe, vocabulary="first-last", costs=None))
        else:
            order = order_by(recipe, costs, recipe.vocabulary, self._make)
        return order, add_communication(order, costs, recipe.sharing)

    def _make(self, schedule: str, devices: int, units: int, costs: Costs | None = None, **options: Any) -> Order:
        """Return the same as `generate`, with equal arguments once: modes with the same stage costs have the same order
        below their vocabulary passes."""
        key = tuple(options.items())
        shape = self.shape(schedule, key, devices)
        assert shape is not None
        times = None
        if costs is not None and shape.by_costs:
            copies = costs.O if shape.moves else None
            times = Costs(F=costs.F, B=costs.B, I=costs.I, W=costs.W, p2p=costs.p2p, O=copies, L=copies)
        return self._generated(schedule, key, (devices, units), times)

    def _in_flight(
        self,
        schedule: str,
        options: Options,
        size: tuple[int, int],
        layers_per_stage: tuple[int, ...],
        slices: int,
    ) -> InFlight:
        """Return the activations in flight of a schedule's order for equal stages, with everything on the device. With
        the costs of a model some generators hold as much, arranged otherwise. size: as for `_generated`."""
        return self._by_stage(schedule, options, size, slices).of(layers_per_stage)


def _shape(schedule: str, options: Options, devices: int) -> Shape | None:
    """Return the shape of a schedule on this many devices; None if it has no order for them."""
    try:
        order: Order = generate(schedule, devices, 2 * devices, **dict(options))
    except InputError:
        return None
    placement = order.placement
    moments = []
    for device, device_moments in enumerate(HeldByStage(order).of((1,) * placement.stages).moments):
        stages = len(placement.stages_of(device))
        moments.append(
            tuple(dict.fromkeys((moment.waiting / stages, moment.queued / stages) for moment in device_moments))
        )
    return Shape(
        placement=placement,
        split=any(item.kind is Kind.I for item in order.passes(0)),
        by_costs=takes_costs(schedule),
        moves=bool(offloaded(order)),
        slices=_can_be_cut(order),
        in_flight=in_flight_per_layer(order),
        moments=tuple(moments),
        at_the_end=peak_activations(
            order.passes(placement.last_device),
            tuple(float(stage == placement.last_stage) for stage in range(placement.stages)),
        ),
    )


def _can_be_cut(order: Order) -> bool:
    try:
        add_slices(order, 2)
    except InputError:
        return False
    return True


def _generated(schedule: str, options: Options, size: tuple[int, int], costs: Costs | None) -> Order:
    """size: devices, and slices of all microbatches. costs: of a slice on average; None: they make no difference."""
    return generate(schedule, *size, costs=costs, **dict(options))


def _fixed(shape: Shape, vocabulary: str, offload: OffloadOptions) -> bool:
    """Return whether an order is the same for all times of passes."""
    return (
        not (shape.by_costs or shape.moves or VocabularyMode(vocabulary).sharded) and offload.activations == "scheduled"
    )


def _time_independent_order(recipe: Recipe) -> Order:
    return order_by(recipe, None, recipe.vocabulary)


def _held_by_stage(schedule: str, options: Options, size: tuple[int, int], slices: int) -> HeldByStage:
    return HeldByStage(add_slices(without_offload(generate(schedule, *size, **dict(options))), slices))


def short_steps(devices: int, microbatches: int, *, planned: bool, slices: int = 1) -> tuple[int, ...]:
    """Return the numbers of microbatches to simulate for a step of `microbatches`: two short ones, or the step itself.
    planned: the order has vocabulary passes or copies to the host. slices: of a microbatch, each as long as one."""
    period = devices // math.gcd(devices, slices)
    extra = microbatches % period
    irregular = planned or extra > 0
    if slices > 1:
        extra += period * math.ceil(SLICED / period)
    per_device, fewest = APART[irregular]
    short = SHORT[irregular] * period + extra
    long = short + period * max(per_device, math.ceil(fewest / (slices * period)))
    if microbatches <= long:
        return (microbatches,)
    return short, long if microbatches > short + long else microbatches


def extended(times: Sequence[float], sizes: Sequence[int], microbatches: int, least: float) -> float:
    """Return the time of a step of `microbatches` from those of `sizes`, which `short_steps` gave. least: the work of
    the busiest device per microbatch, the least growth of a step."""
    if len(sizes) == 1:
        return times[0]
    slope = max(least, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    return times[1] + slope * (microbatches - sizes[1])
