"""Checks the arguments of a `Pipeline` before anything is built; each mistake has a one-sentence message."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from types import FrameType
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad

from evenpipe.attention.check import check_pieces
from evenpipe.errors import InputError
from evenpipe.experts.adopt import split_backwards
from evenpipe.given import is_whole
from evenpipe.model import Description, check_forward, self_check
from evenpipe.model.structure import first_line
from evenpipe.parallel.grid import AXES, Grid
from evenpipe.recipe.recipe import Recipe, RecipeOptions
from evenpipe.schedule import Order
from evenpipe.vocabulary import LossOptions
from evenpipe.words import refused

logger = logging.getLogger(__name__)

COMPUTES_ON = ("cpu", "cuda")
LARGEST_SEED = 2**64 - 1


def check_kinds(**arguments: Any) -> None:
    """Check the types of arguments whose values are checked later.

    Raises InputError, which names the first wrong argument and the accepted values.
    """
    for name, value in arguments.items():
        accepted, fits = _KINDS[name]
        if not fits(value):
            raise refused(name, value, accepted)


def check_no_autocast(torch_device: torch.device) -> None:
    """Refuse autocast: it would round some products of a step, but neither those of W nor transfers between devices."""
    if torch.is_autocast_enabled(torch_device.type):
        dtype = torch.get_autocast_dtype(torch_device.type)
        raise InputError(
            f"torch.autocast is on, with {dtype}; expected steps outside of it: Pipeline(compute_dtype={dtype})"
            " computes in that dtype"
        )


def check_memory_budget() -> None:
    """Refuse a budget below 1 for compiled layers with random numbers: torch (2.11 to 2.13) would recompute dropout
    with other numbers."""
    from torch._functorch import config

    if config.activation_memory_budget < 1:
        raise InputError(
            f"torch._functorch.config.activation_memory_budget is {config.activation_memory_budget:g}; it must be 1"
            " with compile_layers and dropout, for which torch computes wrong gradients otherwise;"
            ' activation_checkpointing="selective" saves memory too'
        )


_NORMS = {"clip_grad_norm_", "get_total_norm", "_get_total_norm"}
_NEED_WHOLE_MATRICES = {kind.__init__.__module__: kind.__name__ for kind in (torch.optim.Adafactor, torch.optim.Muon)}


def refuse_use_of_a_part(spread: Callable[[], str | None]) -> None:
    """Check which function asks for the parameters of this process.

    torch's functions may receive them through generators of the caller, so all functions on the stack are checked.

    Args:
        spread: returns the name of a parameter of which this process has only rows, or None without any. It is called
            only for optimizers that need whole matrices, since every step asks for the parameters.

    Raises:
        InputError: the caller is `torch.nn.utils.clip_grad_norm_` or `get_total_norm`, which would scale each process
            by another norm; or parameters are spread by rows and it is an optimizer that would take them for whole
            matrices.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == clip_grad.__name__ and function in _NORMS:
            raise InputError(
                f"torch.nn.utils.{function} sees only the gradients of this process, and would scale each process by"
                " another norm; expected pipeline.clip_grad_norm_(max_norm), which scales all by the norm of all"
                " gradients and returns it"
            )
        if function == "__init__" and (kind := _NEED_WHOLE_MATRICES.get(module)) and (name := spread()):
            raise InputError(
                f"torch.optim.{kind} would take the rows of {name} on this process for the whole matrix; expected"
                f" evenpipe.{kind}(pipeline, ...), which sees the rows of all processes"
            )
        frame = frame.f_back


def _or_none(kind: type) -> Any:
    return lambda value: value is None or isinstance(value, kind)


_KINDS: Mapping[str, tuple[str, Any]] = {
    "step": ("a whole number of steps, 0 or more", lambda value: is_whole(value) and value >= 0),
    "optimizer": ("an optimizer as in torch.optim, or None", _or_none(torch.optim.Optimizer)),
    "extra": ("a table of JSON values, or None", _or_none(Mapping)),
    "unhealthy": ("a text that says why, or None", _or_none(str)),
    "mesh": ("a torch.distributed DeviceMesh, or None", _or_none(DeviceMesh)),
    "recipe": ("a Recipe, or None", _or_none(Recipe)),
    "loss": ("LossOptions, or None", _or_none(LossOptions)),
    "seed": (f"a whole number from 0 to {LARGEST_SEED}", lambda value: is_whole(value) and 0 <= value <= LARGEST_SEED),
    "transforms": (
        "a list of LayerTransforms",
        lambda value: (
            isinstance(value, (list, tuple)) and all(callable(getattr(transform, "apply", None)) for transform in value)
        ),
    ),
    "self_check": ("True or False", lambda value: isinstance(value, bool)),
}


def check_positive(name: str, value: Any) -> None:
    """Raise InputError for anything but a number above 0."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value > 0:
        raise refused(name, value, "a number above 0")


def device_of_torch(requested: torch.device | str) -> torch.device:
    """Return the device on which a process computes. Raises InputError for an unknown device, or one that is not
    available."""
    try:
        torch_device = torch.device(requested)
    except (RuntimeError, TypeError):
        raise InputError(
            f'torch_device is {requested!r}, which is no device of torch; it must be "cpu" or "cuda"'
        ) from None
    if torch_device.type not in COMPUTES_ON:
        raise refused("torch_device", str(requested), '"cpu" or "cuda"')
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"torch_device is {str(requested)!r}, but torch finds no GPU here; it must be 'cpu'")
    return torch_device


def dtype_of_compute(parameter: torch.dtype, requested: torch.dtype | None, torch_device: torch.device) -> torch.dtype:
    """Return the dtype of activations and products; `requested` is the caller's choice. Raises InputError for an
    unsupported pair."""
    if parameter not in (torch.float32, torch.float64):
        raise refused("parameter_dtype", parameter, "torch.float32 or torch.float64")
    narrow = parameter == torch.float32
    if requested is None:
        return torch.bfloat16 if narrow and torch_device.type == "cuda" else parameter
    if requested != parameter and not (narrow and requested == torch.bfloat16):
        accepted = f"{parameter}, that of the parameters" + (", or torch.bfloat16" if narrow else "")
        raise refused("compute_dtype", requested, accepted)
    return requested


class PipelineOptions(RecipeOptions, total=False):
    """Options of a pipeline's recipe, as keyword arguments of `Pipeline`. Sizes of axes that are not given follow from
    the processes."""

    dp: int | None
    pp: int | None


OPTIONAL = (*AXES, "ep")
"""Axes whose sizes may follow from the processes."""


def sizes_given(recipe: Recipe | None, options: PipelineOptions) -> dict[str, int | None]:
    """Return the sizes of axes given by the caller, as arguments of `process_grid`; None for those not given."""
    if recipe is not None:  # `recipe_of` compares its devices with the remaining processes
        return {axis: getattr(recipe.parallelism, axis) for axis in OPTIONAL if axis != "pp"}
    return {axis: cast(int | None, options.get(axis)) for axis in OPTIONAL}


def recipe_of(recipe: Recipe | None, options: PipelineOptions, grid: Grid) -> Recipe:
    """Return the recipe of a pipeline on these processes.

    Raises InputError for a recipe of other sizes, options in addition to a recipe, or a recipe that cannot run.
    """
    sizes = {axis: grid.size(axis) for axis in OPTIONAL}
    if recipe is None:
        recipe = Recipe.of(**cast(RecipeOptions, {**options, **sizes}))
    elif options:
        raise InputError(f"recipe: given together with {', '.join(options)}; expected one or the other")
    mismatched = {axis: size for axis in OPTIONAL if (size := getattr(recipe.parallelism, axis)) != sizes[axis]}
    if mismatched:
        expected = {axis: sizes[axis] for axis in mismatched}
        raise InputError(
            f"recipe says {_sizes(mismatched)}; it must say {_sizes(expected)}, the sizes of the processes"
        )
    recipe.check_runnable()
    return recipe


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} = {size}" for axis, size in sizes.items())


def fault_of_architecture(description: Description, order: Order, recipe: Recipe) -> str | None:
    """Return why a small copy of the model, with layers cut into stages or sequences into pieces, does not compute the
    same as the uncut copy; None if it does."""
    separate = recipe.batch.separate
    suffix = ' and documents = "separate"' if separate else ""
    splits = any(map(order.splits_backward, range(order.devices)))
    try:
        if description.model is not None:
            check_forward(description.plain or description)
        self_check(description, split_backwards if splits else None, say=logger.warning)
        if recipe.parallelism.cp > 1:
            check_pieces(description, f"cp{suffix}", slices=False, separate=separate)
        if order.slices > 1:
            check_pieces(description, f"slices{suffix}", slices=True, separate=separate)
    except InputError as error:
        return str(error)
    except Exception as error:  # anything that a family's own forward raises: the other processes wait for a message
        return (
            f"{description.architecture} cannot be checked on a small copy ({type(error).__name__}:"
            f" {first_line(error)}): pass self_check=False to train it unchecked."
        )
    return None


def check_shardable(description: Description) -> None:
    """Raise InputError for a model with a scalar parameter: FSDP2 splits parameters by rows, and a scalar has none."""
    for name, shape in description.shapes.items():
        if not shape:
            raise InputError(
                f"data_parallel: 'shard', but the parameter {name} of {description.architecture} is a single number,"
                " which has no rows to shard; expected 'replicate'"
            )
