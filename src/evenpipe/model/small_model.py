"""Builds a small whole model of a large one's architecture: narrow, with random weights and a layer of every kind."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.description import Description, describe
from evenpipe.model.packed_rows import nothing_packed
from evenpipe.model.shrink import STEPS, said_of_layers, small_copy
from evenpipe.model.structure import build_skeleton, first_line, layers_of, line_of_model
from evenpipe.model.transform import LayerTransform, Renumbered, added_modules, apply_to_all, reset_added, transformed

MINIMUM_LAYERS = 4
SMALL_ENOUGH = 80_000_000  # largest number of parameters if widths cannot be made small
NOISE = 0.05


class SmallModel(NamedTuple):
    """A small copy of a model."""

    description: Description
    dtype: torch.dtype
    """fp64 if it runs in it."""
    kept: list[int]
    """For each layer, that of the model."""


def small_model(description: Description, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)) -> SmallModel:
    """Return a small model that runs, in the first of these dtypes that it runs in.

    Noise is added to every parameter, since norms of ones and biases of zero hide errors.

    Raises:
        InputError: none of `STEPS` gives a model that runs; the sentence says whether the large one would run.
    """
    failures: list[Exception] = []
    for step in STEPS:
        for dtype in dtypes:
            try:
                model, kept = _build(description, dtype, **step)
                small = describe(model, spec=description.spec)  # before a use, which changes the modules of BigBird
                small = _transformed(small, description.transforms, kept)
                with torch.no_grad():
                    logits = model(input_ids=torch.arange(6).view(2, 3), use_cache=False, return_dict=True).logits
                if not logits.isfinite().all():
                    raise InputError("its logits are not finite")
                if _form(small) != _form(description):
                    raise InputError("it is put together in another way")
                return SmallModel(small, dtype, kept)
            except Exception as error:  # families raise many types on unsupported widths
                failures.append(error)
    failure = failures[0]
    told = (
        first_line(failure) if isinstance(failure, InputError) else f"{type(failure).__name__}: {first_line(failure)}"
    )
    place = line_of_model(failure)
    if place is not None and place == line_of_model(_failure_at_its_size(description)):
        raise InputError(
            f"{description.architecture} does not run with this config, in transformers and uncut either ({told}"
            f" at {place}): correct the sizes and options in the model's config."
        )
    raise InputError(
        f"{description.architecture} cannot be compared with its stages on a small copy, as its config cannot be made"
        f" small ({told}): pass self_check=False to train it unchecked."
    )


def kinds_of_layers(layers: Iterable[nn.Module]) -> list[Hashable]:
    """Return the kind of each layer, without sizes: the classes of its modules, and their settings except numbers."""
    return [
        frozenset(
            (re.sub(r"\d+", "#", name), type(module).__qualname__, frozenset(_settings(module)))
            for name, module in layer.named_modules()
        )
        for layer in layers
    ]


def _settings(module: nn.Module) -> list[tuple[str, bool | str | None]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and (value is None or isinstance(value, (bool, str)))
    ]


def choices_of_layers(config: PreTrainedConfig, kinds: Sequence[Hashable]) -> list[list[int]]:
    """Return choices of layers for a small copy, the fewest first.

    First, one layer of each kind, with the earliest others up to four; then, for configs that determine kinds by a
    layer's index (every eighth, all but the first three), all up to the last new kind; finally all. Fewer than four are
    repeated.
    """
    count = len(kinds)
    told = list(zip(kinds, *([repr(value) for value in said] for said in said_of_layers(config, count)), strict=True))
    first = {told.index(kind) for kind in told}
    others = [index for index in range(count) if index not in first]
    fewest = sorted([*first, *others[: max(0, MINIMUM_LAYERS - len(first))]])
    choices = [fewest, list(range(max(max(first) + 1, min(count, MINIMUM_LAYERS)))), list(range(count))]
    return [[choice[index % len(choice)] for index in range(max(len(choice), MINIMUM_LAYERS))] for choice in choices]


def _form(description: Description) -> tuple:
    """Return the properties that a small copy must share with its model."""
    structure = description.structure
    ends = (structure.first_parameters, structure.last_parameters)
    return (
        structure.layers_name,
        structure.embedding_module,
        structure.head_module,
        structure.layer_argument,
        structure.returns,
        *({re.sub(r"\d+", "#", name) for name in names} for names in ends),  # a tower of fewer layers is the same
        description.tied,
        description.padding_index is None,
        description.head_bias_name,
    )


def _build(description: Description, dtype: torch.dtype, **step: bool) -> tuple[PreTrainedModel, list[int]]:
    model_class, name = type(description.skeleton), description.structure.layers_name
    kinds = kinds_of_layers(layers_of(description.skeleton, name))
    for kept in choices_of_layers(description.config, kinds):
        config = small_copy(description.config, len(kinds), kept, **step)
        skeleton = build_skeleton(config, dtype, model_class)
        description.adapt(skeleton)
        apply_to_all(skeleton, name, [Renumbered(description.transforms, kept)])
        if len({*kinds_of_layers(layers_of(skeleton, name))}) == len({*kinds}):
            break
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    if size > SMALL_ENOUGH:
        raise InputError(f"{size:,} parameters remain")
    torch.default_generator.manual_seed(0)
    with torch.device("cpu"):
        model = model_class._from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
    return model.train(), kept


def _transformed(small: Description, transforms: Sequence[LayerTransform], kept: Sequence[int]) -> Description:
    """Return a small copy, whose live model changes with it, after the transforms of its model."""
    if not transforms:
        return small
    own = Renumbered(transforms, tuple(kept))
    after = transformed(small, [own])
    apply_to_all(small.model, small.structure.layers_name, [own])
    for name, module in added_modules(small.model, after.added):
        reset_added(name, module, seed=0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(NOISE * torch.randn_like(parameter))
    return after


def _failure_at_its_size(description: Description) -> Exception | None:
    """Return transformers' error on the model at its full size, run without storage; None if it runs."""
    model = build_skeleton(description.config, torch.float32, type(description.skeleton))
    try:
        with nothing_packed():  # positions without storage cannot be read
            model(input_ids=torch.zeros(2, 3, dtype=torch.int64, device="meta"), use_cache=False)
    except Exception as error:  # may also be an operation that needs storage
        return error
    return None
