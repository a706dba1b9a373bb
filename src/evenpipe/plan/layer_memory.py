"""Memory of single layers: what bounds and splits know about a stage without its program."""

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
from evenpipe.memory.estimate import settings_of
from evenpipe.recipe.recipe import Recipe

from .configuration import POLICIES
from .device_memory import how_estimated
from .problem import Problem


class LayerUse(NamedTuple):
    """Bytes of a layer and microbatch."""

    waiting: float
    """Between its forward and its backward: what it adds to a stage, possibly without its input."""
    queued: float
    """Between I and W."""
    passing: float
    """The peak within a pass, on top of that."""
    turning: float = 0.0
    """The peak within a pass that begins its backward, on top of that."""
    sharpest: float = 0.0
    """The highest of these peaks among the slices of a sequence."""


def mean_uses(problem: Problem, recipe: Recipe, *, split: bool) -> tuple[LayerUse, ...]:
    """Return, for every policy, what a layer needs for a whole sequence on average, and the highest peak of any layer.
    split: backwards are split into I and W."""

    def mean(uses: Sequence[LayerUse]) -> LayerUse:
        waiting, queued, *peaks = zip(*uses, strict=True)
        return LayerUse(math.fsum(waiting) / len(uses), math.fsum(queued) / len(uses), *map(max, peaks))

    def uses() -> tuple[LayerUse, ...]:
        uncut = replace(recipe, batch=replace(recipe.batch, slices=1))
        uses_of_kinds = _uses_of_kinds(problem, uncut, split=split)
        return tuple(mean([of_kinds[id(work)] for work in problem.works]) for of_kinds in uses_of_kinds)

    return problem.once((mean_uses, computing(recipe.parallelism), recipe.batch.microbatch_size, split), uses)


def least_uses(problem: Problem, recipe: Recipe, *, split: bool) -> tuple[LayerUse, ...]:
    """Return, for every policy, the least that any layer needs for a whole sequence or a slice of one. split: backwards
    are split into I and W."""
    uses_of_kinds = _uses_of_kinds(problem, recipe, split=split)
    return tuple(LayerUse(*map(min, zip(*of_kinds.values(), strict=True))) for of_kinds in uses_of_kinds)


def least_floors(problem: Problem, recipe: Recipe) -> tuple[LayerUse, ...]:
    """Return the same without tracing: the least that any implementation needs for the gradients of products."""

    def floors() -> tuple[LayerUse, ...]:
        setting = problem.setting(recipe)
        every = zip(*(saved_floor(work, setting) for work in problem.kinds), strict=True)
        none, selective, full = (min(sizes) / recipe.slices for sizes in every)
        return tuple(LayerUse(waiting, none, 0.0) for waiting in (none, selective, full))

    key = least_floors, computing(recipe.parallelism), recipe.batch.microbatch_size, recipe.slices
    return problem.once(key, floors)


def _uses_of_kinds(problem: Problem, recipe: Recipe, *, split: bool) -> list[dict[int, LayerUse]]:
    """Return, for every policy, the memory of each kind of layer, by the id of its work."""
    recipe = replace(recipe, layers_per_stage=None)
    key = (_uses_of_kinds, computing(recipe.parallelism), recipe.batch.microbatch_size, recipe.slices, split)

    def uses() -> list[dict[int, LayerUse]]:
        first = {id(work): layer for layer, work in reversed(list(enumerate(problem.works)))}
        return [
            {
                kind: _use(problem, replace(recipe, activation_checkpointing=policy), layer, split=split)
                for kind, layer in first.items()
            }
            for policy in POLICIES
        ]

    return problem.once(key, uses)


def _use(problem: Problem, recipe: Recipe, layer: int, *, split: bool) -> LayerUse:
    """Return the least that a layer needs for each slice that a stage holds; zeros if the layer cannot be run this way,
    which an evaluation reports.

    Backwards take the slices of a sequence in reverse order, so the slices that wait for theirs are the first ones of
    each sequence. They need at least their number times the least mean over any first slices. Each sequence has its own
    keys and values.
    """
    try:
        settings = settings_of(problem.description, recipe, **how_estimated(problem))
        pieces = settings.pieces(problem.description, problem.bytes.row_work)
        uses = [problem.bytes.layer(layer, settings, split=split, piece=piece) for piece in pieces]
    except InputError:
        return LayerUse(0.0, 0.0, 0.0)
    waiting = min(total / count for count, total in enumerate(accumulate(use.waiting for use in uses), 1))
    turning = [0 if settings.parallelism.ep > 1 else use.turning for use in uses]  # the overlap of experts lowers peaks
    return LayerUse(
        waiting + min(use.carried for use in uses) / len(uses),
        min(use.queued for use in uses),
        min(use.passing for use in uses),
        min(turning),
        max(turning),
    )


def saved_floor(work: LayerWork, setting: Setting) -> tuple[float, float, float]:
    """Return the least bytes that any implementation of a layer keeps for one microbatch, under the policies none,
    selective and full.

    None: the inputs of products (8-bit in fp8), norms and the activation function; queries, keys and values; and the
    probabilities of eager attention. Selective: the results of products and of attention. Full: the layer's input.
    """
    tokens = setting.tokens * setting.element
    wide = work.hidden_size * setting.hidden_share
    sizes = work.attention
    attended = (sizes.heads * (sizes.query_size + sizes.value_size) + sizes.key_value_size) / setting.tensor
    of_experts = 0.0 if work.experts is None else first_product_bytes(work.experts, work.hidden_size, setting)
    middle = work.middle / setting.tensor
    last = middle / 2 if work.gated else middle
    probabilities = sizes.heads * setting.sequence / setting.tensor if setting.unfused_attention(work) else 0.0
    inputs = (2 * wide + last) * (0.5 if setting.casts else 1)
    none = tokens * (2 * wide + inputs + attended + probabilities + middle) + of_experts
    results = 0.0 if setting.kernels.halves_selective else attended + middle
    selective = min(none, tokens * (wide + results) + of_experts)
    return none, selective, min(selective, tokens * wide)
