"""Copies of a model on the meta device, each with only some of its layers.

A planner makes hundreds of stages of a model, and building all layers of a deep mixture of experts takes 20 times as
long as copying the layers of a stage.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.model.description import Description
from evenpipe.model.live import set_attributes
from evenpipe.model.rules import restore_buffers
from evenpipe.model.structure import build_skeleton, layers_of, strip
from evenpipe.model.transform import apply_to_all

Module = TypeVar("Module", bound=nn.Module)


class Copies:
    """Copies of a model in one dtype.

    Attributes:
        whole: the model, without storage; not to be changed.
    """

    def __init__(self, description: Description, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.whole = build_skeleton(description.config, dtype, type(description.skeleton))
        set_attributes(self.whole, description.changed)
        description.adapt(self.whole)
        self._layers_name = description.structure.layers_name
        apply_to_all(self.whole, self._layers_name, description.transforms)
        self._layers = layers_of(self.whole, self._layers_name)

    @cached_property
    def buffer_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of buffers: some follow the model's dtype (decays, masks that multiply scores), others do not
        (rotary tables)."""
        return {name: buffer.dtype for name, buffer in self.whole.named_buffers()}

    @cached_property
    def fp32_parameters(self) -> frozenset[str]:
        """Names of the parameters that transformers keeps in fp32 in a model of a narrower dtype: routers, decays."""
        if self._dtype.itemsize >= torch.float32.itemsize:
            return frozenset()
        return frozenset(name for name, parameter in self.whole.named_parameters() if parameter.dtype == torch.float32)

    @cached_property
    def _stripped(self) -> nn.ModuleList:
        layers = copied(self._layers)
        for layer in layers:
            strip(layer)
        return layers

    def of(self, kept_layers: range) -> PreTrainedModel:
        """Return a copy with meta parameters, and buffers with their values on the CPU. Its layers outside
        `kept_layers` are stripped (see `strip`), and share their submodules with other copies.

        Raises:
            InputError: as `restore_buffers`.
        """
        other_layers = {index: layer for index, layer in enumerate(self._layers) if index not in kept_layers}
        # While buffers get their values, the other layers are the original ones: a rule may go through all layers.
        model = copied(self.whole, {id(layer): layer for layer in other_layers.values()})
        restore_buffers(model, self._layers_name, kept_layers)
        layers = layers_of(model, self._layers_name)
        shared: dict[int, Any] = {}
        if other_layers:
            shared = {id(child): child for layer in self._stripped for child in layer.children()}
        for index in other_layers:
            layers[index] = copied(self._stripped[index], shared)
        return model


def copied(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Return the result of `copy.deepcopy` in a third of the time: `deepcopy` spends most of its time on empty
    dictionaries of hooks.

    Args:
        memo: id of an object -> object to use instead of a copy; filled with the copies.
    """
    memo = {} if memo is None else memo
    if hasattr(type(module), "__deepcopy__"):
        return copy.deepcopy(module, memo)
    if id(module) not in memo:
        memo[id(module)] = new = type(module).__new__(type(module))
        for name, value in vars(module).items():
            if name == "_modules":
                copied_value: Any = {
                    key: None if child is None else copied(child, memo) for key, child in value.items()
                }
            elif isinstance(value, (dict, set)) and not value:
                copied_value = value.copy()
            else:
                copied_value = copy.deepcopy(value, memo)
            vars(new)[name] = copied_value
    result: Module = memo[id(module)]
    return result


def copies(description: Description, dtype: torch.dtype) -> Copies:
    """Return the copies of a model in a dtype, built once."""
    by_dtype = _COPIES.setdefault(description.skeleton, {})
    if dtype not in by_dtype:
        by_dtype[dtype] = Copies(description, dtype)
    return by_dtype[dtype]


_COPIES: MutableMapping[nn.Module, dict[torch.dtype, Copies]] = WeakKeyDictionary()
"""Skeleton -> dtype -> copies."""
