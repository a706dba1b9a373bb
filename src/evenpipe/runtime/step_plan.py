"""What every device computes in a step. It is decided before anything is built, and is the same on every process."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from evenpipe.attention.check import check_pieces
from evenpipe.costs.hardware import Hardware, known_gpu
from evenpipe.costs.timed_model import arranging_model
from evenpipe.errors import InputError
from evenpipe.layers.checkpointing import check_choices
from evenpipe.model import Description
from evenpipe.processes.worker import Worker
from evenpipe.recipe.layout import Layout, ModelCosts, flop_costs, layout_of, without_vocabulary
from evenpipe.recipe.recipe import Recipe
from evenpipe.recipe.slice_choice import with_slices
from evenpipe.recipe.unused_options import unused_options
from evenpipe.runtime.row import validate_program
from evenpipe.schedule import Costs, Kind, Timeline, VocabularyMode, time_order
from evenpipe.vocabulary import LossOptions

logger = logging.getLogger(__name__)

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Names of dtypes in `Hardware.peak_flops`."""


@dataclass(slots=True)
class StepPlan:
    """The recipe of a model, and the resulting layout."""

    description: Description
    recipe: Recipe
    costs: ModelCosts
    """The costs by which a recipe without `costs` is arranged."""
    layout: Layout
    chosen_slices: str | None
    """Why sequences are cut into this number of slices; None if the number was given."""
    checkpointing: tuple[str, ...]
    """For each layer of the model."""

    @property
    def moves_activations(self) -> list[bool]:
        """Whether each device moves activations to its host."""
        return [any(item is not None and item.kind is Kind.O for item in row) for row in self.layout.program.rows]

    def layout_by(self, costs: Costs) -> Layout:
        """Return the layout with the named schedule arranged by pass times, one F and B per stage.

        Raises InputError if the recipe has a given order, or if the new order needs other communicators.
        """
        if not isinstance(self.recipe.schedule, str):
            raise InputError("arrange: this pipeline runs a given order; expected one with a named schedule")
        layout = layout_of(
            replace(self.recipe, costs=costs, layers_per_stage=self.layout.layers_per_stage),
            self.costs,
            self.description,
        )
        missing = sorted(layout.communicators.keys() - self.layout.communicators.keys())
        if missing:
            raise InputError(f"arrange: the order needs communicators that this pipeline lacks: {', '.join(missing)}")
        return layout

    def predict(self, vocabulary: str | None) -> Timeline:
        """Simulate a step, with times in FLOPs per token.

        vocabulary: another mode to simulate, with the same layers in each stage unless either mode is "redistribute".
        """
        layout = self.layout
        if vocabulary is not None and VocabularyMode.of(vocabulary) != layout.mode:
            recuts = "redistribute" in (layout.mode, vocabulary) and len(layout.layers) <= self.description.layers
            recipe = Recipe(
                parallelism=self.recipe.parallelism,
                batch=self.recipe.batch,
                schedule=without_vocabulary(layout.program.order),
                vocabulary=vocabulary,
                layers_per_stage=None if recuts else layout.layers_per_stage,
            )
            layout = layout_of(recipe, self.costs, self.description)
        return time_order(layout.program.order, flop_costs(self.costs, layout))


def plan_step(
    description: Description,
    recipe: Recipe,
    worker: Worker,
    *,
    torch_device: torch.device,
    compute_dtype: torch.dtype,
    loss: LossOptions,
    logs: bool,
) -> StepPlan:
    """Return what every device computes. logs: whether this process logs choices and options without effect.

    Raises InputError for a recipe that does not fit the model, and StoreError if the processes have lost their store.
    """
    checkpointing = tuple(recipe.checkpointing_of(description.layers))
    check_choices(checkpointing)
    costs = arranging_model(description, recipe, _gpu_of_all(worker), DTYPES.get(compute_dtype), loss)

    def refusal_of_slices() -> str | None:
        try:
            check_pieces(description, "slices", slices=True)
        except InputError as error:
            return str(error)
        return None

    recipe, reason = with_slices(recipe, costs, torch_device.type, refusal_of_slices)
    layout = layout_of(recipe, costs, description)
    validate_program(layout.program)
    plan = StepPlan(description, recipe, costs, layout, reason or None, checkpointing)
    if logs:
        if reason:
            logger.info("slices: %s", reason)
        for sentence in unused_options(recipe, moves=any(plan.moves_activations)):
            logger.warning(sentence)
    return plan


def _gpu_of_all(worker: Worker) -> Hardware | None:
    """Return the GPU of the process that asks first, if it is known. All processes use it, so that they arrange the
    same order even if their GPUs differ."""
    if worker.torch_device.type != "cuda":
        return None
    return known_gpu(worker.write_once("GPU", torch.cuda.get_device_name(worker.torch_device)))
