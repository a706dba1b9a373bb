"""Which layers of a model are alike, so that one of them can stand for all."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from evenpipe.model import Description
from evenpipe.model.shrink import said_of_layers

_INDEX = re.compile(r"(layer_?)?(idx|index|id|number)")


def kinds_of_layers(description: Description) -> tuple[int, ...]:
    """Return a number for each layer of a model; layers with the same number have the same modules, shapes and
    settings.

    Settings are plain attributes of modules, except their own number, and the per-layer settings of the config.
    """
    lists = [] if description.config is None else said_of_layers(description.config, description.layers)
    found: dict[Any, int] = {}
    return tuple(
        found.setdefault((_settings(description.layer(index)), tuple(str(one[index]) for one in lists)), len(found))
        for index in range(description.layers)
    )


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    return tuple((name, type(module), *_own_settings(module)) for name, module in layer.named_modules())


def _own_settings(module: nn.Module) -> tuple[Any, ...]:
    # Floats matter only by whether they are 0: a probability of dropout, a factor.
    plain = tuple(
        (name, bool(value) if isinstance(value, float) else value)
        for name, value in sorted(vars(module).items())
        if (value is None or isinstance(value, (bool, int, float, str))) and not _INDEX.fullmatch(name)
    )
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.requires_grad)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    )
    return plain, tensors
