"""What torch's kernels for NVIDIA GPUs compute, on a CPU and in any dtype: sequence by sequence, with all scores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers.integrations import flex_attention as of_transformers

from evenpipe.attention import flash, function


@contextlib.contextmanager
def on_cpu() -> Iterator[list[int]]:
    """Let attention on a CPU take the way that it takes on a GPU; provide the number of sequences of each call of
    FlashAttention's forward."""
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(len(arguments[3]) - 1)
        return _forward(*arguments, **options)

    with contextlib.ExitStack() as stack:
        kernels = torch.library.Library("aten", "IMPL")
        stack.callback(kernels._destroy)
        kernels.impl("_flash_attention_forward", counted, "CPU")
        kernels.impl("_flash_attention_backward", _backward, "CPU")
        stack.enter_context(mock.patch.multiple(flash, DTYPES=(torch.float64, torch.float32), HEAD_MULTIPLE=1))
        stack.enter_context(mock.patch.dict(function._KERNELS, cpu=function._Flash))
        # torch computes FlexAttention densely on a CPU, and refuses gradients there.
        stack.enter_context(mock.patch.object(flex_attention, "_validate_device", lambda *tensors: None))
        plain = mock.patch.object(
            of_transformers.WrappedFlexAttention, "__call__", lambda _: flex_attention.flex_attention
        )
        stack.enter_context(plain)
        yield calls


def _sequences(*arguments: Any, **options: Any) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield of each sequence its queries, its keys, its scores [heads, queries, keys] and its keys for each head."""
    query, key, query_ends, key_ends, most_queries, most_keys, dropout, is_causal = arguments
    assert query_ends.dtype == key_ends.dtype == torch.int32 and not dropout
    lengths, of_keys = query_ends.diff(), key_ends.diff()
    assert lengths.min() > 0 and lengths.max() <= most_queries and of_keys.max() == most_keys
    left, right = options.get("window_size_left"), 0 if is_causal else options.get("window_size_right")
    for start, end, first, last in zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False):
        queries, keys = slice(int(start), int(end)), slice(int(first), int(last))
        of_heads = key[keys].repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query[queries], of_heads)
        scores = scores * (options["scale"] or query.shape[-1] ** -0.5)
        # The last query is aligned with the last key.
        numbers = torch.arange(end - start)[:, None] + (last - first) - (end - start)
        behind = numbers - torch.arange(last - first)
        unseen = torch.zeros_like(behind, dtype=torch.bool)
        unseen |= False if right is None or right < 0 else behind < -right
        unseen |= False if left is None or left < 0 else behind > left
        yield queries, keys, scores.masked_fill(unseen, float("-inf")), of_heads


def _forward(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    query, key, value, *others, return_debug_mask = arguments
    assert not return_debug_mask and query.shape[-1] == key.shape[-1] == value.shape[-1]
    result, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for queries, keys, scores, _ in _sequences(query, key, *others, **options):
        values = value[keys].repeat_interleave(query.shape[1] // key.shape[1], 1)
        result[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sums[:, queries] = scores.logsumexp(-1)
    return result, sums, query.new_empty(2), query.new_empty(2), query.new_empty(0)


def _backward(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, result, sums, *others, _seed, _unused = arguments
    of_query, of_key, of_value = (torch.zeros_like(one) for one in (query, key, value))
    scale, shared = options["scale"] or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    for queries, keys, scores, of_heads in _sequences(query, key, *others, **options):
        weights = (scores - sums[:, queries, None]).exp()
        values, arrived = value[keys].repeat_interleave(shared, 1), gradient[queries]
        of_weights = torch.einsum("qhd,khd->hqk", arrived, values)
        of_scores = weights * (of_weights - (arrived * result[queries]).sum(-1).T[..., None]) * scale
        of_query[queries] = torch.einsum("hqk,khd->qhd", of_scores, of_heads)
        for total, found in (
            (of_key, torch.einsum("hqk,qhd->khd", of_scores, query[queries])),
            (of_value, torch.einsum("hqk,qhd->khd", weights, arrived)),
        ):
            total[keys] = found.unflatten(1, (-1, shared)).sum(2)
    return of_query, of_key, of_value
