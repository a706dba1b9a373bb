"""The parameters of a GPU: the tensors of the model's skeleton, and the shard of each that tensor parallelism leaves.

With this library's tensor parallelism each layer is cut as derived from a small copy of the model
(`tensor.layers.ModelCut`). The counts are those of the first rank, which alone has the biases that are added to sums.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053, section 3): of two consecutive matrices the first is split by
columns (outputs), together with its bias, and the second by rows (inputs); biases of the second, norms and routers are
whole on every rank. transformers' configs give the split (`base_model_tp_plan`); if one does not, the last linear
module of its parent is split by rows and the others by columns. With fewer heads of keys and values than ranks, each
rank holds one of these heads. The vocabulary matrices are split by rows.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from evenpipe.experts.adopt import is_experts
from evenpipe.model import Description
from evenpipe.model.linear import is_linear, is_one_product
from evenpipe.model.placement import TensorPlacement
from evenpipe.optimizers.muon import is_matrix
from evenpipe.parallel.gradients import IN_PLACE_ELEMENTS
from evenpipe.tensor.layers import ModelCut
from evenpipe.words import count, refused

from .optimizers import Trained, trained_tensor

Cut = Literal["columns", "rows", "whole"]
Of = Literal["all", "experts", "others"]
"""Which parameters."""

_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
_PACKED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "in_proj")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter of the whole model."""

    name: str
    """Name within its layer, or its full name if it is outside of layers."""
    shape: tuple[int, ...]
    cut: Cut
    key_value_share: float
    """Share of its outputs that are keys and values: 1 for their own matrices, 0 for most."""
    trained: bool
    matrix: bool = False
    """Whether Muon orthogonalises it."""
    split: bool = False
    """Whether it belongs to a linear module or to experts, so that a split backward computes its gradient in W."""
    expert: bool = False
    """Whether its first axis enumerates experts, which members of a group share."""

    def local(self, tp: int, key_value_heads: int, members: int = 1) -> int:
        """Return the elements that one of `tp` ranks holds, on the first of the members that share experts."""
        elements = self.of_member(math.prod(self.shape), members)
        if self.cut == "whole" or (self.cut == "rows" and len(self.shape) < 2):
            return elements
        if self.key_value_share and key_value_heads < tp:
            elements += round(elements * self.key_value_share * (tp / key_value_heads - 1))
        return -(-elements // tp)

    def of_member(self, elements: int, members: int) -> int:
        """Return how many of these elements the first member holds: ceil(E / ep) of E experts."""
        experts = self.shape[0] if self.expert else 1
        return elements // experts * -(-experts // members) if self.expert else elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Parameters of a part of the model on one GPU."""

    elements: int = 0
    tensors: int = 0
    """Number of tensors."""
    optimized: Trained = field(default_factory=Trained)
    """Tensors with a gradient."""
    unsplit: int = 0
    """Elements whose gradient is computed in I: neither of linear modules nor of experts."""
    largest: int = 0
    """Elements of the largest layer, or of the largest tensor outside of layers."""
    shared: int = 0
    """Elements of the bucket in which tensor ranks sum the gradients of parameters that several of them hold."""
    bucketed: int = 0
    """Trained elements of tensors so small that replicas sum them in one bucket."""
    products: frozenset[tuple[str, int]] = frozenset()
    """Distinct pairs of a matrix's split and its elements here. Matrices of one parent with the same split count as
    one, as in frameworks with packed projections."""

    @property
    def trained(self) -> int:
        """Elements that get a gradient."""
        return self.optimized.elements

    def __add__(self, other: Held) -> Held:
        return Held(
            elements=self.elements + other.elements,
            tensors=self.tensors + other.tensors,
            optimized=self.optimized + other.optimized,
            unsplit=self.unsplit + other.unsplit,
            largest=max(self.largest, other.largest),
            shared=self.shared + other.shared,
            bucketed=self.bucketed + other.bucketed,
            products=self.products | other.products,
        )


class Parameters:
    """The parameters of a model, read once from its skeleton."""

    def __init__(self, description: Description) -> None:
        self._description = description
        layers = [description.layer_config(index) for index in range(description.layers)]
        self.heads: int | None = _common(layers, "num_attention_heads")
        self.key_value_heads: int = _common(layers, "num_key_value_heads") or self.heads or 1
        self._plan: dict[str, str] = dict(getattr(layers[0], "base_model_tp_plan", None) or {})
        self._held_by_layer: dict[tuple[object, ...], Held] = {}
        self._held_by_stage: dict[tuple[object, ...], Held] = {}
        self._buffers_by_stage: dict[tuple[int, int], int] = {}

    @cached_property
    def layers(self) -> tuple[tuple[Tensor, ...], ...]:
        """Parameters of every layer; the same object for equal layers."""
        known: dict[tuple[Tensor, ...], tuple[Tensor, ...]] = {}
        layers = (
            tuple(self._tensors(self._description.layer(index), index)) for index in range(self._description.layers)
        )
        return tuple(known.setdefault(layer, layer) for layer in layers)

    def check(self, tp: int) -> None:
        """Raise InputError if heads cannot be divided among `tp` ranks."""
        if tp == 1:
            return
        if self.heads is not None and self.heads % tp:
            raise refused("tp", tp, f"a divisor of the model's {count(self.heads, 'attention head')}")
        if max(self.key_value_heads, tp) % min(self.key_value_heads, tp):
            raise refused(
                "tp",
                tp,
                f"a divisor or a multiple of the model's {count(self.key_value_heads, 'head')} of keys and values",
            )

    def stage(
        self,
        first: int,
        last: int,
        tp: int,
        *,
        is_first: bool,
        is_last: bool,
        cut: ModelCut | None = None,
        members: int = 1,
        of: Of = "all",
    ) -> Held:
        """Return the parameters of layers [first, last), including those before and after all layers if the stage is
        the first or the last, without the vocabulary matrices.

        cut: how this library cuts the layers over `tp` ranks; None: as in Megatron-LM. Raises InputError if it cannot.
        members: size of a group that shares experts; its first member holds ceil(E / ep) of them.
        """
        key = (first, last, tp, is_first, is_last, id(cut), members, of)
        if key not in self._held_by_stage:
            structure = self._description.structure
            held = Held()
            for index in range(first, last):
                held += self._layer(index, tp, cut, members, of)
            ends = (*structure.first_parameters * is_first, *structure.last_parameters * is_last)
            for name in () if of == "experts" else ends:
                shape = tuple(self._description.skeleton.get_parameter(name).shape)
                outside = self._outside(name, shape)
                held += outside if cut is None else replace(outside, shared=outside.trained)
            self._held_by_stage[key] = held
        return self._held_by_stage[key]

    def buffers(self, first: int, last: int) -> int:
        """Return the bytes that a stage of these layers keeps besides parameters: tables and constants of its layers,
        and of all modules outside of layers."""
        key = (first, last)
        if key not in self._buffers_by_stage:
            layers_prefix = f"{self._description.structure.layers_name}."
            prefixes = tuple(f"{layers_prefix}{index}." for index in range(first, last))
            self._buffers_by_stage[key] = sum(
                buffer.numel() * buffer.element_size()
                for name, buffer in self._description.skeleton.named_buffers()
                if name.startswith(prefixes) or not name.startswith(layers_prefix)
            )
        return self._buffers_by_stage[key]

    def vocabulary(self, embedding_rows: int, head_rows: int, *, one_matrix: bool) -> Held:
        """Return the parameters of the vocabulary layers, from the rows of each on this GPU.

        one_matrix: whether weights are tied, and both layers hold the same rows of one matrix.
        """
        description = self._description
        head = description.embedding_name if description.tied else description.head_name
        shapes: list[tuple[str, tuple[int, ...]]] = [
            (description.embedding_name, (embedding_rows, description.hidden_size))
        ]
        if not one_matrix:
            shapes.append((head, (head_rows, description.hidden_size)))
        if description.head_bias_name is not None:
            shapes.append((description.head_bias_name, (head_rows,)))
        held = Held()
        for name, shape in shapes:
            if math.prod(shape):
                held += self._outside(name, shape)
        return held

    def _layer(self, index: int, tp: int, cut: ModelCut | None, members: int, of: Of) -> Held:
        """Return one layer on the first of `tp` ranks and the first of the members."""
        tensors = self.layers[index]
        key = (id(tensors) if cut is None else index, tp, id(cut), members, of)  # `layers` keeps them alive
        if key not in self._held_by_layer:
            chosen = [tensor for tensor in tensors if of == "all" or tensor.expert == (of == "experts")]
            if cut is None:
                sizes, shared = [tensor.local(tp, self.key_value_heads, members) for tensor in chosen], 0
            else:
                sizes, shared = self._cut_sizes(index, chosen, tp, cut, members)
            self._held_by_layer[key] = replace(_held(chosen, sizes), largest=sum(sizes), shared=shared)
        return self._held_by_layer[key]

    def _cut_sizes(
        self, index: int, tensors: Sequence[Tensor], tp: int, cut: ModelCut, members: int
    ) -> tuple[list[int], int]:
        """Return the elements of each tensor, and those in the bucket of parameters that several ranks hold."""
        prefix = f"{self._description.structure.layers_name}.{index}."
        placements = cut.placements(self._description, index, 0, tp)
        first_rank_only = cut.alone(self._description, index)
        sizes, shared = [], 0
        for tensor in tensors:
            name = prefix + tensor.name
            placement = placements.get(name) or TensorPlacement(tensor.shape)
            sizes.append(tensor.of_member(math.prod(placement.local_shape), members))
            part_count = math.prod(axis_cut.parts for axis_cut in placement.cuts)  # of different parts in the bucket
            if tensor.trained and name not in first_rank_only and part_count < tp:
                shared += part_count * sizes[-1]
        return sizes, shared

    def _outside(self, name: str, shape: tuple[int, ...]) -> Held:
        """Return a tensor outside of layers, which is not split."""
        return _held([Tensor(name, shape, "whole", 0.0, self._trained(name))], [math.prod(shape)])

    def _trained(self, name: str) -> bool:
        """Return whether a parameter is trained. Only live models have frozen parameters."""
        description = self._description
        model = description.skeleton if description.model is None else description.model
        trained: bool = model.get_parameter(name).requires_grad
        return trained

    def _tensors(self, layer: nn.Module, index: int) -> Iterator[Tensor]:
        prefix = f"{self._description.structure.layers_name}.{index}"
        for module_name, module in layer.named_modules():
            cut = self._cut(layer, module_name, module)
            leaf = module_name.rpartition(".")[2]
            share = 0.0
            if leaf in _KEYS_AND_VALUES:
                share = 1.0
            elif leaf in _PACKED and self.heads:
                share = 2 * self.key_value_heads / (self.heads + 2 * self.key_value_heads)
            expert = is_experts(module)
            for key, parameter in module.named_parameters(recurse=False):
                name = f"{module_name}.{key}" if module_name else key
                tensor_cut = cut or self._planned(name) or "whole"
                trained, split = self._trained(f"{prefix}.{name}"), expert or is_one_product(module)
                matrix = is_matrix(module, key, parameter.dim())
                yield Tensor(name, tuple(parameter.shape), tensor_cut, share, trained, matrix, split, expert)

    def _cut(self, layer: nn.Module, name: str, module: nn.Module) -> Cut | None:
        """Return how a module's parameters are split; None: each parameter is split individually."""
        if self._plan:
            return self._planned(name)
        if not is_linear(module):
            return "whole"
        parent = layer.get_submodule(name.rpartition(".")[0])
        linear = [child for child in parent.children() if is_linear(child)]
        return "rows" if module is linear[-1] and len(linear) > 1 else "columns"

    def _planned(self, path: str) -> Cut | None:
        """Return the entry of the config's plan for a module or parameter of a layer; None: no entry, or whole."""
        for pattern, style in self._plan.items():
            _, separator, suffix = pattern.partition(".*.")
            if separator and fnmatch.fnmatchcase(path, suffix):
                kind = style.removeprefix("packed_")
                return "columns" if kind.startswith("colwise") else "rows" if kind.startswith("rowwise") else None
        return None


def _held(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Held:
    """Return the parameters on one GPU. sizes: elements of each tensor there."""
    trained = [(tensor, size) for tensor, size in zip(tensors, sizes, strict=True) if tensor.trained]
    optimized = (trained_tensor(tensor.shape, matrix=tensor.matrix, elements=size) for tensor, size in trained)
    return Held(
        elements=sum(sizes),
        tensors=len(sizes),
        optimized=sum(optimized, Trained()),
        unsplit=sum(size for tensor, size in trained if not tensor.split),
        largest=max(sizes, default=0),
        bucketed=sum(size for _, size in trained if size < IN_PLACE_ELEMENTS),
        products=_products(tensors, sizes),
    )


def _products(tensors: Sequence[Tensor], sizes: Sequence[int]) -> frozenset[tuple[str, int]]:
    sizes_by_split: dict[tuple[str, str], int] = {}
    for tensor, size in zip(tensors, sizes, strict=True):
        if len(tensor.shape) > 1 and tensor.cut != "whole":
            parent = ".".join(tensor.name.split(".")[:-2])
            sizes_by_split[parent, tensor.cut] = sizes_by_split.get((parent, tensor.cut), 0) + size
    return frozenset((cut, size) for (_, cut), size in sizes_by_split.items())


def _common(layers: list[Any], name: str) -> int | None:
    """Return the greatest common divisor of this number over all layers; None if a layer has no such number."""
    numbers = [getattr(layer, name, None) for layer in layers]
    integers = [number for number in numbers if isinstance(number, int)]
    return math.gcd(*integers) if len(integers) == len(numbers) else None
