"""Applies transformers' own rules for initial values (`_init_weights`) to parts of a model.

They give values to buffers that are in no checkpoint (rotary frequencies, embedding scales) and to initial weights.
Rules run on children before parents, since some families rescale their residual projections in the parent's rule.
Tensors start as NaN, so values that the rules leave out are found, and copied from a real layer that is built from its
class and index.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError

Tensors = Mapping[str, torch.Tensor | None]


def seed_of(seed: int, *names: object) -> int:
    """Return a seed for a name, by SHA-256, so that it is the same in every process and run."""
    text = "\0".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the CPU's random state on exit. Accelerators are not touched, since all drawing is on the CPU."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a model that is initialised on its own: a layer, or a module outside the list of layers."""

    name: str
    module: nn.Module
    owner: PreTrainedModel
    """The innermost transformers model around it: its rules apply."""
    model: PreTrainedModel
    layer_index: int | None

    def apply_rules(self, seed: int) -> None:
        """Run the rules on every module of the unit, each with a seed from `seed` and its name."""
        for name, module, owner in children_first(self.module, self.name, self.owner):
            torch.default_generator.manual_seed(seed_of(seed, name))
            owner._init_weights(module)

    def gaps(self, tensors_of: Callable[[nn.Module], Tensors]) -> list[tuple[str, str, torch.Tensor]]:
        """Return (module within the unit, name, tensor) of every tensor that got no value from a rule.

        Args:
            tensors_of: returns the dictionary of parameters or buffers of a module.
        """
        return [
            (prefix, key, value)
            for prefix, module in self.module.named_modules()
            for key, value in tensors_of(module).items()
            if value is not None and not value.is_meta and untouched(value)
        ]

    def fill_gaps(self, tensors_of: Callable[[nn.Module], Tensors]) -> None:
        """Copy tensors that the rules left out from a real layer, or refuse with the name.

        Args:
            tensors_of: returns the dictionary of parameters or buffers of a module.
        """
        gaps = self.gaps(tensors_of)
        real = self._construct() if gaps else None
        for prefix, key, gap in gaps:
            value = None if real is None else tensors_of(real.get_submodule(prefix)).get(key)
            if value is None or value.shape != gap.shape or untouched(value):
                self.refuse(prefix, key)
            gap.copy_(value)

    def refuse(self, prefix: str, key: str) -> NoReturn:
        tensor = ".".join(component for component in (self.name, prefix, key) if component)
        architecture = type(self.model).__name__
        raise InputError(f"transformers gives no fresh value to {tensor}, so {architecture} cannot be built in parts.")

    def _construct(self) -> nn.Module | None:
        """Build the same module with storage on the CPU; None if its constructor requires other arguments."""
        config = self.model.config.get_text_config()
        parameters = inspect.signature(type(self.module).__init__).parameters
        offered: dict[str, Any] = {name: getattr(config, name) for name in parameters if hasattr(config, name)}
        offered["config"] = config
        for name in ("layer_idx", "layer_index", "layer_id", "layer_number", "idx"):
            offered[name] = self.layer_index
        try:
            with torch.device("cpu"):
                return type(self.module)(**{name: offered[name] for name in parameters if name in offered})
        except Exception:  # unusual constructor; the caller refuses with the name
            return None


def units(model: PreTrainedModel, layers_name: str) -> list[Unit]:
    """Return all units of a model: every layer, and every module outside the list of layers."""
    result = []

    def walk(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        if name and name != layers_name and not layers_name.startswith(f"{name}."):
            result.append(Unit(name, module, owner, model, None))
            return
        for child_name, child in module.named_children():
            inner = f"{name}.{child_name}" if name else child_name
            if name == layers_name:
                result.append(Unit(inner, child, owner, model, int(child_name)))
            else:
                walk(child, inner, owner)

    walk(model, "", model)
    return result


def children_first(
    module: nn.Module, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield (name, module, the transformers model whose rules apply) for a module and its descendants, parents last."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from children_first(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner


def module_and_owner(model: PreTrainedModel, target: str) -> tuple[nn.Module, PreTrainedModel]:
    """Return the module of that name, and the transformers model whose rules apply to it."""
    return next((module, owner) for name, module, owner in children_first(model, "", model) if name == target)


def marked(shape: torch.Size, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return a tensor full of NaN (integers: the smallest), which shows whether it was filled later."""
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    else:
        value = False if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=device)


def untouched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor still contains the mark of `marked`. Booleans have no mark."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def restore_buffers(model: PreTrainedModel, layers_name: str, kept_layers: range) -> None:
    """Give every meta buffer its value (rotary frequencies, embedding scales, ...) on the CPU.

    Parameters stay on the meta device, and so do layers outside `kept_layers`. Buffers keep their original dtype
    (rotary tables: fp32).

    Raises:
        InputError: neither transformers' rules nor the module's constructor give a buffer its value.
    """
    parts = [unit for unit in units(model, layers_name) if unit.layer_index is None or unit.layer_index in kept_layers]
    around = [  # the models around the layers
        Unit(name, module, owner, model, None)
        for name, module, owner in children_first(model, "", model)
        if not name or layers_name.startswith(f"{name}.")
    ]
    with undisturbed(), torch.no_grad(), _default_dtype(torch.promote_types(model.dtype, torch.float32)):
        for unit in parts:
            _restore(unit, list(unit.module.modules()), partial(unit.apply_rules, 0))
        for unit in around:
            _restore(unit, [unit.module], partial(unit.owner._init_weights, unit.module))
        if any(unit.gaps(_buffers) for unit in parts):  # the rule of the model around layers may fill their buffers
            for unit in around:
                unit.owner._init_weights(unit.module)
        for unit in (*parts, *around):
            unit.fill_gaps(_buffers)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype of the rules to the model's, as transformers does when it builds the model."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _buffers(module: nn.Module) -> Tensors:
    return module._buffers


def _restore(unit: Unit, modules: list[nn.Module], run_rules: Callable[[], None]) -> None:
    held = [
        (module, key, value)
        for module in modules
        for key, value in module._buffers.items()
        if value is not None and value.is_meta
    ]
    if not held:
        return
    fresh = [(module, key, marked(value.shape, value.dtype)) for module, key, value in held]
    for module, key, value in fresh:
        module._buffers[key] = value
    run_rules()
    truths = [(module, key, value) for module, key, value in fresh if value.dtype == torch.bool]
    if truths:  # booleans have no mark: the rules set them if the opposite start gives the same result
        first_answers = [value.clone() for _, _, value in truths]
        for _, _, value in truths:
            value.fill_(True)
        run_rules()
        for (_, key, value), first_answer in zip(truths, first_answers, strict=True):
            if not torch.equal(value, first_answer):
                unit.refuse("", key)
