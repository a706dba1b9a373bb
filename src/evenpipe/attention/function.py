"""The attention of evenpipe: any family's attention, extended to the keys of other pieces, within separate documents.

`adopt` makes a model call `attention` and `mask` instead of the functions that its config names. There are three
implementations:

    _Kernel  on a CPU, and _Flash on an NVIDIA GPU, if the config names a fused kernel and the layer needs nothing else:
             save queries, local keys and values, result and log-sum-exp; blocks of queries attend only to keys that
             they see. On a GPU for masks that are causal, optionally with a window, in bf16 or fp16.
    _Again   everything else: saves queries, local keys and values, and the backward runs the function again. If the
             config names a fused kernel, this is FlexAttention with a block mask on a GPU (for fp32, chunks, windows
             with padding and, with "flex_attention", soft-caps and sinks); otherwise the family's function with a mask
             of all pairs (attention written in Python, fp64)

All save through `save_for_backward`, so that checkpointing and offload see every tensor, and keep no mask.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from evenpipe.attention import flash
from evenpipe.attention.blocks import Block, KeyRange
from evenpipe.attention.heads import heads_of, to_heads, to_tokens
from evenpipe.attention.rotary import depends_on_length, of_whole_rows
from evenpipe.attention.row_context import Exchange, Mask, Predicate, current
from evenpipe.errors import InputError
from evenpipe.model.stage import Stage

NAME = "evenpipe"
_INNER = "_evenpipe_inner_attention"
_EAGER = "eager_attention_forward"
"""Name of a family's own function, in the module that defines its layers."""
_OF_THE_KERNEL = frozenset({"scaling", "sliding_window", "position_ids", "use_cache", "is_causal"})
"""Arguments that the kernels support, or that the mask already contains. With any other argument, such as the sinks of
gpt-oss, the family's own function runs."""
_FUSED = re.compile("sdpa|flex_attention|.*flash.*")
"""Names of implementations that compute the same with these arguments: any of our kernels may replace them."""
_TAKES_BLOCKS, _TAKES_NO_PAIRS = "flex_attention", re.compile("flex_attention|.*flash.*")
"""The implementation that takes a block mask, and those that do not take a mask of all pairs."""


class OwnAttention:
    """The `LayerTransform` that installs our attention, for pieces of sequences and separate documents."""

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        assert isinstance(model, Stage)
        adopt(model.whole)


def adopt(model: nn.Module) -> None:
    """Make all attention layers of a model call `attention`, and its forward `mask`. It must not share its configs."""
    inner: dict[int, tuple[PreTrainedConfig, str]] = {}
    for module in model.modules():
        if depends_on_length(module):
            of_whole_rows(module)
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation not in (None, NAME):
            inner[id(config)] = config, config._attn_implementation
    for config, name in inner.values():  # not earlier: setting one of these also sets its sub-configs
        setattr(config, _INNER, name)
        config._attn_implementation = NAME


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Predicate,
    use_vmap: bool = False,
    **unused: Any,
) -> Mask:
    """Return the `Mask` for attention layers; transformers calls this with its own arguments.

    Raises:
        InputError: the family's mask is a function of local positions.
    """
    row_context = current()
    assert row_context is not None, "the model's forward runs outside of `activated`"
    if use_vmap:
        raise InputError("its masks are made by functions that look at one place at a time (use_vmap).")
    separate = (row_context.separate or row_context.looks_for_documents) and row_context.documents is not None
    row_context.looks_for_documents = False
    return row_context.mask(mask_function, batch_size, separate=separate)


@torch.compiler.disable
def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """Attend to all keys of `attention_mask.row_context`, as the family would.

    Args:
        query, key, value: [batch, heads, tokens, size], with position embeddings; keys and values may have fewer heads.
        options: further arguments of the family.

    Returns: [batch, tokens, heads, size], and None for the attention weights.

    Raises:
        InputError: the mask is not ours, or the layer has attention dropout.
    """
    if not isinstance(attention_mask, Mask):
        raise InputError("its attention gets no mask that transformers made.")
    if module.training and options.get("dropout"):
        raise InputError(
            "the attention of pieces of sequences drops no weights, and this layer asks for it; expected no attention"
            " dropout in the model's config"
        )
    heads = attention_mask.row_context.heads
    inner = _Inner(module, options) if heads is None else _Inner(*heads_of(module, options, query, heads))
    if heads is not None:
        query, key, value = to_heads(query, key, value, heads)
    call = Call(attention_mask, attention_mask.row_context.exchange, int(getattr(module, "layer_idx", 0)), inner)
    device = attention_mask.row_context.kernels_of or query.device.type
    kernel = _KERNELS[device] if inner.is_fused and device in _KERNELS else None
    if kernel is not None and kernel.fits(query, value, attention_mask):
        result = kernel.apply(query, key, value, call).transpose(1, 2).contiguous()
    else:
        inner.choose_mask(on_gpu=device == "cuda", dtype=query.dtype)
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        result = _Again.apply(query, key, value, call, *parameters)
    return (result if heads is None else to_tokens(result, heads)), None


class Call(NamedTuple):
    """A call of a layer's attention."""

    mask: Mask
    exchange: Exchange
    layer: int
    inner: _Inner
    """The function that the family would call."""


# --- torch's kernels -------------------------------------------------------------------------------------------------


class _Flash(torch.autograd.Function):
    """Fused attention on an NVIDIA GPU: all blocks of queries in a few calls."""

    @staticmethod
    def fits(query: Tensor, value: Tensor, mask: Mask) -> bool:
        return flash.fits(query, value) and mask.rounds is not None

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        keys, values = call.exchange.keys(call.layer, key.detach(), value.detach())
        assert call.mask.rounds is not None
        result, sums = call.mask.rounds.attend(query, keys, values, scale=call.inner.scale)
        saved_keys = (key, value) if call.exchange.keeps_keys else ()
        ctx.save_for_backward(query, *saved_keys, result, *sums)
        ctx.call, ctx.saved_count = call, len(saved_keys)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        query, saved_keys, (result, *sums) = saved[0], saved[1 : 1 + ctx.saved_count], saved[1 + ctx.saved_count :]
        keys, values = call.exchange.keys_again(call.layer, *saved_keys)
        of_query, *of_keys_and_values = call.mask.rounds.gradients(
            gradient, query, keys, values, result=result, sums=sums, scale=call.inner.scale
        )
        del keys, values  # freed before gradients are sent
        return of_query, *call.exchange.gradients(call.layer, *of_keys_and_values, query.dtype), None


class _Kernel(torch.autograd.Function):
    """Fused attention on a CPU, in a loop over blocks of queries and the key ranges that they attend to."""

    @staticmethod
    def fits(query: Tensor, value: Tensor, mask: Mask) -> bool:
        return value.shape[-1] <= query.shape[-1]

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        keys, values = call.exchange.keys(call.layer, key.detach(), value.detach())
        size = value.shape[-1]
        values = flash.padded(values, query)
        batch, heads, tokens, _ = query.shape
        result = query.new_empty((batch, tokens, heads, size)).transpose(1, 2)  # the layout that the layer expects
        sums = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for head_block in _head_blocks(query, keys, call.mask):
            attended: _Attended | None = None
            for key_range in head_block.block.key_ranges:
                of_range: _Attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    *(head_block.rows(query), head_block.keys(keys, key_range), head_block.keys(values, key_range)),
                    *(0.0, key_range.how == "diagonal"),
                    attn_mask=head_block.bias(key_range),
                    scale=call.inner.scale,
                )
                attended = of_range if attended is None else _merged(attended, of_range)
                del of_range
            if attended is None:
                head_block.rows(result).zero_()
                head_block.rows(sums).zero_()
            else:
                head_block.rows(result).copy_(attended[0][..., :size])
                head_block.rows(sums).copy_(attended[1])
            del attended  # before the next block
        saved_keys = (key, value) if call.exchange.keeps_keys else ()
        ctx.save_for_backward(query, *saved_keys, result, sums)
        ctx.call = call
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, *saved_keys, result, sums = ctx.saved_tensors
        call = ctx.call
        keys, values = call.exchange.keys_again(call.layer, *saved_keys)
        of_query = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)  # sums of many blocks, and of later pieces
        of_keys, of_values = (torch.zeros_like(tensor, dtype=wide) for tensor in (keys, values))
        values = flash.padded(values, query)
        for head_block in _head_blocks(query, keys, call.mask):
            padded = [flash.padded(head_block.rows(tensor), query) for tensor in (gradient, result)]
            total: Tensor | None = None
            for key_range in head_block.block.key_ranges:
                gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(
                        padded[0],
                        head_block.rows(query),
                        head_block.keys(keys, key_range),
                        head_block.keys(values, key_range),
                    ),
                    *(padded[1], head_block.rows(sums), 0.0, key_range.how == "diagonal"),
                    attn_mask=head_block.bias(key_range),
                    scale=call.inner.scale,
                )
                total = gradients[0] if total is None else total.to(wide) + gradients[0]
                head_block.keys(of_keys, key_range).add_(gradients[1])
                head_block.keys(of_values, key_range).add_(gradients[2][..., : of_values.shape[-1]])
                del gradients
            if total is None:
                head_block.rows(of_query).zero_()
            else:
                head_block.rows(of_query).copy_(total)
            del padded, total
        return of_query, *call.exchange.gradients(call.layer, of_keys, of_values, query.dtype), None


_Attended = tuple[Tensor, Tensor]
"""The result of attention, and the log-sum-exp [sequences, heads, queries]."""


def _merged(first: _Attended, second: _Attended) -> _Attended:
    """Return the result of attention over two ranges of keys together; the log-sum-exps give the weight of each."""
    share = torch.sigmoid(second[1] - first[1])[..., None]
    values = torch.lerp(first[0].to(share.dtype), second[0].to(share.dtype), share)
    return values, torch.logaddexp(first[1], second[1])


class _HeadBlock(NamedTuple):
    """A block of queries, for one of the heads that share keys: the kernel needs as many key heads as query heads."""

    block: Block
    head: int
    shared: int
    mask: Mask
    dtype: torch.dtype

    def rows(self, tensor: Tensor) -> Tensor:
        """Return [sequences, heads of keys, queries, ...] of [batch, heads, tokens, ...]; a view."""
        heads = tensor[self.block.sequences].unflatten(1, (-1, self.shared))[:, :, self.head]
        return heads[:, :, self.block.queries]

    def keys(self, tensor: Tensor, key_range: KeyRange) -> Tensor:
        """Return [sequences, heads of keys, keys, size] of [batch, heads of keys, keys, size]; a view."""
        return tensor[self.block.sequences, :, key_range.keys]

    def bias(self, key_range: KeyRange) -> Tensor | None:
        """Return the additive mask [batch or 1, 1, queries, keys]; None: not needed."""
        if key_range.how != "some":
            return None
        seen = self.mask.tensor(self.block.queries, key_range.keys)
        return torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))


def _head_blocks(query: Tensor, keys: Tensor, mask: Mask) -> Iterator[_HeadBlock]:
    shared = query.shape[1] // keys.shape[1]
    for block in mask.blocks:
        for head in range(shared):
            yield _HeadBlock(block, head, shared, mask, query.dtype)


_KERNELS: dict[str, Any] = {"cpu": _Kernel, "cuda": _Flash}
"""By device type."""


# --- the family's own function ---------------------------------------------------------------------------------------


class _Inner:
    """The attention function that a family would call without evenpipe."""

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        self._module, self._options = module, options
        self.scale: float | None = options.get("scaling")
        """Factor of the products of queries and keys; None: 1 / sqrt(size)."""
        self._name: str = getattr(module.config, _INNER)
        used = {name for name, option in options.items() if option is not None and option is not False}
        self.is_fused = _FUSED.fullmatch(self._name) is not None and used - {"dropout"} <= _OF_THE_KERNEL
        """Whether any fused kernel computes the same."""
        self._by_blocks = False

    def choose_mask(self, *, on_gpu: bool, dtype: torch.dtype) -> None:
        """Decide which function runs, and with which mask.

        Raises:
            InputError: the function named by the config cannot take our mask.
        """
        self._by_blocks = on_gpu and dtype != torch.float64 and (self.is_fused or self._name == _TAKES_BLOCKS)
        if not self._by_blocks and _TAKES_NO_PAIRS.fullmatch(self._name):
            raise InputError(
                f"attn_implementation: {self._name!r} of {type(self._module).__name__} does not compute pieces of"
                f" sequences or separate documents on a {'GPU' if on_gpu else 'CPU'} in {dtype} with all that the layer"
                " asks for; expected 'sdpa' or 'eager', or 'flex_attention' on a GPU"
            )

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
        if self._by_blocks:
            return self._run(ALL_ATTENTION_FUNCTIONS[_TAKES_BLOCKS], query, keys, values, mask.block_mask)
        seen = mask.tensor().expand(len(query), -1, -1, -1)
        if self._name != "eager":
            return self._run(ALL_ATTENTION_FUNCTIONS[self._name], query, keys, values, seen)
        minimum = torch.finfo(query.dtype).min
        seen = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, minimum)
        return self._run(inspect.unwrap(self._module.forward).__globals__[_EAGER], query, keys, values, seen)

    def _run(self, function: Callable[..., tuple[Tensor, Any]], *inputs: Tensor | BlockMask) -> Tensor:
        return function(self._module, *inputs, **self._options)[0]


class _Again(torch.autograd.Function):
    """A family's own attention: the backward runs it again, and also returns gradients of the layer's parameters."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, *parameters: Tensor) -> Tensor:
        keys, values = call.exchange.keys(call.layer, key.detach(), value.detach())
        result = call.inner(query, keys, values, call.mask)
        saved_keys = (key, value) if call.exchange.keeps_keys else ()
        ctx.save_for_backward(query, *saved_keys)
        ctx.call, ctx.parameters = call, parameters
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, *saved_keys = ctx.saved_tensors
        call = ctx.call
        keys, values = call.exchange.keys_again(call.layer, *saved_keys)  # no transfer under autograd
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (query, keys, values)]
            result = call.inner(*inputs, call.mask)
            trained = [parameter for parameter in ctx.parameters if parameter.requires_grad]
            gradients = torch.autograd.grad(result, [*inputs, *trained], gradient, allow_unused=True)
        of_keys, of_values = (
            torch.zeros_like(tensor) if grad is None else grad
            for tensor, grad in zip((keys, values), gradients[1:3], strict=True)
        )
        of_trained = iter(gradients[3:])
        of_parameters = (next(of_trained) if parameter.requires_grad else None for parameter in ctx.parameters)
        return (
            gradients[0],
            *call.exchange.gradients(call.layer, of_keys, of_values, query.dtype),
            None,
            *of_parameters,
        )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
