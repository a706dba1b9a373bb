"""Draws initial weights that do not depend on the layout: each module's seed derives from the run's seed and its name.

The model's own rules are applied in fp32 on the CPU, and the values are then cast. The vocabulary matrices are drawn in
blocks of 256 rows, so that every shard gets the same rows and no process draws the whole matrix.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.rules import (
    Unit,
    children_first,
    marked,
    module_and_owner,
    seed_of,
    undisturbed,
    units,
    untouched,
)
from evenpipe.model.stage import Stage
from evenpipe.model.structure import embedding_of, meta_matrix

BLOCK_ROWS = 256


def initialize(stage: Stage, description: Description, seed: int) -> None:
    """Draw all parameters of a stage, with the same values for every cut and device, and except for a cast every dtype.

    Args:
        stage: from `build_stage`.
        seed: the run's seed. `initial_rows` draws the vocabulary matrices.

    Raises:
        InputError: transformers has no rule for one of the parameters.
    """
    structure = description.structure
    embedding, shapes = embedding_of(stage.whole, structure.embedding_module), description.shapes
    with undisturbed(), torch.no_grad(), meta_matrix(embedding):
        for unit in units(stage.whole, structure.layers_name):
            with _drawing(stage, shapes, unit.name, unit.module.named_modules()) as drawn:
                if drawn:
                    unit.apply_rules(seed)
                    torch.default_generator.manual_seed(seed_of(seed, unit.name, "as constructed"))
                    unit.fill_gaps(lambda module: module._parameters)
        for name, module, owner in children_first(stage.whole, "", stage.whole):
            if structure.layers_name.startswith(f"{name}."):  # a model around the list of layers
                with _drawing(stage, shapes, name, [("", module)]) as drawn:
                    if drawn:
                        torch.default_generator.manual_seed(seed_of(seed, name))
                        owner._init_weights(module)
                    for key in drawn:
                        if untouched(module.get_parameter(key)):
                            Unit(name, module, owner, stage.whole, None).refuse("", key)


@contextlib.contextmanager
def _drawing(
    stage: Stage, shapes: Mapping[str, torch.Size], name: str, modules: Iterable[tuple[str, nn.Module]]
) -> Iterator[list[str]]:
    """Replace the direct parameters of these modules by blank whole ones, and copy the stage's part of those back on
    exit.

    Stand-ins for parameters of other stages are plain tensors without memory, to which no rule can write: meanwhile
    they have memory. Yields the names of the parameters within their modules; without any, nothing is replaced.

    Args:
        shapes: of whole parameters.
        name: of the module around the modules, which have their names in it.
    """
    held: list[tuple[nn.Module, str, nn.Parameter | None, str]] = []
    elsewhere = []
    for inner, module in modules:
        for key, parameter in module._parameters.items():
            full = ".".join(part for part in (name, inner, key) if part)
            if parameter is not None or full in stage.held:  # rules want one that another rank holds, too
                held.append((module, key, parameter, full))
        elsewhere += [(module, key, value) for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
    if not held:
        yield []
        return
    try:
        for module, key, stand_in in elsewhere:
            setattr(module, key, torch.empty(stand_in.shape))
        for module, key, _, full in held:
            module._parameters[key] = _blank(shapes[full])
        yield [key for _, key, _, _ in held]
        for module, key, parameter, full in held:
            if parameter is not None:
                parameter.copy_(stage.part_of(full, module.get_parameter(key)))
    finally:
        for module, key, parameter, _ in held:
            module._parameters[key] = parameter
        for module, key, stand_in in elsewhere:
            setattr(module, key, stand_in)


def initial_rows(description: Description, name: str, start: int, stop: int, seed: int) -> torch.Tensor:
    """Return rows [start, stop) of a vocabulary matrix, or entries of the head's bias, the same for every layout.

    Args:
        name: `description.embedding_name`, `head_name` (the same matrix in a tied model) or `head_bias_name`.

    Returns: fp32 on the CPU, [stop - start, hidden_size] (bias: [stop - start]). The embedding's padding row is zero.
    """
    is_embedding = name == description.embedding_name or (description.tied and name == description.head_name)
    is_bias = name == description.head_bias_name
    if not (is_embedding or is_bias or name == description.head_name):
        names = ", ".join(description.vocabulary_names)
        raise InputError(f"name = {name!r} is no vocabulary matrix of {description.architecture}, which has {names}.")
    if not 0 <= start <= stop <= description.vocabulary_size:
        raise InputError(f"rows [{start}, {stop}) are not within the vocabulary of {description.vocabulary_size} rows.")
    structure, model = description.structure, description.skeleton
    module_name = structure.embedding_module if is_embedding else structure.head_module
    padding = description.padding_index if is_embedding else None
    pieces = [torch.empty((0,) if is_bias else (0, description.hidden_size))]
    with undisturbed(), torch.no_grad():
        for first in range(start - start % BLOCK_ROWS, stop, BLOCK_ROWS):
            block = _drawn_block(model, module_name, seed, first // BLOCK_ROWS)
            rows = block.get_parameter("bias" if is_bias else "weight").detach()
            if untouched(rows):
                raise InputError(f"transformers gives no fresh value to {name} of {description.architecture}.")
            if padding is not None and first <= padding < first + BLOCK_ROWS:
                rows[padding - first] = 0.0
            pieces.append(rows[max(start - first, 0) : stop - first])
    return torch.cat(pieces)


def _blank(shape: torch.Size) -> nn.Parameter:
    return nn.Parameter(marked(shape, torch.float32), requires_grad=False)


def _drawn_block(model: PreTrainedModel, name: str, seed: int, number: int) -> nn.Module:
    """Draw one block of rows by the rules for the module itself and then the rules for the modules around it.

    Some families draw their embedding in its parent's rule. So the block temporarily replaces the embedding; all other
    modules are on the meta device and draw nothing.
    """
    parent_name, _, attribute = name.rpartition(".")
    parent, original = model.get_submodule(parent_name), model.get_submodule(name)
    block = _block(original)
    setattr(parent, attribute, block)
    try:
        while True:
            torch.default_generator.manual_seed(seed_of(seed, name, number))
            module, owner = module_and_owner(model, name)
            owner._init_weights(module)
            if not name:
                return block
            name = name.rpartition(".")[0]
    finally:
        setattr(parent, attribute, original)


def _block(original: nn.Module) -> nn.Module:
    """Return a module of the same class and attributes with BLOCK_ROWS rows."""
    block = copy.copy(original)
    block._parameters = {
        key: None if parameter is None else _blank(torch.Size([BLOCK_ROWS, *parameter.shape[1:]]))
        for key, parameter in original._parameters.items()
    }
    if isinstance(block, nn.Embedding):
        block.num_embeddings, block.padding_idx = BLOCK_ROWS, None
    elif isinstance(block, nn.Linear):
        block.out_features = BLOCK_ROWS
    return block
