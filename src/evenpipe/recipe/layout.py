"""The layout of a model: layers on stages, rows of the vocabulary on devices, and the programs of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from evenpipe.errors import InputError
from evenpipe.model import Description, RowWork, arranging_flops, slice_ends
from evenpipe.model.flops import usual_length
from evenpipe.recipe.parallelism import divisor_of, for_replicas
from evenpipe.recipe.recipe import Recipe
from evenpipe.recipe.sliced_costs import NOTHING, Extra, rows_as_measured, sliced_costs, whole_costs
from evenpipe.schedule import (
    Costs,
    Order,
    Placement,
    Program,
    Schedule,
    evaluation_program,
    generate,
    plan_program,
    time_order,
)
from evenpipe.schedule.costs import ASSUMED_COPY
from evenpipe.schedule.layers import even_split, in_flight_per_layer, splits_by_cost
from evenpipe.schedule.passes import SHARDING_KINDS, VOCABULARY_KINDS
from evenpipe.schedule.planning import costs_of_work, order_of_function, plan_order
from evenpipe.schedule.registry import options_of
from evenpipe.schedule.simplified_costs import quantized_costs
from evenpipe.schedule.slice_costs import each_slice
from evenpipe.schedule.vocabulary_mode import VocabularyMode
from evenpipe.vocabulary import Shard
from evenpipe.vocabulary import split as shards_of
from evenpipe.words import count, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Forward work per token, in any unit (FLOPs here); a backward takes twice the work of its forward."""

    layers: tuple[float, ...]
    head: float
    rows: RowWork | None = None
    """How the work of layers grows along a row."""
    length: int = 0
    """Tokens of a row; the costs are the average over its tokens."""
    times: Callable[[Recipe, Placement], Costs] | None = field(default=None, compare=False, repr=False)
    """Returns the times of the passes and transfers of a recipe with `layers_per_stage`, if the hardware is known."""
    split_times: Callable[[Recipe], tuple[tuple[float, ...], float]] | None = field(
        default=None, compare=False, repr=False
    )
    """Returns the times of each layer and of the whole output layer, forward and backward, if the hardware is known."""
    hardware: str = "flops"
    """Name of the hardware."""

    @classmethod
    def of(cls, description: Description, sequence: int | None = None) -> ModelCosts:
        """The costs that arrange orders if no times are known; `sequence`: tokens, as for `arranging_flops`."""
        layers, head = arranging_flops(description, sequence)
        length = sequence or usual_length(description)
        return cls(layers=layers, head=head, rows=RowWork.of(description), length=length)

    def rows_for(self, recipe: Recipe) -> RowWork:
        """How work grows along rows, by which they are cut: as in the costs of the recipe if these were measured on
        slices, else in FLOPs."""
        return rows_as_measured(self.rows or RowWork(per_token=1.0, per_key=()), recipe.costs, self.length)

    def costs_of_slices(self, costs: Costs, recipe: Recipe, slices: int, extra: Extra = NOTHING) -> Costs:
        """Convert costs of whole sequences, or of another number of slices, to costs of `slices` slices.

        extra: fixed work of a pass, in tokens of a microbatch on one process.
        """
        if slices == 1 and extra == NOTHING:
            return whole_costs(costs)
        sizes = recipe.parallelism
        multiple = divisor_of(sizes.cp, sizes.tp)
        length = max(self.length // multiple, slices) * multiple
        rows = self.rows_for(recipe)
        times = recipe.batch.microbatch_size / sizes.cp  # tokens of a microbatch on a process / tokens of a sequence
        each = Extra(extra.forward / times, extra.weights / times)
        return sliced_costs(costs, rows, slice_ends(rows, length, slices, multiple), each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything that each process knows about all devices."""

    mode: str
    """"first-last", "redistribute", "interlaced", "vocab-1" or "vocab-2"."""
    layers: tuple[tuple[int, int], ...]
    """First layer (inclusive) and last (exclusive) of each stage; with "redistribute", a stage may have no layers."""
    program: Program
    """Program of a training step."""
    evaluation: Program
    embedding_shards: tuple[Shard, ...]
    """Rows of the embedding of each process of a pipeline, by device and then by tensor rank."""
    head_shards: tuple[Shard, ...]
    """Rows of the output layer, likewise."""
    costs: Costs
    arranged_by: str = "flops"
    """Source of these costs: "costs", those of the recipe; "flops"; or the name of the hardware of pass times."""

    @classmethod
    def of(cls, recipe: Recipe, model: ModelCosts, embedding_rows: int, head_rows: int, *, tied: bool) -> Layout:
        """Place a model on devices; its embedding and output layer may be `tied`.

        Raises InputError for options that the schedule does not have, more stages than layers, and a split that does
        not add up.
        """
        mode, devices, schedule = recipe.vocabulary, recipe.devices, recipe.schedule
        base = runnable_order(recipe)
        split = layers_per_stage(recipe, model, base)
        costs = arranging_costs(recipe, model, base.placement, split)
        # A named schedule is arranged again by these costs, and a function is called again to order slices.
        order, program = plan_program(
            schedule if isinstance(schedule, (str, Program)) or recipe.slices > 1 else base,
            devices,
            recipe.microbatches,
            mode,
            costs,
            slices=recipe.slices if recipe.slices > 1 else None,
            sharing=recipe.sharing,
            offload=recipe.offload.activations,
            host_memory=recipe.offload.host_memory,
            **(recipe.options if isinstance(schedule, str) else {}),
        )
        evaluation = evaluation_program(order, costs, recipe.sharing)
        program, evaluation = (
            for_replicas(original, recipe.parallelism, tied=tied) for original in (program, evaluation)
        )
        placement, ranks = program.placement, recipe.parallelism.tp
        if VocabularyMode(mode).sharded:
            embedding, head = (tuple(shards_of(rows, devices * ranks)) for rows in (embedding_rows, head_rows))
        else:
            embedding = _only_on(placement.first_device, embedding_rows, devices, ranks)
            head = _only_on(placement.last_device, head_rows, devices, ranks)
        return cls(
            mode=mode,
            layers=bounds_of(split),
            program=program,
            evaluation=evaluation,
            embedding_shards=embedding,
            head_shards=head,
            costs=costs,
            arranged_by=model.hardware if recipe.costs is None else "costs",
        )

    @property
    def communicators(self) -> dict[str, tuple[int, ...]]:
        """Members (devices) of each communicator of both programs, by name."""
        return {**self.evaluation.communicators, **self.program.communicators}

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(last - first for first, last in self.layers)

    @property
    def sharded(self) -> bool:
        """Whether every device holds a part of the vocabulary, and E, G, S and T are separate passes."""
        return VocabularyMode(self.mode).sharded


def layout_of(recipe: Recipe, model: ModelCosts, description: Description) -> Layout:
    """Return `Layout.of` the model of a description."""
    rows = description.vocabulary_size, description.head_rows
    return Layout.of(recipe, model, *rows, tied=description.tied)


def runnable_order(recipe: Recipe) -> Order:
    """The order of a recipe with equal costs, without vocabulary passes for a named schedule.

    Raises InputError if the schedule has no order of this size.
    """
    schedule = recipe.schedule
    if isinstance(schedule, str):
        return generate(schedule, recipe.devices, recipe.microbatches, **recipe.options)
    if isinstance(schedule, Program):
        return schedule.order
    return schedule if isinstance(schedule, Order) else order_of_function(schedule, recipe.devices, recipe.microbatches)


def arranging_costs(recipe: Recipe, model: ModelCosts, placement: Placement, split: Sequence[int]) -> Costs:
    """The pass times by which the order of a recipe is arranged, for this placement."""
    costs = arranging_times(recipe, model, placement, split)
    return costs.with_copies(placement, recipe.offload.copy_time)


def arranging_times(recipe: Recipe, model: ModelCosts, placement: Placement, split: Sequence[int]) -> Costs:
    """The same without copies to the host: the costs of the recipe, else its times on known hardware, else FLOPs."""
    costs, schedule = recipe.costs, recipe.schedule
    slices = schedule.slices if isinstance(schedule, (Order, Program)) else recipe.slices
    if costs is not None:
        known = len(each_slice(costs)) if costs.slices else 1
        return costs if slices == known else model.costs_of_slices(costs, recipe, slices)
    if model.times is None:
        return costs_of_work(model.layers, model.head, split, recipe.devices, recipe.mode)
    cut = replace(recipe, layers_per_stage=tuple(split), batch=replace(recipe.batch, slices=slices))
    return quantized_costs(model.times(cut, placement), placement)


def order_by(recipe: Recipe, costs: Costs | None, mode: str, make: Callable[..., Order] = generate) -> Order:
    """The order of a recipe arranged by these costs, in vocabulary mode `mode`. make: as for `plan_order`. Raises
    InputError as `plan_order` does."""
    return plan_order(
        recipe.schedule,
        recipe.devices,
        recipe.microbatches,
        mode,
        costs,
        slices=recipe.slices if recipe.slices > 1 else None,
        offload=recipe.offload.activations,
        host_memory=recipe.offload.host_memory,
        make=make,
        **(recipe.options if isinstance(recipe.schedule, str) else {}),
    )


def bounds_of(layers_per_stage: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The first layer (inclusive) and the last (exclusive) of each stage."""
    return tuple(pairwise(accumulate(layers_per_stage, initial=0)))


def flop_costs(model: ModelCosts, layout: Layout) -> Costs:
    """The pass times of a layout in FLOPs per token, regardless of the costs by which it was arranged."""
    split, devices = layout.layers_per_stage, layout.program.devices
    costs = costs_of_work(model.layers, model.head, split, devices, VocabularyMode(layout.mode))
    return costs.with_copies(layout.program.placement, ASSUMED_COPY)


def without_vocabulary(order: Order) -> Order:
    """The order without its vocabulary passes, for any mode."""
    excluded = VOCABULARY_KINDS | SHARDING_KINDS
    rows = tuple(tuple(item for item in row if item is not None and item.kind not in excluded) for row in order.rows)
    return replace(order, rows=rows, vocabulary=VocabularyMode.FIRST_LAST)


def _only_on(holder: int, rows: int, devices: int, ranks: int) -> tuple[Shard, ...]:
    """All rows on the tensor ranks of a device, none on the others."""
    leading, trailing = (Shard(0, 0, rows),), (Shard(rows, rows, rows),)
    return (*leading * (holder * ranks), *shards_of(rows, ranks), *trailing * ((devices - 1 - holder) * ranks))


def _more_or_fewer(schedule: Schedule) -> str:
    """Advice to the user on how to have fewer stages."""
    if not isinstance(schedule, str):
        return "take an order with fewer stages"
    if "stages_per_device" in options_of(schedule):
        return "take fewer devices, or a smaller stages_per_device in schedule_options"
    return "take fewer devices, or a schedule with fewer stages per device"


def layers_per_stage(recipe: Recipe, model: ModelCosts, base: Order) -> tuple[int, ...]:
    """The number of layers of each stage, as given, or as the vocabulary mode requires.

    base: as `runnable_order`. Raises InputError for more stages than layers, and for a split that does not add up.
    """
    placement = base.placement
    layers, stages, devices = len(model.layers), placement.stages, placement.devices
    explicit = recipe.layers_per_stage
    if explicit is not None:
        check_layers_per_stage(explicit, stages, layers)
        return explicit
    if stages > layers:
        sizes = f"{devices} with {count(stages, 'stage')}, but the model has {count(layers, 'layer')}"
        raise InputError(f"devices: {sizes}: expected one for each; {_more_or_fewer(recipe.schedule)}")
    if recipe.vocabulary == "redistribute":
        return _redistributed(recipe, model, base)
    return even_split(layers, stages)


def _redistributed(recipe: Recipe, model: ModelCosts, base: Order) -> tuple[int, ...]:
    """The split with the shortest step among those that minimise the work of the busiest device."""
    times = (model.layers, model.head) if model.split_times is None else model.split_times(recipe)
    splits = splits_by_cost(times[0], base.placement, times[1], in_flight_per_layer(base))
    if len(splits) == 1:
        return splits[0]

    def step(split: tuple[int, ...]) -> float:
        costs = arranging_costs(replace(recipe, costs=None), model, base.placement, split)
        return time_order(order_by(recipe, costs, "redistribute"), costs).makespan

    return min(splits, key=step)


def check_layers_per_stage(split: tuple[int, ...], stages: int, layers: int) -> None:
    """Raise InputError unless the numbers spread all layers over all stages."""
    if len(split) != stages or sum(split) != layers or min(split) < 0:
        raise refused(
            "layers_per_stage",
            list(split),
            f"{count(stages, 'number')} (one per stage) that add up to the model's {count(layers, 'layer')}",
        )
