"""Small copies of a model, for checks before it is trained: narrow, with random weights and a layer of every kind."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.description import Description, describe
from evenpipe.model.fp64 import InFp64
from evenpipe.model.packed_rows import nothing_packed
from evenpipe.model.rules import undisturbed
from evenpipe.model.shrink import STEPS, said_of_layers, small_config
from evenpipe.model.structure import build_skeleton, first_line, layers_of, line_of_model
from evenpipe.model.transform import LayerTransform, Renumbered, added_modules, apply_to_all, reset_added, transformed

MINIMUM_LAYERS = 4
SMALL_ENOUGH = 80_000_000  # largest number of parameters if widths cannot be made small
NOISE = 0.05

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class SmallCopy:
    """A small copy of a model in one arithmetic."""

    description: Description
    """With a live `model`. It runs on at most `FEW_TOKENS` tokens: more may change its rotary tables."""
    dtype: torch.dtype
    """fp64 if the copy runs in fp64."""
    kept_layers: list[int]
    """For each layer, the index of the layer in the model."""
    exact: bool = False
    """Casts to fp32 give fp64 instead (`InFp64`)."""
    _results: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute in its arithmetic, as `checking`."""
        with checking(), InFp64() if self.exact else nullcontext():
            yield

    def once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return what `compute` returned first for this key."""
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result


class SmallCopies:
    """The small copies of a model, each made on first use.

    Checks get them from `SmallCopies.of`, so checks share the copies and the results of the whole copies while somebody
    holds the object that `of` returned. Otherwise nothing outlives a check.
    """

    def __init__(self, description: Description) -> None:
        self._description = description
        self._configs: dict[int, tuple[PreTrainedConfig, list[int]]] = {}
        """By index in `STEPS`: the config, and the layers that it keeps."""

    @classmethod
    def of(cls, description: Description) -> SmallCopies:
        copies = _KEPT.get(id(description.skeleton))
        if copies is None:
            copies = _KEPT[id(description.skeleton)] = cls(description)
        return copies

    @cached_property
    def plain(self) -> SmallCopy:
        """Computes as transformers does. Raises InputError if no small copy could be made."""
        with checking():
            return self._make((torch.float64, torch.float32))

    @cached_property
    def exact(self) -> SmallCopy:
        """Computes in fp64 throughout if that runs, else in fp32. Raises InputError if no small copy could be made."""
        with checking():
            with suppress(InputError), InFp64():
                return self._make((torch.float64,), exact=True)
            return self._make((torch.float32,))

    def _make(self, dtypes: Sequence[torch.dtype], *, exact: bool = False) -> SmallCopy:
        """Return a small copy that runs, in the first of these dtypes that it runs in.

        Raises:
            InputError: none of `STEPS` gives a model that runs; the sentence says whether the large one would run.
        """
        description = self._description
        failures: list[Exception] = []
        for step in range(len(STEPS)):
            for dtype in dtypes:
                try:
                    if step not in self._configs:
                        self._configs[step] = _choose(description, **STEPS[step])
                    config, kept_layers = self._configs[step]
                    model = _build(type(description.skeleton), config, dtype)
                    small = describe(model, spec=description.spec)  # before a forward, which changes BigBird's modules
                    small = _transformed(small, description.transforms, kept_layers)
                    with torch.no_grad():
                        logits = model(input_ids=torch.arange(6).view(2, 3), use_cache=False, return_dict=True).logits
                    if not logits.isfinite().all():
                        raise InputError("its logits are not finite")
                    if _form(small) != _form(description):
                        raise InputError("it is put together in another way")
                    return SmallCopy(small, dtype, kept_layers, exact)
                except Exception as error:  # families raise many types on unsupported widths
                    failures.append(error)
        failure = failures[0]
        kind = "" if isinstance(failure, InputError) else f"{type(failure).__name__}: "
        reason, location = f"{kind}{first_line(failure)}", line_of_model(failure)
        if location is not None and location == line_of_model(_failure_at_its_size(description)):
            raise InputError(
                f"{description.architecture} does not run with this config, in transformers and uncut either ({reason}"
                f" at {location}): correct the sizes and options in the model's config."
            )
        raise InputError(
            f"{description.architecture} cannot be compared with its stages on a small copy, as its config cannot be"
            f" made small ({reason}): pass self_check=False to train it unchecked."
        )


_KEPT: WeakValueDictionary[int, SmallCopies] = WeakValueDictionary()
"""By the id of the skeleton, which the copies keep alive."""


@contextmanager
def checking() -> Iterator[None]:
    """Preserve the random state, record gradients, and use one thread: on busy cores, several threads take ten times as
    long on such small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with undisturbed(), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)


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

    First, one layer of each kind, filled up to four with the earliest other layers; then, for configs that determine
    kinds by a layer's index (every eighth, all but the first three), all layers up to the last new kind; finally all.
    Fewer than four layers are repeated.
    """
    count = len(kinds)
    signatures = list(
        zip(kinds, *([repr(value) for value in values] for values in said_of_layers(config, count)), strict=True)
    )
    first = {signatures.index(kind) for kind in signatures}
    remaining = [index for index in range(count) if index not in first]
    fewest = sorted([*first, *remaining[: max(0, MINIMUM_LAYERS - len(first))]])
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


def _choose(description: Description, **step: bool) -> tuple[PreTrainedConfig, list[int]]:
    """Return a small config, and for each of its layers the index of the layer in the model."""
    name = description.structure.layers_name
    kinds = kinds_of_layers(layers_of(description.skeleton, name))
    for kept_layers in choices_of_layers(description.config, kinds):
        config = small_config(description.config, len(kinds), kept_layers, **step)
        skeleton = build_skeleton(config, torch.float32, type(description.skeleton))
        description.adapt(skeleton)
        apply_to_all(skeleton, name, [Renumbered(description.transforms, kept_layers)])
        if len({*kinds_of_layers(layers_of(skeleton, name))}) == len({*kinds}):
            break
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    if size > SMALL_ENOUGH:
        raise InputError(f"{size:,} parameters remain")
    return config, kept_layers


def _build(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model. Noise is added to every parameter, since norms of ones and biases of zero hide errors."""
    torch.default_generator.manual_seed(0)
    with torch.device("cpu"):
        model = model_class._from_config(copy.deepcopy(config), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
    return model.train()


def _transformed(small: Description, transforms: Sequence[LayerTransform], kept_layers: Sequence[int]) -> Description:
    """Return a small copy after the transforms of its model, which are also applied to its live model."""
    if not transforms:
        return small
    renumbered = Renumbered(transforms, tuple(kept_layers))
    result = transformed(small, [renumbered])
    apply_to_all(small.model, small.structure.layers_name, [renumbered])
    for name, module in added_modules(small.model, result.added):
        reset_added(name, module, seed=0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(NOISE * torch.randn_like(parameter))
    return result


def _failure_at_its_size(description: Description) -> Exception | None:
    """Return transformers' error on the model at its full size, run without storage; None if it runs."""
    model = build_skeleton(description.config, torch.float32, type(description.skeleton))
    try:
        with nothing_packed():  # positions without storage cannot be read
            model(input_ids=torch.zeros(2, 3, dtype=torch.int64, device="meta"), use_cache=False)
    except Exception as error:  # may also be an operation that needs storage
        return error
    return None
