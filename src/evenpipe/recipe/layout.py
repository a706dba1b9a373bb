"""The layout of a model: layers on stages, rows of the vocabulary on devices, and the programs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from evenpipe.errors import InputError
from evenpipe.model import Description, arranging_flops
from evenpipe.schedule import (
    PER_PAIR,
    SHARING,
    Costs,
    Order,
    Placement,
    Program,
    Schedule,
    evaluation_program,
    generate,
    plan_program,
    vocabulary_mode,
)
from evenpipe.schedule.costs import ASSUMED_COPY, Cost
from evenpipe.schedule.layers import even_split, split_by_cost
from evenpipe.schedule.passes import SHARDING_KINDS, VOCABULARY_KINDS
from evenpipe.schedule.planning import costs_of_work, order_of_function
from evenpipe.schedule.registry import options_of
from evenpipe.schedule.words import count
from evenpipe.vocabulary import Shard, split


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Forward work per token, in any one unit (FLOPs here); a backward is twice its forward."""

    layers: tuple[float, ...]
    head: float

    @classmethod
    def of(cls, description: Description, sequence: int | None = None) -> ModelCosts:
        """Return the costs that arrange orders without known times; `sequence`: tokens, as for `arranging_flops`."""
        layers, head = arranging_flops(description, sequence)
        return cls(layers=layers, head=head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything that each process knows about all devices."""

    mode: str
    """"first-last", "redistribute", "interlaced", "vocab-1" or "vocab-2"."""
    layers: tuple[tuple[int, int], ...]
    """First layer (inclusive) and last (exclusive) of each stage; a stage of "redistribute" may hold none."""
    program: Program
    """Program of a training step."""
    evaluation: Program
    embedding_shards: tuple[Shard, ...]
    """One per device: its rows of the embedding."""
    head_shards: tuple[Shard, ...]
    """One per device: its rows of the output layer."""
    costs: Costs

    @property
    def communicators(self) -> dict[str, tuple[int, ...]]:
        """Members (devices) of each communicator of both programs, by name."""
        return {**self.evaluation.communicators, **self.program.communicators}

    @property
    def sharded(self) -> bool:
        """Whether every device holds a part of the vocabulary, and E, G, S and T are separate passes."""
        return _is_sharded(self.mode)


def build_layout(
    *,
    devices: int,
    microbatches: int,
    schedule: Schedule,
    vocabulary: str,
    model: ModelCosts,
    rows: int,
    layers_per_stage: Sequence[int] | None = None,
    costs: Costs | None = None,
    schedule_options: Mapping[str, Any] | None = None,
    communicators: str = PER_PAIR,
    offload: str | float = "scheduled",
    copy_time: Cost = ASSUMED_COPY,
) -> Layout:
    """Place a model on devices.

    Args:
        vocabulary: the mode; "balanced" is "vocab-2".
        rows: of the embedding and of the output layer.
        layers_per_stage: None splits evenly, with "redistribute" by cost.
        costs: pass times for the schedule, one F and B per stage *without* the vocabulary layers; None takes FLOPs.
        schedule_options: of the generator of a named schedule.
        communicators: which transfers share one, one of `SHARING`.
        offload: which activations go to the host, as for `plan_order`.
        copy_time: of their copies, as `OffloadOptions.copy_time`.

    Raises:
        InputError: an unknown name, more stages than layers, or a split that does not add up.
    """
    mode = vocabulary_mode(vocabulary)
    if communicators not in SHARING:
        raise InputError(f"communicators: {communicators!r}, expected one of {', '.join(SHARING)}")
    options = dict(schedule_options or {})
    base = runnable_order(schedule, devices, microbatches, options)
    counts = _layers_per_stage(model, base.placement, mode, layers_per_stage, _more_or_fewer(schedule))
    bounds = [0]
    for number in counts:
        bounds.append(bounds[-1] + number)
    layers = tuple(pairwise(bounds))
    costs = (costs or _flop_costs(model, layers, devices, mode)).with_copies(base.placement, copy_time)
    if isinstance(schedule, str):  # rearranged with costs
        order, program = plan_program(
            schedule, devices, microbatches, mode, costs, sharing=communicators, offload=offload, **options
        )
    else:
        given = schedule if isinstance(schedule, Program) else base
        order, program = plan_program(given, devices, microbatches, mode, costs, sharing=communicators, offload=offload)
    placement = program.placement
    if _is_sharded(mode):
        embedding = head = tuple(split(rows, devices))
    else:
        embedding = _whole_on(placement.first_device, rows, devices)
        head = _whole_on(placement.last_device, rows, devices)
    return Layout(
        mode=mode,
        layers=layers,
        program=program,
        evaluation=evaluation_program(order, costs, communicators),
        embedding_shards=embedding,
        head_shards=head,
        costs=costs,
    )


def runnable_order(
    schedule: Schedule, devices: int, microbatches: int, options: Mapping[str, Any] | None = None
) -> Order:
    """Return the order of a schedule at equal costs; `options` are those of a named schedule's generator.

    Raises InputError if there is none of this size.
    """
    for name in ("name", "devices", "microbatches", "costs"):
        if name in (options or {}):
            raise InputError(f"schedule_options: {name} is not an option of a schedule, but a separate argument")
    if isinstance(schedule, str):
        order = generate(schedule, devices, microbatches, **(options or {}))
    elif options:
        raise InputError(f"schedule_options: {', '.join(options)} given, but only a schedule with a name has options")
    elif isinstance(schedule, Program):
        order = schedule.order
    else:
        order = schedule if isinstance(schedule, Order) else order_of_function(schedule, devices, microbatches)
    return order


def flop_costs(model: ModelCosts, layout: Layout) -> Costs:
    """Return the pass times of a layout in FLOPs per token, whatever costs arranged it."""
    costs = _flop_costs(model, layout.layers, layout.program.devices, layout.mode)
    return costs.with_copies(layout.program.placement, ASSUMED_COPY)


def without_vocabulary(order: Order) -> Order:
    """Return the order without its vocabulary passes, for any mode."""
    others = VOCABULARY_KINDS | SHARDING_KINDS
    rows = tuple(tuple(item for item in row if item is not None and item.kind not in others) for row in order.rows)
    return Order(order.placement, order.microbatches, rows)


def _is_sharded(mode: str) -> bool:
    return mode not in ("first-last", "redistribute")


def _whole_on(holder: int, rows: int, devices: int) -> tuple[Shard, ...]:
    """All rows on one device, none on the others."""
    return tuple(
        Shard(0, 0, rows) if device < holder else Shard(0, rows, rows) if device == holder else Shard(rows, rows, rows)
        for device in range(devices)
    )


def _more_or_fewer(schedule: Schedule) -> str:
    """Return what a user can change to have fewer stages."""
    if not isinstance(schedule, str) or schedule.endswith(".csv"):
        return "take an order with fewer stages"
    if "stages_per_device" in options_of(schedule):
        return "take fewer devices, or a smaller stages_per_device in schedule_options"
    return "take fewer devices, or a schedule with fewer stages per device"


def _layers_per_stage(
    model: ModelCosts, placement: Placement, mode: str, given: Sequence[int] | None, advice: str
) -> tuple[int, ...]:
    layers, stages, devices = len(model.layers), placement.stages, placement.devices
    if given is not None:
        if len(given) != stages or sum(given) != layers or min(given) < 0:
            raise InputError(
                f"layers_per_stage: {list(given)}, expected {stages} numbers (one per stage) that add up to the"
                f" model's {layers} layers"
            )
        return tuple(given)
    if stages > layers:
        has = f"{devices} with {count(stages, 'stage')}, but the model has {count(layers, 'layer')}"
        raise InputError(f"devices: {has}: expected one for each; {advice}")
    if mode == "redistribute":
        return split_by_cost(model.layers, stages, first_extra=0.0, last_extra=model.head)
    return even_split(layers, stages)


def _flop_costs(model: ModelCosts, layers: Sequence[tuple[int, int]], devices: int, mode: str) -> Costs:
    return costs_of_work(model.layers, model.head, [last - first for first, last in layers], devices, mode)
