"""Initial values that do not depend on the layout: every module draws from a seed made of the run's seed and the module's name.

The rules are the model's own `_init_weights`, applied to children before parents (some families rescale their residual projections
in the parent's turn), in fp32 on the CPU and cast afterwards. The two vocabulary matrices are drawn in blocks of 256 rows, so
that any shard gets the same rows and nobody draws the whole matrix.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError

BLOCK_ROWS = 256


def seed_of(seed: int, *names: object) -> int:
    """A seed for one named thing: SHA-256, so that it is the same in every process and every run."""
    text = "\0".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Gives the CPU's random state back as it was; accelerators are not touched (all drawing is done on the CPU)."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(state)


def children_first(
    module: nn.Module, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """(name, module, the transformers model whose rules apply) for a module and all below it, parents last."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from children_first(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner


def apply_rules(module: nn.Module, name: str, owner: PreTrainedModel, seed: int) -> None:
    for inner_name, inner, inner_owner in children_first(module, name, owner):
        torch.default_generator.manual_seed(seed_of(seed, inner_name))
        inner_owner._init_weights(inner)


def units(model: PreTrainedModel, layers_name: str) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """The parts that are initialised each for itself: every layer, and every module that stands beside the list of layers."""
    yield from _units(model, "", model, layers_name)


def _units(module: nn.Module, name: str, owner: PreTrainedModel, layers_name: str):
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


def untouched(tensor: torch.Tensor) -> bool:
    """Whether a tensor still holds (in part) the mark that `marked` filled it with."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype == torch.bool:
        return True  # no mark possible
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def marked(like: torch.Tensor, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> torch.Tensor:
    """A tensor of that shape full of NaN (integers: the smallest), so that what nobody initialises is seen."""
    dtype = dtype or like.dtype
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    else:
        value = False if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full(like.shape, value, dtype=dtype, device=device)


def construct_again(module: nn.Module, config, index: int | None) -> nn.Module | None:
    """A real copy of a layer or rotary module built from its class, on the CPU; None if its constructor wants something else."""
    offered = {
        "config": config,
        "layer_idx": index,
        "layer_index": index,
        "layer_id": index,
        "idx": index,
        "device": None,
    }
    wanted = inspect.signature(type(module).__init__).parameters
    arguments = {
        name: offered[name] for name in wanted if name in offered and (name != "device" or wanted[name].default is None)
    }
    try:
        with torch.device("cpu"):
            return type(module)(**arguments)
    except Exception:  # a constructor of another form; the caller refuses with the names
        return None


def restore_buffers(model: PreTrainedModel, layers_name: str) -> None:
    """Gives every remaining meta buffer its value on the CPU (rotary frequencies, embedding scales, ...), parameters staying on meta."""
    config = model.config.get_text_config()
    with seeded():
        for name, unit, owner in units(model, layers_name):
            holders = [
                (module, key)
                for module in unit.modules()
                for key, value in module._buffers.items()
                if value is not None
            ]
            if not holders:
                continue
            for module, key in holders:
                module._buffers[key] = marked(module._buffers[key])
            apply_rules(unit, name, owner, 0)
            _repair(unit, name, config, lambda module: module._buffers, layers_name)
        for module in model.modules():
            for key, value in module._buffers.items():
                if value is not None and value.is_meta:
                    raise InputError(
                        f"{type(model).__name__} keeps a buffer ({key}) beside its layers, which is not supported."
                    )


def _repair(unit: nn.Module, name: str, config, tensors_of, layers_name: str) -> None:
    """Where the model's own rules left something out: build that layer really and copy from it."""
    left = [
        (f"{prefix}.{key}" if prefix else key, module, key)
        for prefix, module in unit.named_modules()
        for key, value in tensors_of(module).items()
        if value is not None and not value.is_meta and untouched(value)
    ]
    if not left:
        return
    index = int(name.rpartition(".")[2]) if name.startswith(f"{layers_name}.") else None
    real = construct_again(unit, config, index)
    for inner, module, key in left:
        value = None
        if real is not None:
            parent, _, attribute = inner.rpartition(".")
            value = tensors_of(real.get_submodule(parent)).get(attribute)
        if value is None or value.shape != tensors_of(module)[key].shape:
            raise InputError(
                f"transformers gives no initial value to {name}.{inner} ({type(module).__name__}), so it cannot be built in parts."
            )
        tensors_of(module)[key].copy_(value)


def initialize(stage, description, seed: int) -> None:
    """Draws all parameters of a stage; the same values whatever the cut, the device and the dtype (up to the final cast).

    Args:
        stage: from `build_stage`.
        seed: the run's seed. The vocabulary matrices are drawn by `initial_rows`.
    """
    model, layers_name = stage.whole, description.structure.layers_name
    config = model.config.get_text_config()
    with seeded():
        for name, unit, owner in units(model, layers_name):
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
                    module._parameters[key] = nn.Parameter(marked(value, dtype=torch.float32), requires_grad=False)
                apply_rules(unit, name, owner, seed)
                torch.default_generator.manual_seed(seed_of(seed, name, "as constructed"))
                _repair(unit, name, config, lambda module: module._parameters, layers_name)
                for module, key, value in kept:
                    value.copy_(module._parameters[key])
            finally:
                for module, key, value in kept:
                    module._parameters[key] = value


def initial_rows(description, name: str, start: int, stop: int, seed: int) -> torch.Tensor:
    """Rows [start, stop) of a vocabulary matrix, or entries of the head's bias, as every layout draws them.

    Args:
        name: `description.embedding_name`, `head_name` (of a tied model: the same matrix) or `head_bias_name`.

    Returns: fp32 on the CPU, [stop - start, hidden_size] (bias: [stop - start]). The embedding's padding row is zero.
    """
    is_bias = name == description.head_bias_name and name is not None
    is_embedding = name == description.embedding_name or (description.tied and name == description.head_name)
    if not (is_bias or is_embedding or name == description.head_name):
        raise InputError(
            f"name = {name!r} is no vocabulary matrix of {description.architecture}: use {description.vocabulary_names}."
        )
    if not 0 <= start <= stop <= description.vocabulary_size:
        raise InputError(f"rows [{start}, {stop}) are not within the vocabulary of {description.vocabulary_size} rows.")
    structure = description.structure
    original = description.skeleton.get_submodule(structure.embedding_module if is_embedding else structure.head_module)
    module_name = structure.embedding_module if is_embedding else structure.head_module
    owner = _owner(description.skeleton, module_name)
    pieces = []
    with seeded():
        for block in range(start // BLOCK_ROWS, (stop + BLOCK_ROWS - 1) // BLOCK_ROWS if stop > start else 0):
            small = _block_module(original)
            torch.default_generator.manual_seed(seed_of(seed, module_name, block))
            owner._init_weights(small)
            rows = small.bias if is_bias else small.weight
            if untouched(rows):
                raise InputError(f"{description.architecture} gives no initial value to {name}.")
            rows = rows.detach()
            if (
                is_embedding
                and description.padding_index is not None
                and description.padding_index // BLOCK_ROWS == block
            ):
                rows[description.padding_index % BLOCK_ROWS] = 0.0
            first = block * BLOCK_ROWS
            pieces.append(rows[max(start - first, 0) : min(stop - first, BLOCK_ROWS)])
        if pieces:
            return torch.cat(pieces)
    return torch.empty((0,) if is_bias else (0, description.hidden_size), dtype=torch.float32)


def _block_module(original: nn.Module) -> nn.Module:
    """A module of the same class and attributes with BLOCK_ROWS rows."""
    small = copy.copy(original)
    small._parameters = {
        key: None
        if value is None
        else nn.Parameter(marked(torch.empty(BLOCK_ROWS, *value.shape[1:], device="meta"), torch.float32))
        for key, value in original._parameters.items()
    }
    if isinstance(small, nn.Embedding):
        small.num_embeddings, small.padding_idx = BLOCK_ROWS, None
    else:
        small.out_features = BLOCK_ROWS
    return small


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    owner, module = model, model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner
