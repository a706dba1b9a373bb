"""`slices = "auto"` of a pipeline: the number that the predicted steps of its model give."""

from __future__ import annotations

import logging

from evenpipe.attention.check import check_pieces
from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.recipe.slice_choice import with_slices

logger = logging.getLogger(__name__)


def cut_sequences(
    description: Description, costs: ModelCosts, recipe: Recipe, torch_device: str, *, says: bool
) -> tuple[Recipe, str | None]:
    """Return the recipe of a model with a number of slices, and why it is that number; None if a number was given. The
    same on every process.

    Args:
        torch_device: "cuda" or "cpu".
        says: whether this process logs it.
    """

    def refusal() -> str | None:
        try:
            check_pieces(description, "slices", slices=True)
        except InputError as error:
            return str(error)
        return None

    chosen, why = with_slices(recipe, costs, torch_device, refusal)
    if why and says:
        logger.info("slices: %s", why)
    return chosen, why or None
