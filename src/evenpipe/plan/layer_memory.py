"""Memory of single layers: what bounds and splits know of a stage without its program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from evenpipe.costs.analytic import Setting
from evenpipe.costs.experts import first_product_bytes
from evenpipe.costs.timed_model import computing
from evenpipe.costs.work import LayerWork
from evenpipe.errors import InputError
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.estimate import settings_of
from evenpipe.recipe.recipe import Recipe

from .configuration import POLICIES
from .device_memory import how_estimated
from .problem import Problem


class LayerUse(NamedTuple):
    """Bytes of one layer and microbatch."""

    waiting: float
    """Between its forward and its backward: what it adds to a stage, at most without its input."""
    queued: float
    """Between I and W."""
    passing: float
    """The peak within a pass, above."""
    turning: float = 0.0
    """The peak within a pass that begins its backward, above."""
    sharpest: float = 0.0
    """The highest of these peaks among the slices of a sequence."""


def mean_uses(problem: Problem, recipe: Recipe) -> tuple[LayerUse, ...]:
    """Return, for every policy, what a layer needs of a whole sequence on average, and the highest peak within one."""
    key = (mean_uses, computing(recipe.parallelism), recipe.batch.microbatch_size)

    def mean() -> tuple[LayerUse, ...]:
        whole = replace(recipe, batch=replace(recipe.batch, slices=1))
        of_kinds = _uses_of_kinds(problem, whole, traced=False, split=False)
        every = [[found[id(work)] for work in problem.works] for found in of_kinds]
        return tuple(
            LayerUse(
                math.fsum(use.waiting for use in uses) / len(uses),
                math.fsum(use.queued for use in uses) / len(uses),
                max(use.passing for use in uses),
            )
            for uses in every
        )

    return problem.once(key, mean)


def least_uses(problem: Problem, recipe: Recipe, *, traced: bool, split: bool) -> tuple[LayerUse, ...]:
    """Return, for every policy, the least that any layer needs of a whole sequence, or of a slice of one.

    traced: layers without a closed form are traced, as in stages whose backwards are `split` or not.
    """
    found = _uses_of_kinds(problem, recipe, traced=traced, split=split)
    return tuple(LayerUse(*map(min, zip(*of_kinds.values(), strict=True))) for of_kinds in found)


def _uses_of_kinds(problem: Problem, recipe: Recipe, *, traced: bool, split: bool) -> list[dict[int, LayerUse]]:
    """Return, for every policy, the memory of each kind of layer, by the id of its work, of a mean or least slice
    (`_use_of_slices`). Where nothing else tells, it is the least that the gradients of products need."""
    recipe, slices = replace(recipe, layers_per_stage=None), recipe.slices
    sizes = recipe.batch.microbatch_size, slices
    key = (_uses_of_kinds, computing(recipe.parallelism), *sizes, traced and split, traced)

    def uses() -> list[dict[int, LayerUse]]:
        first = {id(work): layer for layer, work in reversed(list(enumerate(problem.works)))}
        floors = {id(work): saved_floor(work, problem.setting(recipe)) for work in problem.kinds}
        return [
            {
                kind: _use(problem, replace(recipe, checkpointing=policy), layer, traced=traced, split=split)
                or LayerUse(floors[kind][place] / slices, floors[kind][0] / slices, 0.0)
                for kind, layer in first.items()
            }
            for place, policy in enumerate(POLICIES)
        ]

    return problem.once(key, uses)


def _use(problem: Problem, recipe: Recipe, layer: int, *, traced: bool, split: bool) -> LayerUse | None:
    """Return the memory of a layer under a recipe with one policy; None if it is not known, or if the model cannot be
    cut this way."""
    source, sizes = problem.bytes, recipe.parallelism
    try:
        settings = settings_of(problem.description, recipe, **how_estimated(problem))
        pieces = settings.pieces(problem.description, source.row_work)
        if source.closed is None or not source.closed.describe(settings.kernels, sizes.tp, sizes.ep):
            if not traced or len(pieces) > 1:
                return None
            stored, queued, turning = source.traced_layer(layer, settings, split=split, piece=pieces[0])
            return LayerUse(stored, queued, turning, turning, turning)
        stages = [source.closed_stage((layer, layer + 1), (False, False), settings, piece) for piece in pieces]
    except InputError:
        return None
    return _use_of_slices(stages)


def _use_of_slices(slices: Sequence[StageBytes]) -> LayerUse:
    """Return what each of the slices that a stage holds needs at least.

    Backwards take the slices of a sequence in reverse, so those that wait for theirs are the first ones of each
    sequence, and need at least as many times the least mean of first ones. Each sequence has its keys and values.
    """
    uses = [_use_of_stage(found) for found in slices]
    waiting = min(total / count for count, total in enumerate(accumulate(use.waiting for use in uses), 1))
    least = LayerUse(*map(min, zip(*uses, strict=True)))
    carried = min(found.carried for found in slices) / len(slices)
    return least._replace(waiting=waiting + carried, sharpest=max(use.sharpest for use in uses))


def _use_of_stage(found: StageBytes) -> LayerUse:
    peaks = found.peaks
    turning = min(peaks.backward, peaks.input)
    return LayerUse(
        max(found.kept_input, found.stored - found.shared),
        found.queued,
        max(peaks.forward - found.stored, peaks.backward, peaks.input, peaks.weight),
        turning,
        turning,
    )


def saved_floor(work: LayerWork, setting: Setting) -> tuple[float, float, float]:
    """Return the least bytes that any implementation of a layer keeps of one microbatch, under the policies none,
    selective and full.

    None: inputs of products, norms and the activation, queries, keys and values, and the probabilities of eager
    attention. Selective: results of products and of attention. Full: its input.
    """
    tokens = setting.tokens * setting.element
    wide = work.hidden_size * setting.hidden_share
    sizes = work.attention
    attended = (sizes.heads * (sizes.query_size + sizes.value_size) + sizes.key_value_size) / setting.tensor
    of_experts = 0.0 if work.experts is None else first_product_bytes(work.experts, work.hidden_size, setting)
    middle = work.middle / setting.tensor
    last = middle / 2 if work.gated else middle
    probabilities = sizes.heads * setting.sequence / setting.tensor if setting.is_eager(work) else 0.0
    none = tokens * (4 * wide + attended + probabilities + middle + last) + of_experts
    selective = min(none, tokens * (wide + attended + middle) + of_experts)
    return none, selective, min(selective, tokens * wide)
