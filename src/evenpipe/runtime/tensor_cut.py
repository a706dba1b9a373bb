"""Decides how layers are cut over the tensor ranks of a device, and how the exchange of rows overlaps with products.
The result is the same on every process."""

from __future__ import annotations

import itertools
import logging

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.parallel.grid import AXES, Grid
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.symmetric_memory import Fused, obstacle_to_fused
from evenpipe.parallel.tensor_ranks import TensorRanks
from evenpipe.recipe.recipe import Recipe
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.layers import ModelCut, report_whole
from evenpipe.tensor.ring import Ring
from evenpipe.words import refused

logger = logging.getLogger(__name__)


def cut_layers(
    description: Description, groups: Groups, recipe: Recipe, check: bool, *, stages: int
) -> tuple[tuple[ModelCut, TensorRanks] | None, str | None]:
    """Return the cut and the exchange of this device's ranks, and what overlaps their transfers with products in F and
    I, or why nothing does. None and None for one process per device. Collective.

    Args:
        check: compare cut and uncut small copies of the model on the first process.
        stages: number of stages of the pipeline.

    Raises:
        InputError: on every process, if the model cannot be cut or would be trained wrongly, or if the recipe asks for
            an overlap that cannot run here.
    """
    if groups.tensor is None or groups.everyone is None:
        return None, None
    exchange, is_first = TensorRanks(groups.tensor, groups.running), groups.everyone.position == 0
    if stages > 1 and description.structure.extras:
        accepted = f"1 for {stages} stages of {description.architecture}, whose layers hand on more than hidden states"
        raise refused("tp", exchange.size, accepted)
    cut, fault = None, None
    try:
        cut = cut_of_model(description, exchange.size, check=check and is_first)
    except InputError as error:
        fault = str(error)
    fault = groups.from_the_first(fault, "the self-check of tensor parallelism")
    if fault is not None:
        raise InputError(fault)
    assert cut is not None
    overlap = _overlap(exchange, groups, recipe)
    if is_first:
        report_whole(cut)
        logger.info("transfers of tensor parallelism beside products: %s", overlap)
    return (cut, exchange), overlap


def _overlap(exchange: TensorRanks, groups: Groups, recipe: Recipe) -> str:
    """Set up the overlap of transfers with products that the recipe asks for; return its description, or why there is
    none."""
    requested = recipe.parallelism.tensor_overlap
    if requested == "none":
        return "none, as asked for"
    if requested == "auto":
        return "none, because neither 'ring' nor 'fused' has been measured on GPUs"
    if recipe.compile_layers:  # a transfer would end the compiled region
        return "none, because layers are compiled"
    if requested == "ring":
        exchange.overlap = Ring(exchange)
        return "ring; its gain on GPUs has not been measured"
    obstacle = obstacle_to_fused(exchange, groups.torch_device)
    if any(cannot for (cannot,) in groups.numbers([obstacle is not None])):
        obstacle = obstacle or "some other devices cannot"
        raise InputError(f"tensor_overlap: 'fused', but {obstacle}; expected 'auto', 'none' or 'ring'")
    exchange.overlap = Fused(exchange)
    return "torch's fused operations on symmetric memory; they have not been run on a GPU yet"


def names_on_first_rank(description: Description, tensor: tuple[ModelCut, TensorRanks] | None) -> set[str]:
    """Return the names of parameters that only the first tensor rank of a device holds. tensor: as returned by
    `cut_layers`."""
    if tensor is None:
        return set()
    return {name for index in range(description.layers) for name in tensor[0].alone(description, index)}


def places_of(grid: Grid) -> dict[int, str]:
    """Return for each process the text that messages add to its number. Empty if each process is its own device."""
    if grid.size("cp") == grid.size("tp") == grid.size("ep") == 1:
        return {}
    named = {"dp": "replica", "pp": "device", "cp": "context rank", "tp": "tensor rank"}
    shown = [axis for axis in AXES if axis == "pp" or grid.size(axis) > 1]
    names: dict[int, str] = {}
    for coordinates in itertools.product(*(range(grid.size(axis)) for axis in AXES)):
        by_axis = dict(zip(AXES, coordinates, strict=True))
        names[grid.at(**by_axis)] = ", ".join(f"{named[axis]} {by_axis[axis]}" for axis in shown)
    return names
