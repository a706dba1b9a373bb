"""A stage whose tensors have no memory: the real modules of transformers, run to see what they allocate.

Without values, three questions of a model's forward get fixed answers: several sequences are not packed into a row,
rotary frequencies do not grow with the length, and buffers have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from evenpipe.experts import products
from evenpipe.memory.emulation import replaced
from evenpipe.memory.tracker import Tracker
from evenpipe.model.modules import ModuleStage
from evenpipe.model.stage import Stage


@contextmanager
def without_memory() -> Iterator[Tracker]:
    """Tensors made inside have no memory, and are counted."""
    with (
        _nothing_packed(),
        replaced(products, "spans_of", _no_spans),
        FakeTensorMode(allow_non_fake_inputs=True),
        _AsComputed(),
        Tracker() as tracker,
    ):
        yield tracker


_aten = torch.ops.aten
_SUMS = (
    _aten.embedding_bag.padding_idx,
    _aten._embedding_bag.default,
    _aten._embedding_bag_forward_only.default,
)


class _AsComputed(TorchDispatchMode):
    """Operations of experts whose results torch infers otherwise than it computes them on a CPU: of grouped products it
    infers them for bf16 only, and of sums in bf16 and fp64 it gets the indices beside them wrong."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation in _SUMS:
            return self._sums(operation, *args, **kwargs)
        if operation is not _aten._grouped_mm.default or args[0].dtype != torch.float32:
            return operation(*args, **kwargs)
        left, right, *others = args
        result = operation(left.to(torch.bfloat16), right.to(torch.bfloat16), *others, **kwargs)
        columns = -(-result.shape[-1] // 4) * 4  # rows begin at whole 16 bytes
        strides = [columns, 1] if result.dim() == 2 else [result.shape[1] * columns, columns, 1]
        return left.new_empty_strided(result.shape, strides)

    @staticmethod
    def _sums(operation: Any, entries: Tensor, index: Tensor, *others: Any, **options: Any) -> Any:
        as_if = {torch.bfloat16: torch.float16}.get(entries.dtype, entries.dtype)
        sums, of_entries, *more = operation(entries.to(as_if), index, *others, **options)
        if entries.dtype == torch.float64:
            of_entries = of_entries.new_empty(len(index) + 1)[:-1]
        return sums.to(entries.dtype), of_entries, *more


def _no_spans(ends: Tensor) -> list[tuple[int, int]]:
    """Take experts to have no rows where only values tell: products expert by expert write into a tensor that is there
    anyway."""
    return [(0, 0)] * len(ends)


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """transformers looks at position ids for sequences that share a row; without values it would have to assume some,
    and make a mask. This computes the same intermediates and answers no."""

    def found_none(position_ids: Tensor) -> None:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        (steps != 1).cumsum(-1)

    with replaced(masking_utils, "find_packed_sequence_indices", found_none):
        yield


def give_storage(stage: Stage | ModuleStage) -> None:
    """Replace a stage's parameters, buffers and plain tensor attributes by tensors of the mode."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        found = made.get(id(tensor))
        if found is None:
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                found = nn.Parameter(found, requires_grad=tensor.requires_grad)
            made[id(tensor)] = found
        return found

    embeddings = (module for embedding in stage._embedding for module in embedding.modules())
    for module in (*stage.modules(), *((stage.whole,) if isinstance(stage, Stage) else ()), *embeddings):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, Tensor):
                    table[name] = fake(value)
        if hasattr(module, "rope_type"):
            module.rope_type = _as_it_is(module.rope_type)


def _as_it_is(rope_type: Any) -> Any:
    """Leave rotary embeddings unchanged whose frequencies follow the longest sequence so far ("dynamic")."""
    if isinstance(rope_type, dict):
        return {name: _as_it_is(one) for name, one in rope_type.items()}
    return "default" if isinstance(rope_type, str) and "dynamic" in rope_type else rope_type
