"""Changes to the layers of a model, in an ordered list, all with the same signature.

    before parameters are taken     of the model: added modules and terms (adapters), in its skeleton, in every stage,
                                    and in the small copies of the checks: `transformed`
    afterwards                      of the runtime: the cut over tensor ranks, attention on shares of sequences,
                                    experts, split backward, checkpointing or compilation, placement of activations,
                                    random numbers

The transforms of the runtime are ordered in `runtime/device.py`; each is in the file of its feature.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.rules import seed_of, undisturbed
from evenpipe.model.structure import layers_of


class LayerTransform(Protocol):
    """A change to the layers of a model."""

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        """Change layers in place; what a layer becomes does not depend on the stage that has it.

        Args:
            model: a model, or a stage with some of its layers.
            layers: by index in the model. Parameters may be on the meta device.
        """
        ...


@dataclass(frozen=True, slots=True)
class Renumbered:
    """Transforms of a model, for a small copy that has some of its layers."""

    transforms: Sequence[LayerTransform]
    numbers: Sequence[int]
    """For each layer of the copy, the index of the layer in the model."""

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        for position, layer in layers.items():  # separately, since several may be copies of the same layer
            for transform in self.transforms:
                transform.apply(model, {self.numbers[position]: layer})


def apply_to_all(model: nn.Module, layers_name: str, transforms: Iterable[LayerTransform]) -> None:
    """Apply transforms in their order to all layers of a model."""
    layers = dict(enumerate(layers_of(model, layers_name)))
    for transform in transforms:
        transform.apply(model, layers)


def transformed(description: Description, transforms: Sequence[LayerTransform]) -> Description:
    """Return the description of a model after transforms that add modules to its layers, or terms to its linear layers
    (`linear.add_term`). A live model does not change; `reset_parameters` of the added modules sets their initial
    values.

    Raises:
        InputError: a transform has removed or replaced a parameter, or has changed plain modules.
    """
    if not transforms:
        return description
    if description.config is None:
        raise InputError("transforms: a model of plain modules has its layers from you, change them there")
    skeleton, old_shapes = copy.deepcopy(description.skeleton), description.shapes
    apply_to_all(skeleton, description.structure.layers_name, transforms)
    result = replace(description, skeleton=skeleton, transforms=tuple(transforms), plain=description)
    for name, shape in old_shapes.items():
        if result.shapes.get(name) != shape:
            raise InputError(
                f"transforms: {name} is {result.shapes.get(name, 'missing')} behind them; expected {shape} as before:"
                " they may add parameters only"
            )
    return result


def added_modules(model: nn.Module, added: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the outermost modules whose parameters are all in `added`."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        parameter_names = [f"{name}.{key}" for key, _ in module.named_parameters()]
        if parameter_names and not name.startswith(inside or "\0") and all(key in added for key in parameter_names):
            yield name, module
            inside += (f"{name}.",)


def reset_added(name: str, module: nn.Module, seed: int) -> None:
    """Draw initial values for an added module, which depend only on `seed` and its name."""
    with undisturbed(), torch.no_grad():
        torch.default_generator.manual_seed(seed_of(seed, name))
        module.reset_parameters()  # type: ignore[operator]
