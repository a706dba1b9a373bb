"""Initial values that do not depend on the layout: every module draws from a seed made of the run's seed and its name.

The rules are the model's own `_init_weights`, applied to children before parents (some families rescale their residual
projections in the parent's turn), in fp32 on the CPU, and cast afterwards. The vocabulary matrices are drawn in blocks of
256 rows, so that any shard gets the same rows and nobody draws the whole matrix.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError

if TYPE_CHECKING:
    from evenpipe.model.description import Description
    from evenpipe.model.stage import Stage

BLOCK_ROWS = 256

Tensors = dict[str, torch.Tensor | None]


def seed_of(seed: int, *names: object) -> int:
    """A seed for one named thing: SHA-256, so that it is the same in every process and every run."""
    text = "\0".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Gives the CPU's random state back as it was. Accelerators are not touched: all drawing is done on the CPU."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def initialize(stage: Stage, description: Description, seed: int) -> None:
    """Draws all parameters of a stage: the same values whatever the cut and the device, and up to a cast the dtype.

    Args:
        stage: from `build_stage`.
        seed: the run's seed. The vocabulary matrices are drawn by `initial_rows`.

    Raises:
        InputError: transformers has no rule for one of the parameters.
    """
    model, layers_name = stage.whole, description.structure.layers_name
    with undisturbed(), torch.no_grad():
        for name, unit, owner in _units(model, "", model, layers_name):
            kept = [
                (module, key, value)
                for module in unit.modules()
                for key, value in module._parameters.items()
                if value is not None
            ]
            if not kept:
                continue
            try:
                for module, key, value in kept:
                    fresh = _marked(value.shape, torch.float32)
                    module._parameters[key] = nn.Parameter(fresh, requires_grad=False)
                _apply_rules(unit, name, owner, seed)
                torch.default_generator.manual_seed(seed_of(seed, name, "as constructed"))
                _fill_gaps(unit, name, model, layers_name, lambda module: module._parameters)
                for module, key, value in kept:
                    value.copy_(module._parameters[key])
            finally:
                for module, key, value in kept:
                    module._parameters[key] = value


def initial_rows(description: Description, name: str, start: int, stop: int, seed: int) -> torch.Tensor:
    """Rows [start, stop) of a vocabulary matrix, or entries of the head's bias, as every layout draws them.

    Args:
        name: `description.embedding_name`, `head_name` (of a tied model: the same matrix) or `head_bias_name`.

    Returns: fp32 on the CPU, [stop - start, hidden_size] (bias: [stop - start]). The embedding's padding row is zero.
    """
    is_embedding = name == description.embedding_name or (description.tied and name == description.head_name)
    is_bias = name == description.head_bias_name
    if not (is_embedding or is_bias or name == description.head_name):
        names = ", ".join(description.vocabulary_names)
        raise InputError(f"name = {name!r} is no vocabulary matrix of {description.architecture}, which has {names}.")
    if not 0 <= start <= stop <= description.vocabulary_size:
        raise InputError(f"rows [{start}, {stop}) are not within the vocabulary of {description.vocabulary_size} rows.")
    structure = description.structure
    module_name = structure.embedding_module if is_embedding else structure.head_module
    original = description.skeleton.get_submodule(module_name)
    owner = _owner(description.skeleton, module_name)
    pieces = [torch.empty((0,) if is_bias else (0, description.hidden_size))]
    with undisturbed(), torch.no_grad():
        for first in range(start - start % BLOCK_ROWS, stop, BLOCK_ROWS):
            small = _block_module(original)
            torch.default_generator.manual_seed(seed_of(seed, module_name, first // BLOCK_ROWS))
            owner._init_weights(small)
            rows = (small.bias if is_bias else small.weight).detach()
            if _untouched(rows):
                raise InputError(f"transformers gives no initial value to {name} of {description.architecture}.")
            padding = description.padding_index
            if is_embedding and padding is not None and first <= padding < first + BLOCK_ROWS:
                rows[padding - first] = 0.0
            pieces.append(rows[max(start - first, 0) : stop - first])
    return torch.cat(pieces)


def restore_buffers(model: PreTrainedModel, layers_name: str) -> None:
    """Gives every meta buffer its value (rotary frequencies, embedding scales, ...) on the CPU.

    Parameters stay on the meta device. Buffers keep the dtype they were built with: rotary tables fp32.

    Raises:
        InputError: neither transformers' rules nor the module's constructor give one a value.
    """
    with undisturbed(), torch.no_grad():
        for name, unit, owner in _units(model, "", model, layers_name):
            _restore(
                unit,
                name,
                model,
                layers_name,
                lambda unit=unit, name=name, owner=owner: _apply_rules(unit, name, owner, 0),
            )
        for name, module, owner in _children_first(model, "", model):  # what is kept beside the layers themselves
            _restore(
                module, name, model, layers_name, lambda module=module, owner=owner: owner._init_weights(module), False
            )


def _restore(
    unit: nn.Module, name: str, model: PreTrainedModel, layers_name: str, rules: Callable[[], None], deep: bool = True
) -> None:
    modules = list(unit.modules()) if deep else [unit]
    held = [
        (module, key, value)
        for module in modules
        for key, value in module._buffers.items()
        if value is not None and value.is_meta
    ]
    if not held:
        return
    truths = [(module, key) for module, key, value in held if value.dtype == torch.bool]
    for module, key, value in held:
        module._buffers[key] = _marked(value.shape, value.dtype)
    rules()
    if truths:  # truth values cannot be marked: what the rules set is what comes out the same from either start
        before = [module._buffers[key] for module, key in truths]
        for module, key in truths:
            module._buffers[key] = torch.ones_like(module._buffers[key])
        rules()
        for (module, key), value in zip(truths, before, strict=True):
            if not torch.equal(module._buffers[key], value):
                raise InputError(
                    f"transformers gives no initial value to the buffer {name}.{key}, which is not supported."
                )
    _fill_gaps(unit, name, model, layers_name, lambda module: module._buffers)


def _apply_rules(unit: nn.Module, name: str, owner: PreTrainedModel, seed: int) -> None:
    for inner_name, inner, inner_owner in _children_first(unit, name, owner):
        torch.default_generator.manual_seed(seed_of(seed, inner_name))
        inner_owner._init_weights(inner)


def _children_first(
    module: nn.Module, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """(name, module, the transformers model whose rules apply) for a module and all below it, parents last."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner


def _units(
    module: nn.Module, name: str, owner: PreTrainedModel, layers_name: str
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """The parts that are initialised each for itself: every layer, and every module beside the list of layers."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if name and name != layers_name and not layers_name.startswith(f"{name}."):
        yield name, module, owner
        return
    for child_name, child in module.named_children():
        inner = f"{name}.{child_name}" if name else child_name
        if name == layers_name:
            yield inner, child, owner
        else:
            yield from _units(child, inner, owner, layers_name)


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost transformers model that a module belongs to: its rules apply."""
    return next(owner for inner, _, owner in _children_first(model, "", model) if inner == name)


def _marked(shape: torch.Size, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """A tensor full of NaN (integers: the smallest), so that what nobody initialises is seen."""
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    else:
        value = False if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=device)


def _untouched(tensor: torch.Tensor) -> bool:
    """Whether the mark of `_marked` is still somewhere in a tensor."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _fill_gaps(
    unit: nn.Module,
    name: str,
    model: PreTrainedModel,
    layers_name: str,
    tensors_of: Callable[[nn.Module], Tensors],
) -> None:
    """Where the model's own rules leave something out: build that layer really, with its class and index, and copy."""
    gaps = [
        (prefix, module, key)
        for prefix, module in unit.named_modules()
        for key, value in tensors_of(module).items()
        if value is not None and not value.is_meta and _untouched(value)
    ]
    if not gaps:
        return
    index = int(name.rpartition(".")[2]) if name.startswith(f"{layers_name}.") else None
    real = _construct(unit, model.config.get_text_config(), index)
    for prefix, module, key in gaps:
        gap = tensors_of(module)[key]
        value = None if real is None else tensors_of(real.get_submodule(prefix)).get(key)
        if value is None or value.shape != gap.shape or _untouched(value):
            what = ".".join(part for part in (name, prefix, key) if part)
            raise InputError(
                f"transformers gives no initial value to {what}, so {type(model).__name__} cannot be built in parts."
            )
        gap.copy_(value)


def _construct(module: nn.Module, config, index: int | None) -> nn.Module | None:
    """A real copy of a layer or rotary module on the CPU; None if its constructor wants something else."""
    offered = {"config": config} | dict.fromkeys(("layer_idx", "layer_index", "layer_id", "layer_number", "idx"), index)
    wanted = inspect.signature(type(module).__init__).parameters
    try:
        with torch.device("cpu"):
            return type(module)(**{name: offered[name] for name in wanted if name in offered})
    except Exception:  # a constructor of another form; the caller refuses with the name
        return None


def _block_module(original: nn.Module) -> nn.Module:
    """A module of the same class and attributes with BLOCK_ROWS rows."""
    small = copy.copy(original)
    small._parameters = {
        key: None
        if value is None
        else nn.Parameter(_marked(torch.Size([BLOCK_ROWS, *value.shape[1:]]), torch.float32), requires_grad=False)
        for key, value in original._parameters.items()
    }
    if isinstance(small, nn.Embedding):
        small.num_embeddings, small.padding_idx = BLOCK_ROWS, None
    else:
        small.out_features = BLOCK_ROWS
    return small
