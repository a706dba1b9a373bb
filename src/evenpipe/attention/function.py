"""The attention of evenpipe: any family's own attention, on the keys of other pieces too, and of no other document.

`adopt` makes a model call `attention` and `mask` in place of what its config named. There are two ways:

    kernel   where transformers would call torch's fused attention without anything else, on a CPU: saves queries, own
             keys and values, result and log-sum-exp; blocks of queries look only at the keys that they may see
    again    everything else (soft-caps, sinks, attention written in Python, other devices): saves queries, own keys and
             values, and the backward runs the family's own function again

Both save through `save_for_backward`, so that checkpointing and offload see every tensor, and keep no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from evenpipe.attention.blocks import Block, Look
from evenpipe.attention.heads import heads_of, to_heads, to_tokens
from evenpipe.attention.rotary import depends_on_length, of_whole_rows
from evenpipe.attention.sight import Exchange, Mask, Predicate, current
from evenpipe.errors import InputError
from evenpipe.model.stage import Stage

NAME = "evenpipe"
_INNER = "_evenpipe_inner_attention"
_OF_THE_KERNEL = frozenset({"scaling", "sliding_window", "position_ids", "use_cache", "is_causal"})
"""Arguments that the kernel way honours, or that the mask has in it. With any other one, such as the sinks of gpt-oss,
the family's own function runs."""


class OwnAttention:
    """The `LayerTransform` that lets our attention run, on shares of sequences and documents that are kept apart."""

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        assert isinstance(model, Stage)
        adopt(model.whole)


def adopt(model: nn.Module) -> None:
    """Make all attention layers of a model call `attention`, and its forward `mask`. Its configs must be its own."""
    inner: dict[int, tuple[PreTrainedConfig, str]] = {}
    for module in model.modules():
        if depends_on_length(module):
            of_whole_rows(module)
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation not in (None, NAME):
            inner[id(config)] = config, config._attn_implementation
    for config, name in inner.values():  # only now: setting one of these sets those that are parts of it, too
        setattr(config, _INNER, name)
        config._attn_implementation = NAME


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Predicate,
    use_vmap: bool = False,
    **others: Any,
) -> Mask:
    """Return what attention layers get in place of a mask; arguments as transformers gives them.

    Raises:
        InputError: the family's mask is a function of local places.
    """
    sight = current()
    assert sight is not None, "the model's forward runs outside of `seeing`"
    if use_vmap:
        raise InputError("its masks are made by functions that look at one place at a time (use_vmap).")
    apart = (sight.apart or sight.looks_for_documents) and sight.documents is not None
    sight.looks_for_documents = False
    return sight.mask(mask_function, batch_size, apart=apart)


@torch.compiler.disable
def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """Attend to all keys that `attention_mask.sight` has, as the family would.

    Args:
        query, key, value: [batch, heads, tokens, size], with positions in them; keys and values may have fewer heads.
        options: what else the family passes on.

    Returns: [batch, tokens, heads, size], and no weights.

    Raises:
        InputError: the layer has no mask of ours, or drops weights of attention.
    """
    if not isinstance(attention_mask, Mask):
        raise InputError("its attention gets no mask that transformers made.")
    if module.training and options.get("dropout"):
        raise InputError(
            "the attention of pieces of sequences drops no weights, and this layer asks for it; expected no attention"
            " dropout in the model's config"
        )
    heads = attention_mask.sight.heads
    inner = _Inner(module, options) if heads is None else _Inner(*heads_of(module, options, query, heads))
    if heads is not None:
        query, key, value = to_heads(query, key, value, heads)
    call = Call(attention_mask, attention_mask.sight.exchange, int(getattr(module, "layer_idx", 0)), inner)
    given = {
        name for name, option in options.items() if option is not None and option is not False and name != "dropout"
    }
    fused = getattr(module.config, _INNER) == "sdpa" and given <= _OF_THE_KERNEL
    if fused and attention_mask.sight.has_kernel and query.device.type == "cpu" and value.shape[-1] <= query.shape[-1]:
        result = _Kernel.apply(query, key, value, call).transpose(1, 2).contiguous()
    else:
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        result = _Again.apply(query, key, value, call, *own)
    return (result if heads is None else to_tokens(result, heads)), None


class Call(NamedTuple):
    """A call of a layer's attention."""

    mask: Mask
    exchange: Exchange
    layer: int
    inner: _Inner
    """What the family would call."""


# --- torch's kernel for CPUs -----------------------------------------------------------------------------------------


class _Kernel(torch.autograd.Function):
    """Fused attention, block of queries by block, and what they look at one after the other."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        keys, values = call.exchange.keys(call.layer, key.detach(), value.detach())
        size = value.shape[-1]
        values = _padded(values, query)
        batch, heads, tokens, _ = query.shape
        result = query.new_empty((batch, tokens, heads, size)).transpose(1, 2)  # as the layer wants it
        sums = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in _parts(query, keys, call.mask):
            found: _Attended | None = None
            for look in part.block.looks:
                of_look: _Attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    *(part.rows(query), part.keys(keys, look), part.keys(values, look)),
                    *(0.0, look.how == "diagonal"),
                    attn_mask=part.bias(look),
                    scale=call.inner.scale,
                )
                found = of_look if found is None else _together(found, of_look)
                del of_look
            if found is None:
                part.rows(result).zero_()
                part.rows(sums).zero_()
            else:
                part.rows(result).copy_(found[0][..., :size])
                part.rows(sums).copy_(found[1])
            del found  # before the next block
        own = (key, value) if call.exchange.keeps_keys else ()
        ctx.save_for_backward(query, *own, result, sums)
        ctx.call = call
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, *own, result, sums = ctx.saved_tensors
        call = ctx.call
        keys, values = call.exchange.again(call.layer, *own)
        of_query = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)  # sums of many blocks, and of later pieces
        of_keys, of_values = (torch.zeros_like(one, dtype=wide) for one in (keys, values))
        values = _padded(values, query)
        for part in _parts(query, keys, call.mask):
            given = [_padded(part.rows(one), query) for one in (gradient, result)]
            total: Tensor | None = None
            for look in part.block.looks:
                found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(given[0], part.rows(query), part.keys(keys, look), part.keys(values, look)),
                    *(given[1], part.rows(sums), 0.0, look.how == "diagonal"),
                    attn_mask=part.bias(look),
                    scale=call.inner.scale,
                )
                total = found[0] if total is None else total.to(wide) + found[0]
                part.keys(of_keys, look).add_(found[1])
                part.keys(of_values, look).add_(found[2][..., : of_values.shape[-1]])
                del found
            if total is None:
                part.rows(of_query).zero_()
            else:
                part.rows(of_query).copy_(total)
            del given, total
        return of_query, *call.exchange.gradients(call.layer, of_keys, of_values, query.dtype), None


_Attended = tuple[Tensor, Tensor]
"""Values that queries attended to, and the logarithms of the sums of exponentials [sequences, heads, queries]."""


def _together(one: _Attended, other: _Attended) -> _Attended:
    """Return what queries attend to in two ranges of keys: the sums tell the share of each."""
    share = torch.sigmoid(other[1] - one[1])[..., None]
    values = torch.lerp(one[0].to(share.dtype), other[0].to(share.dtype), share)
    return values, torch.logaddexp(one[1], other[1])


class _Part(NamedTuple):
    """A block of queries, of one of the heads that share keys: the kernel knows as many heads of keys as of queries."""

    block: Block
    head: int
    shared: int
    mask: Mask
    dtype: torch.dtype

    def rows(self, tensor: Tensor) -> Tensor:
        """Return [sequences, heads of keys, queries, ...] of [batch, heads, tokens, ...]; a view."""
        heads = tensor[self.block.sequences].unflatten(1, (-1, self.shared))[:, :, self.head]
        return heads[:, :, self.block.queries]

    def keys(self, tensor: Tensor, look: Look) -> Tensor:
        """Return [sequences, heads of keys, keys, size] of [batch, heads of keys, keys, size]; a view."""
        return tensor[self.block.sequences, :, look.keys]

    def bias(self, look: Look) -> Tensor | None:
        """Return what is added to products of queries and keys, [batch or 1, 1, queries, keys]."""
        if look.how != "some":
            return None
        seen = self.mask.tensor(self.block.queries, look.keys)
        return torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))


def _parts(query: Tensor, keys: Tensor, mask: Mask) -> Iterator[_Part]:
    shared = query.shape[1] // keys.shape[1]
    for block in mask.blocks:
        for head in range(shared):
            yield _Part(block, head, shared, mask, query.dtype)


def _padded(rows: Tensor, query: Tensor) -> Tensor:
    """Return rows as wide as queries: the kernel knows one size."""
    missing = query.shape[-1] - rows.shape[-1]
    return functional.pad(rows, (0, missing)) if missing else rows


# --- the family's own function ---------------------------------------------------------------------------------------


class _Inner:
    """The attention that a family would call without us."""

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        self._module, self._options = module, options
        self.scale: float | None = options.get("scaling")
        """Of products of queries and keys; None: one over the root of their size."""
        name = getattr(module.config, _INNER)
        self._eager = name == "eager"
        self._function: Callable[..., tuple[Tensor, Any]]
        if self._eager:
            self._function = inspect.unwrap(module.forward).__globals__["eager_attention_forward"]
        else:
            self._function = ALL_ATTENTION_FUNCTIONS[name]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
        seen: Tensor = mask.tensor().expand(len(query), -1, -1, -1)
        if self._eager:
            nothing = torch.finfo(query.dtype).min
            seen = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, nothing)
        return self._function(self._module, query, keys, values, seen, **self._options)[0]


class _Again(torch.autograd.Function):
    """A family's own attention: the backward runs it again, and has gradients of the layer's own parameters too."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, *parameters: Tensor) -> Tensor:
        keys, values = call.exchange.keys(call.layer, key.detach(), value.detach())
        result = call.inner(query, keys, values, call.mask)
        own = (key, value) if call.exchange.keeps_keys else ()
        ctx.save_for_backward(query, *own)
        ctx.call, ctx.parameters = call, parameters
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, *own = ctx.saved_tensors
        call = ctx.call
        keys, values = call.exchange.again(call.layer, *own)  # no transfer under autograd
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in (query, keys, values)]
            result = call.inner(*inputs, call.mask)
            trained = [parameter for parameter in ctx.parameters if parameter.requires_grad]
            found = torch.autograd.grad(result, [*inputs, *trained], gradient, allow_unused=True)
        of_keys, of_values = (
            torch.zeros_like(one) if part is None else part
            for one, part in zip((keys, values), found[1:3], strict=True)
        )
        of_trained = iter(found[3:])
        of_parameters = (next(of_trained) if parameter.requires_grad else None for parameter in ctx.parameters)
        return (found[0], *call.exchange.gradients(call.layer, of_keys, of_values, query.dtype), None, *of_parameters)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
