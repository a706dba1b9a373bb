"""Fused kernels for tensors without memory: functions that allocate and save the same bytes as GPU kernels.

For a stage of `fakes`. Results have the right shapes but no meaning, so nothing else may run inside. Each function
allocates its result and its saved tensors, and its backward the gradients, all uninitialised:

    norm           saves its input, and in fp32 one number per row (two with a bias: mean and inverse deviation)
    gate           act(gate) * up: saves gate and up
    activation     without a gate: saves its input
    rotary         queries and keys together: saves the tables
    attention      saves q, k, v, the result and an fp32 log-sum-exp per row, for any window and cap; over context ranks
                   and with copies of its result as in `MegatronLayout`; or unfused, with the probabilities

Sources for saved tensors: reference implementations of FlashAttention (arXiv 2205.14135, section 3.1), of Megatron-LM
(`megatron/core/fusions`) and of Transformer Engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from evenpipe.layers import checkpointing
from evenpipe.layers.own_operations import own_operation
from evenpipe.memory.kernels import Kernels
from evenpipe.memory.megatron import MegatronLayout

KERNEL = "evenpipe_kernel"
"""Name under which transformers finds our attention."""

GATE_NAMES, PACKED_GATE_NAMES = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
PLAIN_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
"""Products of which torchtitan's "op" checkpointing keeps every second one."""
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules that define activation functions."""


@contextmanager
def emulated(
    stage: nn.Module, kernels: Kernels, layout: MegatronLayout | None = None, *, on_cpu: bool = False
) -> Iterator[None]:
    """Inside the context, the modules of `stage` allocate like these kernels. For stages whose tensors have no memory.

    layout: how layers are shared, if as in Megatron-LM.

    Enter it before layers are compiled or checkpointed, and before or after the queue of weight gradients is added.
    """
    with ExitStack() as stack:
        if not on_cpu:
            stack.enter_context(replaced(nn.functional, "dropout", _dropout))
            ALL_ATTENTION_FUNCTIONS["flex_attention"] = _flash  # over transformers' own, until it is deleted
            stack.callback(ALL_ATTENTION_FUNCTIONS.pop, "flex_attention")
        # Some experts add a bias to a kept product in place. Values would be wrong, but here there are none.
        change = partial(checkpointing.create_selective_checkpoint_contexts, allow_cache_entry_mutation=True)
        if kernels.selective == "half":
            change = partial(_every_second, change)
        stack.enter_context(replaced(checkpointing, "create_selective_checkpoint_contexts", change))
        modules = list(stage.modules())
        attention = kernels.attention if kernels.attention in {"sdpa", "eager"} else _kernel_over(kernels, layout)
        for config in {id(module.config): module.config for module in modules if hasattr(module, "config")}.values():
            if attention != "sdpa":  # otherwise the model's own choice: sdpa, or eager if it refuses that
                stack.enter_context(replaced(config, "_attn_implementation_internal", attention))
        for module in modules:
            kernel = _kernel_of(module, kernels)
            if kernel is not None:
                stack.enter_context(replaced(module, "forward", kernel))
        if kernels.rotary == "fused":
            for name in {type(module).__module__ for module in modules}:
                file = sys.modules[name]
                if hasattr(file, "apply_rotary_pos_emb"):
                    stack.enter_context(replaced(file, "apply_rotary_pos_emb", _rotate))
        yield


def _kernel_of(module: Any, kernels: Kernels) -> Callable[..., Tensor] | None:
    """Return the forward by which these kernels replace that of a module, if they do."""
    if kernels.norm == "fused" and is_norm(module):
        return lambda hidden: _norm(hidden, module.weight, getattr(module, "bias", None))
    if kernels.activation == "fused":
        if _holds(module, GATE_NAMES):
            return lambda x: module.down_proj(_activation(module.gate_proj(x), module.up_proj(x)))
        if _holds(module, PACKED_GATE_NAMES):
            return lambda x: module.down_proj(_packed_gate(module.gate_up_proj(x)))
        if type(module).__module__ in ACTIVATIONS:
            return _activation
    return None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over the last dimension, of torch or of transformers."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Norm") and isinstance(weight, Tensor) and weight.dim() == 1


def _holds(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _every_second(create: Callable[..., Any], products: Sequence[Any]) -> Any:
    """Return contexts that keep attention and every second product."""
    seen = {False: 0, True: 0}  # in the forward, and in the recomputation

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in PLAIN_PRODUCTS:
            seen[context.is_recompute] += 1
            keeps = seen[context.is_recompute] % 2 == 1
        else:
            keeps = operation in products
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create(policy)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object temporarily."""
    attributes = vars(owner)
    existed, previous = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if existed:
            attributes[name] = previous
        else:
            del attributes[name]


# --- functions --------------------------------------------------------------------------------------------------------

Saved = tuple[Tensor, ...]


class _Kernel(torch.autograd.Function):
    """Allocates its results and saves tensors; its backward allocates gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], gradients: Callable[..., Iterable[Any]], *inputs: Any) -> Any:
        """run: inputs -> results, saved tensors. gradients: saved tensors, gradients of results -> gradients of
        inputs."""
        results, saved = run(*inputs)
        ctx.save_for_backward(*saved)
        ctx.gradients = gradients
        return results

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> Any:
        return None, None, *ctx.gradients(ctx.saved_tensors, *arrived)


def _kernel(run: Callable[..., Any], gradients: Callable[..., Iterable[Any]], *inputs: Any) -> Any:
    apply: Any = _Kernel.apply
    return apply(run, gradients, *inputs)


def _like_saved(saved: Saved, *_: Tensor) -> Iterable[Tensor]:
    return map(torch.empty_like, saved)


def _dropout(hidden: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As on a GPU, where the mask takes a byte per element; on a CPU it has the dtype of the hidden states."""
    return torch.native_dropout(hidden, p, True)[0] if training and p else hidden


def _norm(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    parameters = (weight,) if bias is None else (weight, bias)

    def run(hidden: Tensor, *_: Tensor) -> tuple[Tensor, Saved]:
        rows = [hidden.new_empty(hidden.shape[:-1], dtype=torch.float32) for _ in parameters]
        return torch.empty_like(hidden), (hidden, *rows)

    return _kernel(run, lambda saved, _: map(torch.empty_like, (saved[0], *parameters)), hidden, *parameters)


def _activation(*inputs: Tensor) -> Tensor:
    """act(input), or act(gate) * up."""
    return _kernel(lambda *inputs: (torch.empty_like(inputs[0]), inputs), _like_saved, *inputs)


def _packed_gate(packed: Tensor) -> Tensor:
    shape = *packed.shape[:-1], packed.shape[-1] // 2
    return _kernel(lambda packed: (packed.new_empty(shape), (packed,)), _like_saved, packed)


def _rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *_: Any, **__: Any) -> Any:
    return _kernel(
        lambda query, key, *tables: ((_heads(query), _heads(key)), tables),
        lambda _, of_query, of_key: (_heads(of_query), _heads(of_key), None, None),
        *(query, key, cosine, sine),
    )


def _heads(like: Tensor, size: int | None = None) -> Tensor:
    """Return a tensor [batch, heads, sequence, size] with the memory layout [batch, sequence, heads, size]."""
    batch, heads, sequence, head_size = like.shape
    return like.new_empty((batch, sequence, heads, size or head_size)).transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query, key: [batch, heads, sequence, size]; value may have another size. Returns [batch, heads, ...]."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Saved]:
        result, rows = torch.ops.evenpipe.kernel_attention(query, key, value)
        return result, (query, key, value, result, rows)

    return _kernel(run, lambda saved, _: map(_heads, saved[:3]), query, key, value)


def _kernel_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return _heads(query, value.shape[-1]), query.new_empty(query.shape[:3], dtype=torch.float32)


own_operation("kernel_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)", _kernel_attention)


# --- attention, as transformers calls it ------------------------------------------------------------------------------


def _flash(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """A kernel that handles windows, caps and grouped heads itself."""
    in_rows = query.transpose(1, 2).is_contiguous()
    if in_rows and value.shape[-1] == query.shape[-1] <= 256:  # as sdpa passes it to its kernel
        return sdpa_attention_forward(module, query, key, value, None, scaling=1.0)
    return _attention(query, key, value).transpose(1, 2).contiguous(), None


def _unfused(  # noqa: PLR0917 - the arguments of transformers
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: Any = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Megatron-LM's two products with a softmax between them, which keeps its result; keys and values are repeated for
    every head."""
    times = query.shape[1] // key.shape[1]
    key, value = (tensor if times == 1 else tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3)
    shares = _softmax(scores)
    del scores
    return (_dropout(shares, dropout) @ value).transpose(1, 2).contiguous(), None


def _softmax(scores: Tensor) -> Tensor:
    def run(scores: Tensor) -> tuple[Tensor, Saved]:
        result = torch.empty_like(scores)
        return result, (result,)

    return _kernel(run, _like_saved, scores)


def _kernel_over(kernels: Kernels, layout: MegatronLayout | None) -> str:
    """Return the name under which transformers finds this attention."""
    attention = _unfused if kernels.attention == "unfused" else _flash
    name = KERNEL if attention is _flash else f"{KERNEL}_unfused"
    if layout is not None:
        name = f"{name}_{layout.cp}_{layout.exchanges_heads}_{layout.copies_attention}"
    AttentionInterface.register(name, attention if layout is None else partial(_shared, attention, layout))
    AttentionMaskInterface.register(name, lambda **_: None)
    return name


def _shared(  # noqa: PLR0917 - the arguments of transformers
    attention: Callable[..., tuple[Tensor, None]],
    layout: MegatronLayout,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    received: list[Tensor] = []
    """The keys and values of other ranks, and in the backward their gradients."""
    shapes, dtype = [tensor.shape for tensor in (key, value)] * (layout.cp - 1), key.dtype

    def receive(times: int) -> None:
        received.extend(torch.empty(shape, dtype=dtype) for shape in shapes * times)

    if layout.cp == 1:
        result, _none = attention(module, query, key, value, mask, **options)
    else:
        query, key, value = _Passed.apply(received, query, key, value)
        receive(1)
        result, _none = attention(module, query, key, value, mask, **options)
        received.clear()
        if result.requires_grad:
            result.register_hook(lambda _: receive(2))
    if layout.copies_attention and (layout.exchanges_heads or len(query) > 1):
        result = result.clone()
    return result, None


class _Passed(torch.autograd.Function):
    """Returns its arguments; the backward frees what the list holds."""

    @staticmethod
    def forward(ctx: Any, received: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.received = received
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.received.clear()
        return None, *gradients
