"""Orders and programs of configurations, arranged as in the runtime, and extrapolated steps of many microbatches.

Between its warm-up and its end a pipeline is periodic, so each additional `devices` microbatches lengthen the step by
the same time. Two short steps are simulated and extrapolated. Their numbers of microbatches leave the same remainder
when divided by the number of devices, because groups of interleaved schedules depend on it. The second one is the step
itself if that has no more microbatches than both together. The memory of a device does not grow any more, so it is
taken from the shorter step.

Not every order becomes periodic soon. With a remainder, the devices of interleaved schedules use up slack for many
groups before one waits. Lists of V-Half and V-Min with shards may have no period at all, and which of the candidate
lists is best depends on the length. So a search times whole steps of the plans that it finds fastest.
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
"""Microbatches per device, besides the remainder, of the shorter simulated step: 3 with a remainder, and with
vocabulary passes or copies to the host, whose lists become periodic only after about three."""

APART = {False: (1, 12), True: (2, 48)}
"""Least difference of the two steps, in microbatches per device and in total. The warm-up and the end of an order with
a period of 2, 3, 4, 6 or 8 microbatches differ by up to half a microbatch between lengths."""

SLICED = 3
"""Additional microbatches if sequences are cut: a step becomes periodic only after some whole sequences."""

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
    """As returned by `in_flight_per_layer`."""
    moments: tuple[tuple[tuple[float, float], ...], ...]
    """By device, at one moment each: microbatches of a layer that wait for B or I, and that wait for W, averaged over
    the device's stages. Moments that another one exceeds in both are left out."""
    at_the_end: float
    """The most microbatches that the last stage holds, including those for W."""


class Programs:
    """The orders and programs of a model during a search: equal ones are arranged only once."""

    def __init__(self, model: ModelCosts) -> None:
        self._model = model
        self.shape = cache(_shape)
        self.in_flight = lru_cache(maxsize=512)(self._in_flight)
        self._program = lru_cache(maxsize=64)(self._arranged)
        self._generated = lru_cache(maxsize=64)(_generated)
        self._time_independent_order = lru_cache(maxsize=64)(_time_independent_order)
        self._by_stage = lru_cache(maxsize=512)(_held_by_stage)

    def of(self, recipe: Recipe, microbatches: int, *, roughly: bool = False) -> tuple[Order, Program]:
        """Return the order and the program of a recipe that names a schedule, for a step of `microbatches`. The program
        is not proven sound here: the run that it plans does that.

        roughly: if the order does not depend on times, place its transfers as for passes of equal length, so that
            layouts share one program. Steps then take up to 0.3 % longer than with separate programs (0.06 % among the
            plans of Llama-3.1-405B), and memory differs by 0.05 % on average, 1.4 % at most.

        Raises InputError if the schedule has no order of this size.
        """
        shape, split = self._shape_of(recipe), recipe.layers_per_stage
        assert split is not None
        options = recipe.offload
        offload = OffloadOptions(
            activations=options.activations, copy_time=options.copy_time, host_memory=options.host_memory
        )
        if offload.activations == "none" and not shape.moves:
            offload = replace(offload, activations="scheduled")  # equivalent
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
            # An order with copies is the order without them, plus the copies.
            order, _ = self._program(replace(recipe, offload=OffloadOptions()))
            order = with_offload(order, costs, recipe.offload.activations, recipe.offload.host_memory)
        elif _fixed(shape, recipe.vocabulary, recipe.offload):
            order = self._time_independent_order(replace(recipe, vocabulary="first-last", costs=None))
        else:
            order = order_by(recipe, costs, recipe.vocabulary, self._make)
        return order, add_communication(order, costs, recipe.sharing)

    def _make(self, schedule: str, devices: int, units: int, costs: Costs | None = None, **options: Any) -> Order:
        """Return the order of `generate`, computed once for equal arguments: modes with the same stage costs have the
        same order apart from their vocabulary passes."""
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
        """Return the activations in flight in a schedule's order for equal stages, with everything on the device. With
        the costs of a model, some generators hold the same amount in another arrangement. size: as for `_generated`."""
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
    """size: number of devices, and of slices of all microbatches. costs: mean costs of a slice; None if irrelevant."""
    return generate(schedule, *size, costs=costs, **dict(options))


def _fixed(shape: Shape, vocabulary: str, offload: OffloadOptions) -> bool:
    """Return whether an order does not depend on the times of passes."""
    return (
        not (shape.by_costs or shape.moves or VocabularyMode(vocabulary).sharded) and offload.activations == "scheduled"
    )


def _time_independent_order(recipe: Recipe) -> Order:
    return order_by(recipe, None, recipe.vocabulary)


def _held_by_stage(schedule: str, options: Options, size: tuple[int, int], slices: int) -> HeldByStage:
    return HeldByStage(add_slices(without_offload(generate(schedule, *size, **dict(options))), slices))


def short_steps(devices: int, microbatches: int, *, planned: bool, slices: int = 1) -> tuple[int, ...]:
    """Return the numbers of microbatches to simulate for a step of `microbatches`: those of two short steps, or of the
    step itself. planned: the order has vocabulary passes or copies to the host. slices: number per microbatch; each
    counts as one unit."""
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


def extended(times: Sequence[float], sizes: Sequence[int], microbatches: int, least_growth: float) -> float:
    """Return the time of a step of `microbatches`, extrapolated from the times of `sizes`, the result of `short_steps`.
    least_growth: the least time by which a step grows per microbatch, the work of the busiest device."""
    if len(sizes) == 1:
        return times[0]
    slope = max(least_growth, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    return times[1] + slope * (microbatches - sizes[1])
