"""The number of slices chosen for `slices = "auto"`: the fewest whose predicted step is hardly longer than the best.

More slices leave smaller bubbles, and would always win if passes only did work in proportion to their tokens. But a
pass of a slice also has fixed work: it reads all matrices, starts every kernel, and W adds to all gradients. `EXTRA`
says how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from evenpipe.errors import InputError
from evenpipe.recipe.layout import ModelCosts, arranging_costs, layers_per_stage, order_by, runnable_order
from evenpipe.recipe.parallelism import divisor_of
from evenpipe.recipe.recipe import Recipe
from evenpipe.recipe.sliced_costs import Extra
from evenpipe.schedule import Costs, Order, Program, time_order
from evenpipe.words import count

EXTRA = {"cuda": Extra(forward=256, weights=1024), "cpu": Extra(forward=16, weights=64)}
"""Fixed work in tokens, by torch device. A product of t tokens takes 2 t FLOPs per parameter. Reading a 16-bit matrix
takes as long as the product of 230 tokens on an H100 (130 on an A100), and so does starting the kernels of a layer of
hidden size 4096 on an H100. Adding to fp32 gradients reads and writes 12 bytes per parameter, which takes as long as
1380 tokens (760); long products hide part of it. A CPU core does about 10 FLOPs per byte of memory, not 200."""

NEARLY = 0.01
"""Predicted steps whose relative difference is at most this count as equal: the fewest slices are chosen, and larger
numbers are not tried."""

MOST_PASSES = 200_000
"""Orders with more passes are not tried, because they take seconds to arrange and to time."""


def with_slices(
    recipe: Recipe, model: ModelCosts, torch_device: str, refusal: Callable[[], str | None] = lambda: None
) -> tuple[Recipe, str]:
    """The recipe with "auto" replaced by a number, and a short explanation; unchanged, with "", if it has a number.

    The result is the same on every process, because it depends only on these arguments.

    Args:
        torch_device: "cuda" or "cpu", where passes run.
        refusal: returns why sequences of this model cannot be cut, or None; called only if they would be cut.
    """
    if recipe.batch.slices != "auto":
        return recipe, ""
    model = replace(model, times=None)  # by FLOPs, with `EXTRA`

    def cut(slices: int) -> Recipe:
        return replace(recipe, batch=replace(recipe.batch, slices=slices))

    if isinstance(recipe.schedule, (Order, Program)):
        slices = recipe.schedule.slices
        return cut(slices), f"{slices}, as in the given order"
    steps, why = _steps(cut, model, EXTRA.get(torch_device, EXTRA["cpu"]))
    best = min(steps.values())
    slices = min(number for number, step in steps.items() if step <= best * (1 + NEARLY))
    if slices > 1 and (fault := refusal()) is not None:
        return cut(1), f"1, since {fault}"
    ratios = ", ".join(f"{number}: {step / steps[1]:.3f}" for number, step in steps.items() if number > 1)
    comparison = (
        f"predicted steps relative to whole sequences of {count(model.length, 'token')}: {ratios}" if ratios else ""
    )
    return cut(slices), "; ".join([str(slices), *filter(None, (comparison, why))])


def _steps(cut: Callable[[int], Recipe], model: ModelCosts, extra: Extra) -> tuple[dict[int, float], str]:
    """The predicted step by number of slices, and why no larger number was tried."""
    sizes = cut(1).parallelism
    base = runnable_order(cut(1))
    passes = 3 * len(base.rows[0]) * base.devices
    steps: dict[int, float] = {}
    slices = 1
    while True:
        try:
            steps[slices] = _step(cut(slices), model, base, extra)
        except InputError as error:
            if slices == 1:
                raise
            return steps, f"not {slices}: {error}"
        if slices > 1 and steps[slices] > steps[slices // 2] * (1 - NEARLY):
            return steps, ""
        slices *= 2
        shortest = divisor_of(sizes.cp, sizes.tp)
        if model.length < slices * shortest:
            return steps, f"a sequence has no {slices} slices of at least {count(shortest, 'token')}"
        if passes * slices > MOST_PASSES:
            return steps, "more were not tried"


def _step(recipe: Recipe, model: ModelCosts, base: Order, extra: Extra) -> float:
    """The predicted time of a step, in the unit of its costs.

    Vocabulary passes with their own barriers fill gaps in the order. The step is taken to be that of the other passes
    plus their time (`add_vocabulary` tries other positions until it is no longer than that).
    """
    costs = predicted_costs(recipe, model, base, extra)
    mode = recipe.vocabulary
    fills = mode in ("vocab-1", "vocab-2")
    order = order_by(recipe, costs, "first-last" if fills else mode)
    step = time_order(order, costs).makespan
    if fills:
        times = costs.device_times(order.placement)
        kinds = recipe.mode.kinds(forward_only=False)
        step += order.units * max(map(sum, zip(*(times[kind] or () for kind in kinds), strict=True)))
    return step


def predicted_costs(recipe: Recipe, model: ModelCosts, base: Order, extra: Extra) -> Costs:
    """The costs of the slices of a recipe, even of a single one, including the fixed work of each pass."""
    split = layers_per_stage(recipe, model, base)
    whole = arranging_costs(replace(recipe, batch=replace(recipe.batch, slices=1)), model, base.placement, split)
    return model.costs_of_slices(whole, recipe, recipe.slices, extra)
