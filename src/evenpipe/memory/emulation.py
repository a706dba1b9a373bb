"""Fused kernels for tensors without memory: functions that allocate and save the same bytes as GPU kernels.

For a stage under `FakeTensorMode` on the CPU. Results have the right shapes and no meaning, so nothing else may run
inside. Each function allocates its result and its saved tensors, and its backward the gradients, all uninitialised:

    norm           saves its input, and in fp32 one number per row (two with a bias: mean and inverse deviation)
    gate           act(gate) * up: saves gate and up
    activation     without a gate: saves its input
    rotary         queries and keys at once: saves the tables
    attention      saves q, k, v, the result and an fp32 log-sum-exp per row, for any window and cap
    packed         one product for queries, keys and values, which stay in its result

Sources for saved tensors: reference implementations of FlashAttention (arXiv 2205.14135, section 3.1), of Megatron-LM
(`megatron/core/fusions`) and of Transformer Engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from evenpipe.memory.kernels import Kernels

KERNEL = "evenpipe_kernel"
"""Name under which transformers finds our attention."""

GATE_NAMES, PACKED_GATE_NAMES = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
QUERY_NAMES = ("q_proj", "k_proj", "v_proj")
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules that define activation functions."""


@contextmanager
def emulated(stage: nn.Module, kernels: Kernels) -> Iterator[None]:
    """While entered, the modules of `stage` run like these kernels. For a stage whose tensors have no memory.

    Enter it before layers are compiled or checkpointed, and before or after the queue of weight gradients is added.
    """
    with ExitStack() as stack:
        modules = list(stage.modules())
        attention = {"flash": KERNEL, "eager": "eager"}.get(kernels.attention)
        for config in {id(module.config): module.config for module in modules if hasattr(module, "config")}.values():
            if attention is not None:  # otherwise the model's own choice: sdpa, or eager if it refuses that
                stack.enter_context(_set(config, "_attn_implementation_internal", attention))
        for module in modules:
            for name, value in _replaced(module, kernels).items():
                stack.enter_context(_set(module, name, value))
        if kernels.rotary == "fused":
            for name in {type(module).__module__ for module in modules}:
                file = sys.modules[name]
                if hasattr(file, "apply_rotary_pos_emb"):
                    stack.enter_context(_set(file, "apply_rotary_pos_emb", _rotate))
        for module in modules:
            if kernels.packed_qkv and all(isinstance(getattr(module, name, None), nn.Linear) for name in QUERY_NAMES):
                packed = _PackedProjections(module)
                for name in QUERY_NAMES:
                    stack.enter_context(_set(getattr(module, name), "forward", packed.of(name)))
        yield


def _replaced(module: Any, kernels: Kernels) -> dict[str, Any]:
    """Yield attributes of a module that these kernels replace."""
    if kernels.norm == "fused" and is_norm(module):
        return {"forward": lambda hidden: _apply(_Norm, hidden, module.weight, getattr(module, "bias", None))}
    if kernels.activation == "fused":
        if _holds(module, GATE_NAMES):
            return {"forward": lambda x: module.down_proj(_apply(_Gate, module.gate_proj(x), module.up_proj(x)))}
        if _holds(module, PACKED_GATE_NAMES):
            return {"forward": lambda x: module.down_proj(_apply(_PackedGate, module.gate_up_proj(x)))}
        if type(module).__module__ in ACTIVATIONS:
            return {"forward": lambda x: _apply(_Activation, x)}
    if kernels.weight_gradient == "fused" and type(module) is nn.Linear:
        return {"forward": lambda x: _apply(_Linear, x, module.weight, module.bias)}
    return {}


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over the last dimension, of torch or of transformers."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Norm") and isinstance(weight, Tensor) and weight.dim() == 1


def _holds(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object temporarily."""
    attributes = vars(owner)
    there, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if there:
            attributes[name] = before
        else:
            del attributes[name]


# --- functions --------------------------------------------------------------------------------------------------------


def _apply(function: type[torch.autograd.Function], *given: Any) -> Any:
    apply: Any = function.apply
    return apply(*given)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = torch.empty_like(hidden)
        rows = [hidden.new_empty(hidden.shape[:-1], dtype=torch.float32) for _ in range(1 if bias is None else 2)]
        ctx.save_for_backward(hidden, *rows)
        ctx.parameters = weight, bias
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden = ctx.saved_tensors[0]
        weight, bias = ctx.parameters
        return torch.empty_like(hidden), torch.empty_like(weight), None if bias is None else torch.empty_like(bias)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class _PackedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0])


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0])


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> Any:
        ctx.save_for_backward(cosine, sine)
        return _heads(query), _heads(key)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> Any:
        return _heads(of_query), _heads(of_key), None, None


def _rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *_: Any, **__: Any) -> Any:
    return _apply(_Rotary, query, key, cosine, sine)


def _heads(like: Tensor) -> Tensor:
    """Return a tensor [batch, heads, sequence, size] with the memory layout [batch, sequence, heads, size]."""
    batch, heads, sequence, size = like.shape
    return like.new_empty((batch, sequence, heads, size)).transpose(1, 2)


class _Linear(torch.autograd.Function):
    """A linear layer that makes no tensor for its weight's gradient, because it adds to the existing gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        return functional.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.matmul(ctx.weight), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query, key: [batch, heads, sequence, size]; value may have another size. Returns [batch, heads, ...]."""
        batch, heads, sequence, _ = query.shape
        result = query.new_empty((batch, sequence, heads, value.shape[-1])).transpose(1, 2)
        logarithms = query.new_empty((batch, heads, sequence), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, logarithms, mask)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return _heads(query), _heads(key), _heads(value), None


# --- attention, as transformers calls it ------------------------------------------------------------------------------


def _flash(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """A kernel that handles windows, caps and grouped heads itself."""
    if _in_rows(query) and value.shape[-1] == query.shape[-1] <= 256:  # as sdpa passes it to its kernel
        return sdpa_attention_forward(module, query, key, value, None, scaling=1.0)
    return _apply(_Attention, query, key, value, None).transpose(1, 2).contiguous(), None


def _in_rows(query: Tensor) -> bool:
    return query.transpose(1, 2).is_contiguous()


def _no_mask(**_: Any) -> None:
    return None


AttentionInterface.register(KERNEL, _flash)
AttentionMaskInterface.register(KERNEL, _no_mask)


class _PackedProjections:
    """Compute queries, keys and values of an attention module in one product, when the first of them is needed."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = {name: getattr(module, name) for name in QUERY_NAMES}
        self._sizes = [layer.out_features for layer in self._layers.values()]
        self._ready: dict[str, Tensor] = {}

    def of(self, name: str) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            if name not in self._ready:
                weights = [layer.weight for layer in self._layers.values()]
                packed = _apply(_PackedLinear, hidden, *weights)
                self._ready = dict(zip(QUERY_NAMES, packed.split(self._sizes, -1), strict=True))
            return self._ready.pop(name)

        return forward


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weights = weights
        return hidden.new_empty((*hidden.shape[:-1], sum(weight.shape[0] for weight in weights)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), *(torch.empty_like(weight) for weight in ctx.weights)
