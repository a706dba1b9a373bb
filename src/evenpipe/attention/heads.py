"""Exchanges heads for tokens: every rank computes some of the heads, on the tokens of all ranks (DeepSpeed-Ulysses,
arXiv 2309.14509).

    [batch, heads, tokens / ranks, size] -> exchange -> [batch, heads / ranks, tokens, size] -> attention -> and back

With many ranks this sends less than gathering keys and values: a part of each tensor instead of all of it. If there
are fewer heads of keys and values than ranks, they are repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.attention.row_context import HeadExchange
from evenpipe.errors import InputError


class Exchanged(torch.autograd.Function):
    """`HeadExchange.exchange`; the backward is the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, heads: HeadExchange, cut: int, join: int) -> Tensor:
        ctx.heads, ctx.back = heads, {"cut": join, "join": cut}
        return heads.exchange(tensor, cut=cut, join=join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.heads.exchange(gradient, **ctx.back), None, None, None


def to_heads(query: Tensor, key: Tensor, value: Tensor, heads: HeadExchange) -> tuple[Tensor, Tensor, Tensor]:
    """Return [batch, heads / ranks, tokens, size] of [batch, heads, tokens / ranks, size].

    Raises:
        InputError: the heads cannot be divided among the ranks.
    """
    count, key_heads = query.shape[1], key.shape[1]
    if count % heads.size or (key_heads % heads.size and heads.size % key_heads):
        raise InputError(
            f"context_exchange: {heads.size} context ranks cannot share {count} heads with {key_heads} of keys and"
            ' values; expected "keys"'
        )
    if key_heads % heads.size:
        key, value = (tensor.repeat_interleave(heads.size // key_heads, 1) for tensor in (key, value))
    exchanged = [Exchanged.apply(tensor, heads, 1, 2) for tensor in (query, key, value)]
    return exchanged[0], exchanged[1], exchanged[2]


def to_tokens(result: Tensor, heads: HeadExchange) -> Tensor:
    """Return [batch, tokens / ranks, heads, size] of [batch, tokens, heads / ranks, size]."""
    output: Tensor = Exchanged.apply(result, heads, 1, 2)
    return output


def heads_of(
    module: nn.Module, options: Mapping[str, Any], query: Tensor, heads: HeadExchange
) -> tuple[_LocalHeads, dict[str, Any]]:
    """Return a view of the layer with a rank's heads only, and the options of the attention function for them."""
    local = _LocalHeads(module, query.shape[1], heads)
    return local, {name: local.part(option) for name, option in options.items()}


class _LocalHeads:
    """An attention layer as seen by its attention function, with a rank's heads only."""

    def __init__(self, module: nn.Module, count: int, heads: HeadExchange) -> None:
        self._module, self._count, self._heads = module, count, heads

    def part(self, value: Any) -> Any:
        """Return a rank's part of a parameter with one entry per head, such as sinks; other values unchanged."""
        if isinstance(value, nn.Parameter) and value.dim() and value.shape[0] == self._count:
            return value.chunk(self._heads.size)[self._heads.rank]
        return value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups":  # heads of keys are repeated if there are fewer than ranks
            return min(value, max(1, self._count // self._heads.size))
        return self.part(value)
