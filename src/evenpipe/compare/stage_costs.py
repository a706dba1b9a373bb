"""Costs of the same model with another number of stages, or with whole vocabulary layers at its ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule.cost_values import spread
from evenpipe.schedule.costs import Cost, Costs, is_per_stage
from evenpipe.schedule.placement import Placement
from evenpipe.schedule.slice_costs import each_slice, of_slices
from evenpipe.schedule.vocabulary_mode import VocabularyMode
from evenpipe.words import count

PER_STAGE = ("F", "B", "I", "W", "R", "O", "L", "bytes")


def costs_for_stages(costs: Costs, stages: int, target: int, who: str = "the schedule") -> Costs:
    """Convert `costs` for `stages` stages to `target` stages that do the same work in total.

    A number is divided evenly. A list with one number per stage is summed if each new stage consists of entire old
    ones; otherwise InputError is raised, with `who` as the name of the schedule. Costs that are not per stage do not
    change.
    """
    if stages == target:
        return costs
    if costs.slices:
        return of_slices(
            [costs_for_stages(slice_costs, stages, target, who) for slice_costs in each_slice(costs)],
            costs.token_factors,
        )

    def cut(name: str, value: Cost) -> Cost:
        if not isinstance(value, tuple):
            return value * stages / target
        if len(value) != stages:
            raise InputError(
                f"costs.{name} has {count(len(value), 'number')} for {count(stages, 'stage')}; give one number, or"
                f" {stages}"
            )
        if stages % target:
            raise InputError(
                f"costs.{name} is a list for {count(stages, 'stage')}, but {who} has {target}; give one number, or"
                " compare with the schedule that has the most stages as the first"
            )
        share = stages // target
        return tuple(sum(value[stage * share : (stage + 1) * share]) for stage in range(target))

    changed: dict[str, Any] = {
        name: cut(name, value) for name in PER_STAGE if (value := getattr(costs, name)) is not None
    }
    for field in ("memory", "sharding", "tensor_exchange"):
        if (values := getattr(costs, field)) is not None:
            changed[field] = {
                name: cut(f"{field}.{name}", value) if is_per_stage(name) else value for name, value in values.items()
            }
    return replace(costs, **changed)


def check_vocabulary_times(costs: Costs, mode: VocabularyMode) -> None:
    """Raise InputError if `costs` have no times for the passes of a sharded mode, which may be the default."""
    for kind in mode.kinds(forward_only=False):
        if getattr(costs, kind.value) is None:
            raise InputError(
                f"costs.{kind.value} is missing, but vocabulary mode {mode} has such passes; give a number or a list,"
                " or take mode first-last"
            )


def with_whole_vocabulary(costs: Costs, placement: Placement) -> Costs:
    """`costs` with the work of S, C, T, E and G of all devices moved to the passes of the first and last stage.

    An output layer is three products of equal size (logits, and gradients with respect to its input and its weights),
    so the last stage's F, I and W take a third of it each, and B two thirds. E is added to the first F, G to the first
    W and B, and communication between replicas likewise. Kinds without a time stay without one.
    """
    if costs.slices:
        return of_slices(
            [with_whole_vocabulary(slice_costs, placement) for slice_costs in each_slice(costs)], costs.token_factors
        )

    def of_all_devices(name: str, value: Cost | None) -> float:
        return sum(spread(name, value or 0.0, placement.devices, "device") or ())

    head = sum(of_all_devices(name, getattr(costs, name)) for name in "SCT")
    rows, gradients = (of_all_devices(name, getattr(costs, name)) for name in "EG")
    extra = {  # of the first stage and of the last
        "F": (rows, head / 3),
        "B": (gradients, 2 * head / 3),
        "I": (0.0, head / 3),
        "W": (gradients, head / 3),
    }
    changed: dict[str, Any] = {}
    for name, (first, last) in extra.items():
        times = spread(name, getattr(costs, name), placement.stages, "stage")
        if times is not None:
            longer = list(times)
            longer[0] += first
            longer[-1] += last
            changed[name] = tuple(longer)
    sharding = dict(costs.sharding)
    for name in ("UNSHARD", "REDUCE_GRAD") if sharding else ():
        sizes = spread(name, sharding.get(name, 0.0), placement.stages, "stage") or ()
        longer = list(sizes)
        for stage, kind in ((0, "E"), (-1, "S")):
            longer[stage] += of_all_devices(name, sharding.pop(f"{name}_{kind}", 0.0))
        sharding[name] = tuple(longer)
    return replace(costs, sharding=sharding, **changed)
