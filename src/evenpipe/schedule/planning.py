"""The entry point that plans the program that the runtime executes, from a schedule and a vocabulary mode."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import gt
from typing import Any

from evenpipe.errors import InputError
from evenpipe.words import count, refused

from .check import check_order, check_program
from .costs import Costs
from .held import peak_activations
from .order import Order
from .passes import Kind
from .program import Program
from .registry import check_count, generate, takes_costs
from .rules import PER_PAIR
from .transforms.communication import add_communication
from .transforms.forward_only import forward_only
from .transforms.interlaced import interlace
from .transforms.list_scheduling import Length
from .transforms.offload import offloaded, plan_offload, without_offload
from .transforms.sharding import without_sharding
from .transforms.slices import add_slices
from .transforms.vocabulary import add_vocabulary, with_vocabulary_times
from .vocabulary_mode import VocabularyMode

Schedule = str | Order | Program | Callable[[int, int], Order]
"""A name in `SCHEDULES`, an order, a program, or a function of devices and microbatches that returns an order."""

OFFLOAD = ("scheduled", "none", "free", "all")
"""Choices of `plan_order` for activations."""


def costs_of_work(
    layers: Sequence[float], head: float, layers_per_stage: Sequence[int], devices: int, mode: VocabularyMode
) -> Costs:
    """Pass times in units of the given work, to arrange an order whose times are unknown.

    layers, head: forward work of each layer and of the output layer, which is three matrix products of equal size:
    logits, dX and dW. A backward takes twice as long as its forward. Copies to the host get no time.
    """
    bounds = [0, *accumulate(layers_per_stage)]
    forward = [sum(layers[first:last]) for first, last in pairwise(bounds)]
    backward = [2 * time for time in forward]
    if not mode.sharded:
        forward[-1] += head
        backward[-1] += 2 * head
    share = head / devices
    return Costs(
        F=tuple(forward),
        B=tuple(backward),
        I=tuple(forward),
        W=tuple(forward),
        S=2 * share if mode.combining is Kind.C else share,
        T=share if mode.combining is Kind.C else 2 * share,
        E=0.0,
        G=0.0,
    )


def order_of_function(function: Callable[[int, int], Order], devices: int, microbatches: int) -> Order:
    """The order that a schedule function returns; its own exceptions pass through.

    Raises InputError if it does not take devices and microbatches, or does not return an order.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        inspect.signature(function).bind(devices, microbatches)
    except TypeError as error:
        raise InputError(
            f"schedule: {name}(devices, microbatches) cannot be called: {error}; expected a function of these two"
        ) from None
    except ValueError:  # some functions written in C have no signature
        pass
    order = function(devices, microbatches)
    if not isinstance(order, Order):
        raise InputError(f"schedule: the function {name} returned {type(order).__name__}; expected an Order")
    return order


def plan_order(
    schedule: Schedule,
    devices: int,
    microbatches: int,
    mode: str = "balanced",
    costs: Costs | None = None,
    *,
    slices: int | None = None,
    offload: str | float = "scheduled",
    host_memory: float | None = None,
    make: Callable[..., Order] = generate,
    **options: Any,
) -> Order:
    """The order of a schedule in a vocabulary mode; `options` are those of the generator.

    A generator that plans by costs does not know about vocabulary passes. So in modes that add them, its order for
    equal passes is also tried, and used if the step is shorter and no device holds more activations.

    slices: number of slices of every sequence. None: as in the order, and 1 for a name or a function. With slices, a
    name or a function generates an order in which every unit is a microbatch. `costs` are those of a unit.

    offload: which activations go to the host. "scheduled": as in the order; "none"; "free": all that lower the peak of
    a device without costing time; "all": enough to reach the lowest possible peak; a number: enough to stay below that
    many bytes, with the sizes of `costs`. host_memory: most bytes of a device on the host, if `costs` have sizes.

    make: generates the order of a name, as `generate` does.

    If vocabulary passes are added, the copies of the same activations are placed again. An order that already has the
    vocabulary passes of the mode is used unchanged. A program is reduced to its passes; torch's sharding passes stay
    only if no vocabulary passes are added. Raises InputError for unknown names, for an order of a different size or
    with the vocabulary passes of a different mode, and for an unsound order, with every fault.
    """
    target_mode = VocabularyMode.of(mode)
    if isinstance(schedule, Program):
        keeps_passes = schedule.vocabulary.sharded or not target_mode.sharded
        schedule = schedule.order if keeps_passes else without_sharding(schedule.order)
    size = devices, microbatches, slices
    average = None if costs is None else costs.on_average
    scheduled, slice_count = _scheduled(schedule, size, average, make, **options)
    moved = offloaded(scheduled)
    order = _in_mode(scheduled, slice_count, target_mode, costs)
    by_costs = costs is not None and isinstance(schedule, str) and _plans_by_costs(schedule)
    if by_costs and target_mode.sharded and not moved:
        for_equal, _ = _scheduled(schedule, size, None, make, **options)
        if for_equal != scheduled:
            assert costs is not None
            order = _shorter(order, _in_mode(for_equal, slice_count, target_mode, costs), costs)
    if offload != "scheduled":
        return with_offload(order, costs, offload, host_memory)
    if not moved:
        return order
    room = _known(host_memory, costs)
    if room is None and slice_count == 1 and scheduled.vocabulary is order.vocabulary:
        return scheduled
    return plan_offload(order, costs, only=moved, host_limit=room).order


def _in_mode(scheduled: Order, slice_count: int, mode: VocabularyMode, costs: Costs | None) -> Order:
    """An order in a vocabulary mode, with its microbatches cut into slices, without copies to the host."""
    order = without_offload(scheduled)
    if slice_count > 1:
        order = add_slices(order, slice_count)
    if order.vocabulary.sharded and order.vocabulary is not mode.of_rows():
        raise InputError(f"the order has the vocabulary passes of {order.vocabulary}, not those of mode {mode}")
    if order.vocabulary is mode.of_rows():
        return order
    return interlace(order, costs) if mode is VocabularyMode.INTERLACED else add_vocabulary(order, mode, costs)


def _plans_by_costs(schedule: str) -> bool:
    return not schedule.endswith(".csv") and takes_costs(schedule)


def _shorter(order: Order, alternative: Order, costs: Costs) -> Order:
    """The alternative if its step is shorter and no device holds more activations, otherwise `order`."""
    held, alternative_held = (
        [peak_activations(candidate.passes(device)) for device in range(candidate.devices)]
        for candidate in (order, alternative)
    )
    if any(map(gt, alternative_held, held)):
        return order
    times = with_vocabulary_times(costs)
    return alternative if Length.of(alternative, times).better_than(Length.of(order, times)) else order


def _scheduled(
    schedule: str | Order | Callable[[int, int], Order],
    size: tuple[int, int, int | None],
    costs: Costs | None,
    make: Callable[..., Order],
    **options: Any,
) -> tuple[Order, int]:
    """The sound order of a schedule, and the number of slices that its microbatches must still be cut into. size:
    devices, microbatches, slices."""
    devices, microbatches, slices = size
    if slices is not None:
        check_count("slices", slices)
    is_given = isinstance(schedule, Order) or (isinstance(schedule, str) and schedule.endswith(".csv"))
    slice_count = 1 if is_given or slices is None else slices
    units = microbatches * slice_count
    if isinstance(schedule, str):
        order = make(schedule, devices, units, costs=costs, **options)
    else:
        order = schedule if isinstance(schedule, Order) else order_of_function(schedule, devices, units)
        if order.forward_only:
            raise InputError("the order only evaluates; a schedule must train, and its evaluation follows from it")
        check_order(order).raise_if_faulty()
    if (order.devices, order.microbatches) != (devices, units):
        raise InputError(
            f"the order is for {count(order.devices, 'device')} and {count(order.microbatches, 'microbatch')}, "
            f"not {devices} and {units}"
        )
    if is_given and slices not in (None, order.slices):
        raise InputError(f"the order has sequences of {count(order.slices, 'slice')}, not {slices}")
    return order, slice_count


def with_offload(order: Order, costs: Costs | None, offload: str | float, host_memory: float | None = None) -> Order:
    """`order` with activations on the host as in `plan_order`. Raises InputError for an invalid `offload`."""
    plan = partial(plan_offload, order, costs, host_limit=_known(host_memory, costs))
    match check_offload(offload):
        case "scheduled":
            return order
        case "none":
            return without_offload(order)
        case "free":
            return plan().order
        case "all":
            return plan(allow_stalls=True).order
        case limit:
            assert not isinstance(limit, str)
            return plan(limit=limit).order


def _known(host_memory: float | None, costs: Costs | None) -> float | None:
    """The memory limit of the host if the sizes of activations are known, otherwise None."""
    return None if costs is None or (costs.bytes is None and costs.memory is None) else host_memory


def check_offload(offload: str | float) -> str | float:
    """Raise InputError unless `offload` is valid for `plan_order`."""
    if isinstance(offload, str):
        if offload in OFFLOAD:
            return offload
    elif not isinstance(offload, bool) and 0 < offload < math.inf:
        return offload
    raise refused("offload", offload, f"one of {', '.join(OFFLOAD)}, or bytes above 0")


def plan_program(
    schedule: Schedule,
    devices: int,
    microbatches: int,
    mode: str = "balanced",
    costs: Costs | None = None,
    *,
    slices: int | None = None,
    sharing: str = PER_PAIR,
    offload: str | float = "scheduled",
    host_memory: float | None = None,
    **options: Any,
) -> tuple[Order, Program]:
    """The order of a schedule in a vocabulary mode, and its checked program with communication.

    A program that already has the vocabulary passes of the mode and keeps its copies is returned unchanged, except that
    communicators are shared as in `sharing`, one of `SHARING`. Arguments and errors as for `plan_order`.
    """
    as_it_stands = isinstance(schedule, Program) and schedule.vocabulary is VocabularyMode.of(mode).of_rows()
    if isinstance(schedule, Program) and as_it_stands:
        check_program(schedule).raise_if_faulty()  # before its order is checked, so that faults show the given rows
    order = plan_order(
        schedule,
        devices,
        microbatches,
        mode,
        costs,
        slices=slices,
        offload=offload,
        host_memory=host_memory,
        **options,
    )
    if isinstance(schedule, Program) and as_it_stands and order == schedule.order:
        program = schedule if schedule.sharing == sharing else schedule.shared(sharing)
    else:
        program = add_communication(order, costs, sharing)
    check_program(program).raise_if_faulty()
    return order, program


def evaluation_program(order: Order, costs: Costs | None = None, sharing: str = PER_PAIR) -> Program:
    """The checked program that evaluates in the placement of `order`: only forwards and losses.

    `costs` as for `plan_order`, `sharing` as for `plan_program`.
    """
    program = add_communication(forward_only(order, costs), costs, sharing)
    check_program(program).raise_if_faulty()
    return program
