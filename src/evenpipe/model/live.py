"""What a live model computes beyond its config. Stages are built from the config; other state is copied or refused.

parameters, buffers              copied when a stage is filled (loading.py), even if unsaved
numbers, texts and flags         set on every model that is built: `changed_attributes`, `set_attributes`
other modules, hooks, forwards   refused by name: `check_wrappers`, `changed_attributes`
torch.compile, checkpointing     ignored, since they change no result: `left_out`
anything else                    found by a short forward of the live and of a built model: live_forward.py
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from evenpipe.errors import InputError

Attributes = Mapping[str, Mapping[str, Any]]
"""Name of a module -> name of an attribute -> its value."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, Enum)
OF_RUNS = {"training", "gradient_checkpointing", "layers_are_rescaled"}
"""Attributes for how a model is run, which the pipeline decides (the last is RWKV's)."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
WITHOUT_EFFECT = ("transformers.modeling_utils", "transformers.utils.output_capturing")
"""Modules of transformers whose hooks change no result: they ask for gradients of the embedded tokens, or record."""
PLACING = ("AlignDevicesHook", "SequentialHook")
"""Hooks of accelerate that only move tensors between devices."""


def check_wrappers(model: nn.Module) -> None:
    """Refuse models that another library has wrapped, or whose modules it has wrapped.

    Raises:
        InputError: the message says what to give instead.
    """
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            raise InputError(
                f"model: {_named(name)} is wrapped by torch.compile, and stages compile their own layers: give the"
                " model without the wrapper, and compile_layers=True."
            )
        if type(module).__module__.partition(".")[0] == "peft":
            raise InputError(
                f"model: {_named(name)} is {type(module).__name__} of peft, and stages cannot train adapters: merge"
                " them into the model (merge_and_unload) before it is given."
            )


def check_values(model: nn.Module) -> None:
    """Refuse a live model without weights to copy.

    Raises:
        InputError: one of its parameters is on the meta device.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"model: its parameter {name} has no values (it is on the meta device, or accelerate has offloaded it):"
                " give the folder's name instead of the model, or load it without device_map."
            )


def changed_attributes(live: PreTrainedModel, built: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return the numbers, texts and flags in which a live model's modules differ from a model built from its config.

    Raises:
        InputError: it has other modules, forwards or hooks, or attributes that cannot be carried over; the message
            names the module and the difference.
    """
    held, known = (dict(model.named_modules(remove_duplicate=False)) for model in (live, built))
    for name in (*held, *known):
        if type(held.get(name)) is not type(known.get(name)):
            _refuse(live, name, "", _class_of(held.get(name)), _class_of(known.get(name)))
    changed: dict[str, dict[str, Any]] = {}
    configs = _Configs()
    for name, module in held.items():
        _check_calls(name, module, known[name])
        for key, value, built_value in _differences(module, known[name], configs):
            if not _is_plain(value):
                _refuse(live, name, key, _text(value), _text(built_value))
            if key.endswith("layerdrop") and value:
                raise InputError(f"model: {_named(name, key)} = {value} skips layers at random: set it to 0.0.")
            changed.setdefault(name, {})[key] = value
    return changed


def set_attributes(model: nn.Module, changed: Attributes) -> None:
    """Set the result of `changed_attributes`."""
    for name, attributes in changed.items():
        vars(model.get_submodule(name)).update(copy.deepcopy(dict(attributes)))


def left_out(model: nn.Module) -> list[str]:
    """Return a sentence for each feature of a live model that a pipeline ignores, since it has its own."""
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    sentences = []
    if compiled:
        sentences.append(
            f"model: its compile() of {_named(compiled[0])}{_more(compiled)} is not taken over:"
            " compile_layers=True compiles the layers of stages"
        )
    name = "is_activation_checkpointing"  # earlier versions of transformers have only the other name
    if getattr(model, name if hasattr(type(model), name) else "is_gradient_checkpointing", False):
        sentences.append(
            "model: its gradient_checkpointing_enable() is not taken over: activation_checkpointing='full' recomputes"
            " layers"
        )
    return sentences


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} other modules" if len(names) > 1 else ""


def _check_calls(name: str, module: nn.Module, built: nn.Module) -> None:
    """Refuse a module that does more when called than a newly built module of its class."""
    if not _only_places(vars(module).get("_hf_hook")):
        raise InputError(
            f"model: accelerate has put a {type(vars(module)['_hf_hook']).__name__} on {_named(name)}, which stages"
            " leave out: remove it (accelerate.hooks.remove_hook_from_module(model, recurse=True))."
        )
    for kind in HOOKS:
        of_class = Counter(map(_text, getattr(built, kind).values()))
        for hook in getattr(module, kind).values():
            if getattr(hook, "__module__", None) in WITHOUT_EFFECT:
                continue
            of_class[_text(hook)] -= 1
            if of_class[_text(hook)] < 0:
                raise InputError(
                    f"model: {_named(name)} has a {kind.strip('_').removesuffix('s').replace('_', ' ')}"
                    f" ({_text(hook)}), and stages do not take over hooks of modules: remove it, or write what it does"
                    " into the module's class."
                )


def _only_places(hook: Any) -> bool:
    inner = getattr(hook, "hooks", ())
    return hook is None or (type(hook).__name__ in PLACING and all(map(_only_places, inner)))


class _Configs:
    """Compares the configs of modules: those that share one in the built model must do so in the live model too."""

    def __init__(self) -> None:
        self._held: dict[int, PreTrainedConfig] = {}
        """By the id of the config in the built model."""

    def same(self, value: PreTrainedConfig, built: PreTrainedConfig) -> bool:
        held = self._held.setdefault(id(built), value)
        return value is held or _settings(value.to_dict()) == _settings(held.to_dict())


def _differences(module: nn.Module, built: nn.Module, configs: _Configs) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, value of the built module) of attributes that differ or that only the live module has."""
    placed = "_hf_hook" in vars(module)
    for key, held in vars(module).items():
        if key.startswith("_") or key in OF_RUNS or (placed and key == "forward"):
            continue
        # transformers turns the length of a grown rotary table into a tensor.
        value = held.item() if isinstance(held, torch.Tensor) and held.dim() == 0 else held
        built_value = vars(built).get(key)
        if not _is_plain(value) and key not in vars(built) and key != "forward":
            continue  # set by the user or transformers, and unknown to the class
        if isinstance(value, PreTrainedConfig) and isinstance(built_value, PreTrainedConfig):
            if not configs.same(value, built_value):
                yield key, value, built_value
        elif not _same(value, built_value):
            yield key, value, built_value


def _same(value: Any, built_value: Any) -> bool:
    """Return whether two attributes are equal, as far as their type shows. Tensors, and objects of the same type or in
    place of None, count as equal, since the last forward may have left them."""
    if isinstance(value, torch.Tensor) or isinstance(built_value, torch.Tensor):
        return True
    if _is_plain(value) and _is_plain(built_value):
        return bool(value == built_value) or repr(value) == repr(built_value)
    if isinstance(value, partial) and isinstance(built_value, partial):
        return _same(value.func, built_value.func)
    if callable(value):
        return type(value) is type(built_value) and _text(value) == _text(built_value)
    return type(value) is type(built_value) or (built_value is None and not _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    return isinstance(value, PLAIN)


def _settings(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _settings(value) for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return config


def _refuse(live: nn.Module, name: str, key: str, value: str, built_value: str) -> NoReturn:
    raise InputError(
        f"model: {_named(name, key)} is {value}, and {built_value} in a {type(live).__name__} built from its config, as"
        " stages are; change the config or the class instead."
    )


def _named(name: str, key: str = "") -> str:
    return ".".join(component for component in (name, key) if component) or "the model"


def _class_of(module: nn.Module | None) -> str:
    return "missing" if module is None else type(module).__qualname__


def _text(value: Any) -> str:
    if value is None:
        return "the class's"
    if isinstance(value, PreTrainedConfig):
        return f"a {type(value).__name__} of its own"
    return getattr(value, "__qualname__", None) or f"{type(value).__name__} object"
