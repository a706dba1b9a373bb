"""A stage whose tensors have no memory: the real modules of transformers, run to measure what they allocate.

Its tensors are on torch's "meta" device, but kernels and sizes are those that torch chooses on a CPU. Since there are
no values, three assumptions about a model's forward are fixed: sequences are not packed into a row, rotary frequencies
do not grow with the length, and buffers have no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import masking_utils

from evenpipe.memory.emulation import replaced
from evenpipe.memory.lines import line_of
from evenpipe.memory.tracker import Tracker
from evenpipe.model import products
from evenpipe.model.modules import ModuleStage
from evenpipe.model.stage import Stage


@contextmanager
def without_memory(sequences: int | None = None) -> Iterator[Tracker]:
    """Tensors made inside have no memory and are counted. sequences: a prime number of sequences, to count lines; None:
    to count bytes."""
    with (
        _nothing_packed(),
        replaced(products, "spans_of", _no_spans),
        replaced(functional, "scaled_dot_product_attention", _attention),
        _seeming_on_cpu(),
        _OnMeta(sequences) as tracker,
    ):
        yield tracker


_torch_attention = functional.scaled_dot_product_attention
_base: Any = torch._C.TensorBase
_CPU, _META = torch.device("cpu"), torch.device("meta")
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _attention(  # noqa: PLR0917 - the arguments of the function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's own attention, with the kernel that it chooses on a CPU: for tensors without memory it would choose
    none."""
    arguments = (_one_row(query), _one_row(key), _one_row(value), None if attn_mask is None else _one_row(attn_mask))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    with _disable_current_modes():
        choice = torch._fused_sdp_choice(*arguments, dropout_p, is_causal, **options)
    if choice == SDPBackend.MATH.value:
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, _number(0.0, query), _number(-math.inf, query))
    result: Tensor = _flash_attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result


def _number(value: float, like: Tensor) -> Tensor:
    return torch.scalar_tensor(value, dtype=like.dtype)


def _one_row(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU with the same shape, whose rows all share one row's memory."""
    if not tensor.dim():
        return tensor
    with _disable_current_modes():
        step = tensor.stride(-1)
        row = torch.empty((tensor.shape[-1] - 1) * step + 1, dtype=tensor.dtype)
        return row.as_strided(tensor.shape, [0] * (tensor.dim() - 1) + [step])


class _OnMeta(Tracker):
    """Counts tensors. Those that the code inside creates on the CPU have no memory.

    `FakeTensorMode` infers results as a CPU computes them, but would take most of the time of a trace. Here it runs
    only once for arguments of the same sizes.
    """

    _known: ClassVar[dict[Any, _Results | None]] = {}

    def __init__(self, sequences: int | None) -> None:
        super().__init__()
        self._sequences = sequences

    def measure(self, size: int) -> int:
        return size if self._sequences is None else line_of(size, self._sequences)

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        _inside.append(operation)
        try:
            return self._result(operation, args, kwargs)
        finally:
            _inside.pop()

    def _result(self, operation: Any, args: Any, kwargs: Any) -> Any:
        key = operation.name(), _sizes(args), _sizes(kwargs)
        if key not in self._known:
            self._known[key] = _Results.of(operation, args, kwargs)
        results = self._known[key]
        if results is not None:
            return results.allocate()
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        if not all(map(_is_on_meta, args)):
            args = tree_map_only(Tensor, _without_memory, args)
        return operation(*args, **kwargs)


def _is_on_meta(value: Any) -> bool:
    """Return whether all tensors in a value are without memory."""
    if isinstance(value, Tensor):
        return value.is_meta
    return not isinstance(value, (tuple, list)) or all(map(_is_on_meta, value))


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor.to(_META) if tensor.dim() else tensor  # operations treat scalar tensors as numbers


def _sizes(value: Any) -> Any:
    """Return a key of everything that the sizes of a result depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (tuple, list)):
        return tuple(map(_sizes, value))
    return (
        tuple((name, _sizes(entry)) for name, entry in value.items())
        if isinstance(value, dict)
        else (type(value), value)
    )


class _Results(NamedTuple):
    """The new tensors that an operation returns, each with a separate storage."""

    sizes: tuple[tuple[Any, ...], ...]
    is_single: bool
    """Whether it is one tensor, not several."""

    @classmethod
    def of(cls, operation: Any, args: Any, kwargs: Any) -> _Results | None:
        """Return None for an operation that returns or changes its arguments' memory, or whose result has values."""
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        schema = operation._schema
        if any(argument.alias_info is not None for argument in schema.arguments) or not (
            any(tensor.is_meta for tensor in tensors) or "device" in kwargs
        ):
            return None
        with FakeTensorMode(allow_non_fake_inputs=True):
            like = {id(tensor): _on_cpu(tensor) for tensor in tensors if tensor.is_meta}
            args, kwargs = tree_map_only(Tensor, lambda tensor: like.get(id(tensor), tensor), (args, kwargs))
            result = _as_computed(operation, args, kwargs)
            results = (result,) if isinstance(result, Tensor) else result
            if not isinstance(results, (tuple, list)) or not all(isinstance(tensor, Tensor) for tensor in results):
                return None
            storages = [tensor.untyped_storage() for tensor in (*results, *like.values())]
            if len({storage._cdata for storage in storages}) < len(storages) or any(
                tensor.storage_offset() for tensor in results
            ):
                return None
            sizes = tuple(
                (tensor.untyped_storage().nbytes(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in results
            )
        return cls(sizes, isinstance(result, Tensor))

    def allocate(self) -> Any:
        tensors = [torch.empty_strided(size, step, dtype=dtype, device=_META) for _, size, step, dtype in self.sizes]
        for tensor, (storage_size, size, step, _) in zip(tensors, self.sizes, strict=True):
            if tensor.untyped_storage().nbytes() != storage_size:
                tensor.set_(torch.UntypedStorage(storage_size, device=_META), 0, size, step)
        return tensors[0] if self.is_single else tuple(tensors)


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


_inside: list[object] = []
"""Operations being inferred: inside them, tensors report their real device to torch's own code."""


@contextmanager
def _seeming_on_cpu() -> Iterator[None]:
    """Tensors without memory appear to models as CPU tensors; `tolist` asks for their values."""

    def device(tensor: Tensor) -> torch.device:
        return _CPU if tensor.is_meta and not _inside else _base.device.__get__(tensor)

    def is_cpu(tensor: Tensor) -> bool:
        return (tensor.is_meta and not _inside) or _base.is_cpu.__get__(tensor)

    def tolist(tensor: Tensor) -> Any:
        return tensor.flatten()[0].item() if tensor.is_meta else _base.tolist(tensor)

    seems: dict[str, Any] = {"device": property(device), "is_cpu": property(is_cpu), "tolist": tolist}
    for name, value in seems.items():
        setattr(Tensor, name, value)
    try:
        yield
    finally:
        for name in seems:
            delattr(Tensor, name)


_aten = torch.ops.aten
_SUMS = (
    _aten.embedding_bag.padding_idx,
    _aten._embedding_bag.default,
    _aten._embedding_bag_forward_only.default,
)


def _as_computed(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation without memory. For two operations of experts, torch infers other results than a CPU computes:
    for grouped products it infers only bf16, and for sums in bf16 and fp64 it infers wrong indices beside them."""
    if operation in _SUMS:
        return _sums(operation, *args, **kwargs)
    if operation is not _aten._grouped_mm.default or args[0].dtype != torch.float32:
        return operation(*args, **kwargs)
    left, right, *options = args
    result = operation(left.to(torch.bfloat16), right.to(torch.bfloat16), *options, **kwargs)
    columns = -(-result.shape[-1] // 4) * 4  # rows are aligned to 16 bytes
    strides = [columns, 1] if result.dim() == 2 else [result.shape[1] * columns, columns, 1]
    return left.new_empty_strided(result.shape, strides)


def _sums(operation: Any, entries: Tensor, index: Tensor, *arguments: Any, **options: Any) -> Any:
    dtype = {torch.bfloat16: torch.float16}.get(entries.dtype, entries.dtype)
    sums, bags, *extra = operation(entries.to(dtype), index, *arguments, **options)
    if entries.dtype == torch.float64:
        bags = bags.new_empty(len(index) + 1)[:-1]
    return sums.to(entries.dtype), bags, *extra


def _no_spans(ends: Tensor) -> list[tuple[int, int]]:
    """Assume that experts have no rows where only values would tell: products for single experts write into a tensor
    that exists anyway."""
    return [(0, 0)] * len(ends)


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """transformers searches position ids for sequences packed into a row; without values it would have to assume some,
    and make a mask. This computes the same intermediates and reports none."""

    def find_none(position_ids: Tensor) -> None:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        (steps != 1).cumsum(-1)

    with replaced(masking_utils, "find_packed_sequence_indices", find_none):
        yield


def give_storage(stage: Stage | ModuleStage) -> None:
    """Replace a stage's parameters, buffers and plain tensor attributes by tensors of the mode."""
    # By id of the replaced tensor, which is held so that its id is not reused.
    replacements: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
        _, replacement = replacements.get(id(tensor), (None, None))
        if replacement is None:
            replacement = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
            replacements[id(tensor)] = tensor, replacement
        return replacement

    embeddings = (module for embedding in stage._embedding for module in embedding.modules())
    for module in (*stage.modules(), *((stage.whole,) if isinstance(stage, Stage) else ()), *embeddings):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, Tensor):
                    table[name] = fake(value)
        if hasattr(module, "rope_type"):
            module.rope_type = _static_rope_type(module.rope_type)


def _static_rope_type(rope_type: Any) -> Any:
    """Replace the type "dynamic" of rotary embeddings, whose frequencies depend on the longest sequence so far."""
    if isinstance(rope_type, dict):
        return {name: _static_rope_type(kind) for name, kind in rope_type.items()}
    return "default" if isinstance(rope_type, str) and "dynamic" in rope_type else rope_type
