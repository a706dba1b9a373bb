"""Draws initial weights that do not depend on the layout: each module's seed derives from the run's seed and its name.

The model's own rules are applied in fp32 on the CPU, and the values are then cast. The vocabulary matrices are drawn in
blocks of 256 rows, and the experts of a layer separately, each with its own seed, so that all processes that share such
a tensor get the same values, and no process draws the full tensor.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.experts import fused_experts
from evenpipe.model.modules import ModuleStage
from evenpipe.model.placement import Held
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
from evenpipe.model.structure import embedding_of, meta_matrix, persistent_buffers
from evenpipe.model.transform import added_modules, reset_added
from evenpipe.words import count

BLOCK_ROWS = 256


def held_by(stage: Stage | ModuleStage, description: Description) -> dict[str, Held[torch.Tensor]]:
    """Return the checkpointed tensors of a stage, its parameters and persistent buffers, by name."""
    shapes = description.shapes
    stored = (*stage.named_parameters(), *persistent_buffers(stage))
    return {name: Held(tensor, stage.placement_of(name, shapes[name])) for name, tensor in stored}


def initialize(
    stage: Stage, description: Description, seed: int, held: Mapping[str, Held[torch.Tensor]] | None = None
) -> None:
    """Draw all parameters of a stage, with the same values for every cut and device, and up to a cast for every dtype.

    Args:
        stage: from `build_stage`.
        seed: the run's seed. `initial_rows` draws the vocabulary matrices.
        held: this process's shards of the parameters, by name, if they are not in the stage.

    Raises:
        InputError: transformers has no rule for one of the parameters.
    """
    structure, model = description.structure, description.skeleton
    embedding = embedding_of(stage.whole, structure.embedding_module)
    experts, shapes = fused_experts(model), dict(description.shapes)
    fused = {f"{name}.{key}" for name, module in experts.items() for key in module._parameters}
    added = {inner for _, module in added_modules(stage.whole, description.added) for inner in module.modules()}
    shapes |= {name: torch.Size([1, *shape[1:]]) for name, shape in shapes.items() if name in fused}
    draw = _Draw(stage, shapes, held or held_by(stage, description))
    with undisturbed(), torch.no_grad(), meta_matrix(embedding):
        for unit in units(stage.whole, structure.layers_name):
            with draw.blank(unit.name, unit.module.named_modules(), fused) as drawn:
                if drawn:
                    unit.apply_rules(seed)
                    torch.default_generator.manual_seed(seed_of(seed, unit.name, "as constructed"))
                    unit.fill_gaps(lambda module: {} if module in added else module._parameters)
        for name, module, owner in children_first(stage.whole, "", stage.whole):
            if structure.layers_name.startswith(f"{name}."):  # a model around the list of layers
                with draw.blank(name, [("", module)]) as drawn:
                    if drawn:
                        torch.default_generator.manual_seed(seed_of(seed, name))
                        owner._init_weights(module)
                    for key in drawn:
                        if untouched(module.get_parameter(key)):
                            Unit(name, module, owner, stage.whole, None).refuse("", key)
        for unit in units(model, structure.layers_name):
            for name in experts:
                if f"{name}.".startswith(f"{unit.name}."):
                    _draw_experts(draw.held, unit, name, seed)


def initialize_added(
    stage: Stage, description: Description, seed: int, held: Mapping[str, Held[torch.Tensor]] | None = None
) -> None:
    """Likewise draw the parameters that transforms have added to a stage, by `reset_parameters` of their modules."""
    draw = _Draw(stage, description.shapes, held or held_by(stage, description))
    for name, module in added_modules(stage.whole, description.added):
        with torch.no_grad(), draw.blank(name, module.named_modules()):
            reset_added(name, module, seed)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Draws full parameters of a stage, of which this process keeps its shard."""

    stage: Stage
    shapes: Mapping[str, torch.Size]
    """Shapes of the tensors drawn at once: a parameter, or a single expert of it."""
    held: Mapping[str, Held[torch.Tensor]]

    @contextlib.contextmanager
    def blank(
        self, name: str, modules: Iterable[tuple[str, nn.Module]], discarded: Collection[str] = ()
    ) -> Iterator[list[str]]:
        """Replace the direct parameters of these modules by blank full tensors; on exit, keep this process's shards.

        Stand-ins for parameters of other stages are plain tensors without memory, to which no rule can write: they have
        memory inside the context. Yields the names of the parameters within their modules; without any, nothing is
        replaced.

        Args:
            name: name of the module that contains `modules`, whose names are relative to it.
            discarded: parameters that are not kept.
        """
        replaced: list[tuple[nn.Module, str, nn.Parameter | None, str]] = []
        elsewhere = []
        for inner, module in modules:
            for key, parameter in module._parameters.items():
                full = ".".join(component for component in (name, inner, key) if component)
                if parameter is not None or full in self.stage.held:  # also those of another rank, for the rules
                    replaced.append((module, key, parameter, full))
            tensors = [(key, value) for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
            elsewhere += [(module, key, value) for key, value in tensors]
        if not replaced:
            yield []
            return
        try:
            for module, key, stand_in in elsewhere:
                setattr(module, key, torch.empty(stand_in.shape))
            for module, key, _, full in replaced:
                module._parameters[key] = _blank(self.shapes[full])
            yield [key for _, key, _, _ in replaced]
            for module, key, parameter, full in replaced:
                if parameter is not None and full not in discarded:
                    self.held[full].fill(module.get_parameter(key))
        finally:
            for module, key, parameter, _ in replaced:
                module._parameters[key] = parameter
            for module, key, stand_in in elsewhere:
                setattr(module, key, stand_in)


def _draw_experts(shards: Mapping[str, Held[torch.Tensor]], unit: Unit, name: str, seed: int) -> None:
    """Draw the experts of a module that a process holds, one after the other.

    Args:
        shards: of parameters, by name.
        unit: of the skeleton; its rules, or those of a module around the experts, draw them.
        name: of the module with the experts.
    """
    around = [
        entry
        for entry in children_first(unit.module, unit.name, unit.owner)
        if f"{name}.".startswith(f"{entry[0]}.")  # from the experts outwards
    ]
    held = {key: shard for key in around[0][1]._parameters if (shard := shards.get(f"{name}.{key}")) is not None}
    for number in sorted(
        {index for shard in held.values() for entries in shard.placement.ranges(0) for index in entries}
    ):
        drawn = _drawn_expert(around, seed, number)
        for key, shard in held.items():
            shard.fill(drawn[key], start=number)


def _drawn_expert(
    around: list[tuple[str, nn.Module, PreTrainedModel]], seed: int, number: int
) -> dict[str, torch.Tensor]:
    """Return the parameters of an expert, [1, ...], by the rules for its module and then for the modules around it. The
    latter are on the meta device, and draw nothing."""
    module = around[0][1]
    fused = module._parameters
    drawn = {
        key: None if parameter is None else _blank(torch.Size([1, *parameter.shape[1:]]))
        for key, parameter in fused.items()
    }
    module._parameters = drawn
    try:
        for name, submodule, owner in around:
            torch.default_generator.manual_seed(seed_of(seed, name, number))
            owner._init_weights(submodule)
    finally:
        module._parameters = fused
    return {key: parameter.detach() for key, parameter in drawn.items() if parameter is not None}


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
    if not 0 <= start <= stop <= description.rows_of(name):
        raise InputError(
            f"rows [{start}, {stop}) are not within the vocabulary of {count(description.rows_of(name), 'row')}."
        )
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
