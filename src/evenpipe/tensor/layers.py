"""How tensor ranks compute each part of each kind of layer, determined on a small copy of the model.

cut      the part gets all tokens, and the rank's heads or columns
whole    the part mixes tokens and cannot be cut: every rank computes it for all tokens
rows     the part treats each token separately (norms, residual dropout): unchanged, each rank computes it for its rows
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.interface import takes
from evenpipe.model.linear import is_linear
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.router_loss import router_modules
from evenpipe.model.small_copy import kinds_of_layers
from evenpipe.model.stage import Stage
from evenpipe.model.structure import layers_of
from evenpipe.tensor.cuts import BlockCut, count_of, find_cut, placements_of
from evenpipe.tensor.exchange import Exchange, Gather, OwnRows
from evenpipe.tensor.local import exchange_output, keep_whole, make_local
from evenpipe.tensor.units import Call, NoUnitsError, until_the_end

logger = logging.getLogger(__name__)

SEQUENCES, TOKENS = 2, 8
"""Size of the batch on which parts are tried; there are only a few ranks."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a layer that gets all tokens."""

    hidden: tuple[int | str, ...]
    """Which of its arguments are hidden states."""
    cut: BlockCut | None
    """None: every rank computes the entire block."""
    reason: str = ""
    """Why it is not cut."""


@dataclass(frozen=True, slots=True)
class ModelCut:
    """How the layers of a model are cut, by kind of layer and name of the part."""

    kinds: tuple[Hashable, ...]
    """The kind of each layer."""
    blocks: Mapping[Hashable, Mapping[str, Block]]
    """By kind of layer."""
    end_is_whole: bool
    """Whether the part after the layers needs all tokens, so that every rank computes all of it."""

    def for_model(self, description: Description, layer_indices: Sequence[int]) -> ModelCut:
        """Return the cut of the model, given this cut of its small copy.

        Settings of a layer may differ between the two (a soft-cap is a number in the copy and may be None in the
        model); the layer then gets the cut of the copy made of it.

        layer_indices: for each layer of the copy, its index in the model.
        """
        kinds = kinds_of_layers(layers_of(description.skeleton, description.structure.layers_name))
        blocks = dict(self.blocks)
        for copy_index, index in enumerate(layer_indices):
            blocks.setdefault(kinds[index], self.blocks_of(copy_index))
        return ModelCut(tuple(kinds), blocks, self.end_is_whole)

    def placements(
        self, description: Description, index: int, rank: int, ranks: int
    ) -> dict[str, TensorPlacement | None]:
        """Return how a rank holds the sharded parameters of a layer, by name in the model; None: it does not hold
        them.

        Raises:
            InputError: the layer cannot be divided among the ranks; the message says which part.
        """
        layer = description.layer(index)
        prefix = f"{description.structure.layers_name}.{index}"
        result: dict[str, TensorPlacement | None] = {}
        for name, block in self.blocks_of(index).items():
            if block.cut is None:
                continue
            try:
                held = placements_of(layer.get_submodule(name), block.cut, rank, ranks)
            except NoUnitsError as reason:
                raise InputError(f"tp: {ranks}, but {prefix}.{name} cannot be cut so: {reason}.") from None
            result |= {f"{prefix}.{name}.{key}": placement for key, placement in held.items()}
        return result

    def repeats_heads(self, description: Description, ranks: int) -> bool:
        """Return whether, with this number of ranks, several hold the same heads of keys and values."""
        for index in range(description.layers):
            layer = description.layer(index)
            for name, block in self.blocks_of(index).items():
                if block.cut is not None and any(
                    count_of(layer.get_submodule(name), group) < ranks for group in block.cut.groups
                ):
                    return True
        return False

    def alone(self, description: Description, index: int) -> set[str]:
        """Return the names of a layer's parameters that only the first rank holds."""
        prefix = f"{description.structure.layers_name}.{index}"
        blocks = self.blocks_of(index).items()
        return {f"{prefix}.{name}.{bias}" for name, block in blocks if block.cut for bias in block.cut.biases}

    def blocks_of(self, index: int) -> Mapping[str, Block]:
        """Return the parts of a layer that get all tokens, by name."""
        return self.blocks[self.kinds[index]]


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The `LayerTransform` that lets a stage, filled with a rank's parameters, compute on that rank's rows."""

    cut: ModelCut
    exchange: Exchange
    checkpointed: Collection[int] = ()
    """Indices of layers that repeat their forward in the backward."""

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        assert isinstance(model, Stage)
        exchange, dtype_of = self.exchange, model.computing_dtypes().__getitem__
        for index, layer in layers.items():
            for name, block in self.cut.blocks_of(index).items():
                module = layer.get_submodule(name)
                if block.cut is None:
                    keep_whole(module, exchange, block.hidden)
                    continue
                groups, keeps = count_of(module, block.cut.groups[0]), index in self.checkpointed
                make_local(module, block.cut, exchange, block.hidden, groups=groups, keeps=keeps, dtype_of=dtype_of)
        if model.is_first:
            model.layers[0].register_forward_pre_hook(
                partial(_take_rows, exchange, model.layer_argument), with_kwargs=True, prepend=True
            )
        if model.is_last and self.cut.end_is_whole:
            model.layers[-1].register_forward_hook(partial(exchange_output, Gather, exchange))
            model.finish = partial(_own_rows, exchange)


def find_model_cut(small: Description, *, repeats: bool = False) -> ModelCut:
    """Return how the layers of a small model, and thus those of the large one, are cut.

    repeats: cut over more ranks than there are heads of keys and values.
    """
    model = small.model
    layers = layers_of(model, small.structure.layers_name)
    token_ids = torch.randint(0, small.vocabulary_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(2))
    routers = {module for module, _ in router_modules(model, small.structure.layers_name)}
    blocks: dict[Hashable, dict[str, Block]] = {}
    # Uses the skeleton, which has never run: some layers change their settings when they run.
    kinds = kinds_of_layers(layers_of(small.skeleton, small.structure.layers_name))
    layer_of: dict[Hashable, nn.Module] = {}
    for layer, kind in zip(layers, kinds, strict=True):
        layer_of.setdefault(kind, layer)
    for kind, calls in _calls(model, layer_of, token_ids).items():
        layer, blocks[kind] = layer_of[kind], {}
        for name, call in calls.items():
            module = layer.get_submodule(name)
            block = _block(module, call, repeats=repeats, routes=not routers.isdisjoint(module.modules()))
            if block is not None:
                blocks[kind][name] = block
    return ModelCut(tuple(kinds), blocks, end_is_whole=not _ends_on_rows(small, token_ids))


def _ends_on_rows(small: Description, token_ids: Tensor) -> bool:
    """Return whether the part after the layers gives the same result for a subset of the tokens (GPT-2's does not)."""
    model = small.model
    inputs: list[Tensor] = []
    head = model.get_submodule(small.structure.head_module)
    last = layers_of(model, small.structure.layers_name)[-1]

    def half(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            return type(output)((output[0][:, : TOKENS // 2], *output[1:]))
        return output[:, : TOKENS // 2]

    record = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        with torch.no_grad():
            model(input_ids=token_ids[:1], use_cache=False)
            hook = last.register_forward_hook(half)
            try:
                model(input_ids=token_ids[:1], use_cache=False)
            except Exception:  # families raise many types for an unexpected length
                return False
            finally:
                hook.remove()
    finally:
        record.remove()
    full, shortened = inputs
    return shortened.shape == full[:, : TOKENS // 2].shape and torch.allclose(shortened, full[:, : TOKENS // 2])


def _block(module: nn.Module, call: Call, *, repeats: bool, routes: bool) -> Block | None:
    """Return how a part of a layer is treated; None: unchanged. routes: it returns router logits of all tokens."""
    if not call.hidden:
        return None
    cut, reason = None, ""
    matrices = any(is_linear(inner) for inner in module.modules()) or any(
        parameter.dim() > 1 for parameter in module.parameters()
    )
    if matrices:
        try:
            cut = find_cut(module, call, repeats=repeats)
        except NoUnitsError as why:
            reason = str(why)
    if cut is None and not routes and not _mixes(module, call):
        return None
    return Block(tuple(call.hidden), cut, reason)


def _calls(
    model: nn.Module, layers: Mapping[Hashable, nn.Module], token_ids: Tensor
) -> dict[Hashable, dict[str, Call]]:
    """Return the first call of each part of each layer."""
    calls_by_kind: dict[Hashable, dict[str, Call]] = {kind: {} for kind in layers}

    def record(calls: dict[str, Call], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        calls.setdefault(name, Call(args, kwargs))

    hooks = [
        module.register_forward_pre_hook(partial(record, calls_by_kind[kind], name), with_kwargs=True)
        for kind, layer in layers.items()
        for name, module in _parts(layer)
    ]
    mask = torch.ones_like(token_ids)
    mask[-1, -1] = 0  # without padding, some kernels take a shortcut
    mask_kwargs = {"attention_mask": mask} if takes(type(model), "attention_mask") else {}
    with until_the_end(hooks), torch.no_grad():
        model(input_ids=token_ids, use_cache=False, **mask_kwargs)
    return calls_by_kind


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the parts that a layer calls: its children, and the members of its module lists."""
    for name, child in layer.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{inner}", module) for inner, module in child.named_children())
        else:
            yield name, child


def _mixes(module: nn.Module, call: Call) -> bool:
    """Return whether a token's result depends on other tokens."""

    def changed(hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[:, 1] += 1
        return hidden

    with torch.no_grad():
        original, modified = call.of(module), call.with_hidden(changed).of(module)
    shape = call.argument(call.hidden[0]).shape
    if original.shape[: original.dim() - 1].numel() != shape[:2].numel():
        return True
    same = (original == modified).reshape(shape[0], shape[1], -1).all(-1)
    same[:, 1] = True
    return not bool(same.all())


def _take_rows(
    exchange: Exchange, argument: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (OwnRows.apply(args[0], exchange), *args[1:]), kwargs
    return args, {**kwargs, argument: OwnRows.apply(kwargs[argument], exchange)}


def _own_rows(exchange: Exchange, hidden: Tensor) -> Tensor:
    rows: Tensor = OwnRows.apply(hidden, exchange)
    return rows


def whole_parts(cut: ModelCut) -> dict[str, str]:
    """Return the parts of layers that every rank computes entirely, and the reasons."""
    return {name: block.reason for blocks in cut.blocks.values() for name, block in blocks.items() if block.cut is None}


def report_whole(cut: ModelCut) -> None:
    """Tell the user in one line which parts of layers are not cut."""
    uncut = whole_parts(cut)
    if uncut:
        listed = ", ".join(f"{name} ({reason})" if reason else name for name, reason in uncut.items())
        logger.warning("not cut by tensor parallelism, so every tensor rank computes all tokens of: %s", listed)
