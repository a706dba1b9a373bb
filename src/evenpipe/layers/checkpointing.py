"""Activation checkpointing of single layers: a layer's activations are recomputed when its backward needs them.

    "none"        everything that autograd saves is kept from F to B (or I)
    "full"        only the layer's input is kept; its forward is repeated in B (or I), never in W
    "selective"   the results of products and attention are kept too; only the operations between them are repeated

"full" is our own implementation. "selective" is `torch.utils.checkpoint` with its standard policy, or, if activations
are offloaded to the host, with a policy that offloads the kept tensors. Both replace the tensors that autograd saves
within one graph ("non-reentrant"): gradients are summed in the order of the plain backward, and hooks of parameters run
once. If a microbatch has an R in its schedule, all activations exist before its backward, and its layers keep all of
them: see `Switch`.

"full" does not use torch's implementation because of host time. For a small Llama layer on the CPU (F and B together
take 645 us of processor time without checkpointing) torch's adds 1070 us and this one
670, of which the second forward takes 275. An autograd function with a backward inside its backward adds 460, but it
sums the gradients of a parameter shared by several layers in another order, runs its hooks several times, and cannot
stop early. This one can, like torch's: the second forward stops after the last tensor that the backward needs, so the
last product of the layer (a quarter of a Llama layer's work) is not repeated.

The input is saved through autograd, so that in-place changes are detected, and hooks on saved tensors around the layer
see it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch._higher_order_ops.utils import redirect_to_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from evenpipe.layers.random_state import RandomState
from evenpipe.words import count, refused

CHOICES = ("none", "full", "selective")

Forward = Callable[..., Any]
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


@dataclass(slots=True)
class Switch:
    """Shared by all layers of a device."""

    off: bool = False
    """While True, checkpointed layers keep everything, like plain ones, because the current microbatch has an R."""
    hooks: tuple[Pack, Unpack] | None = None
    """If set, "selective" stores the result of the first hook instead of a tensor, and computes with the result of the
    second. Needed because hooks on saved tensors do not see the products that torch keeps."""


def check_choices(choices: Iterable[str]) -> None:
    """Raise InputError for an unknown choice of checkpointing."""
    for choice in choices:
        if choice not in CHOICES:
            accepted = ", ".join(f'"{name}"' for name in CHOICES)
            raise refused("activation_checkpointing", choice, f"one of {accepted}, or one of these per layer")


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """The `LayerTransform` that lets layers recompute their activations."""

    choices: Sequence[str]
    """By index of the layer in the model."""
    switch: Switch
    torch_device: torch.device

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        for index, layer in layers.items():
            checkpoint_layer(layer, self.choices[index], self.switch, self.torch_device)


def checkpoint_layer(layer: nn.Module, choice: str, switch: Switch, torch_device: torch.device) -> None:
    """Wrap a layer's forward according to the choice; hooks of the layer remain outside and run once.

    transformers' own checkpointing of the layer is disabled.
    """
    if choice == "none":
        return
    if hasattr(layer, "gradient_checkpointing"):
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    layer.forward = checkpointed(layer.forward, choice, switch, torch_device)


def checkpointed(forward: Forward, choice: str, switch: Switch, torch_device: torch.device) -> Forward:
    """Return a function like `forward` that is checkpointed if grad mode is enabled and the switch is not off."""

    @functools.wraps(forward)
    def with_checkpointing(*args: Any, **kwargs: Any) -> Any:
        if switch.off or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if choice == "full":
            call = _Call(forward, args, kwargs, torch_device)
            with saved_tensors_hooks(call.forget, call.recall):
                return forward(*args, **kwargs)
        if switch.hooks is None:
            return run_checkpointed(forward, choice, args, kwargs)
        contexts = functools.partial(_handing_over, *switch.hooks)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return with_checkpointing


# --- selective ---------------------------------------------------------------------------------------------------

_aten = torch.ops.aten
PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _aten._scaled_dot_product_attention_math.default,
    _aten._flash_attention_forward.default,
    torch._higher_order_ops.flex_attention,
]
"""Operations whose results "selective" keeps: repeating them costs far more time than the memory is worth. Operations
of evenpipe are added where they are defined (`layers/own_operations.py`)."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A kept tensor."""

    packed: Any
    version: int


def _handing_over(pack: Pack, unpack: Unpack) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts for a layer's first run and for its recomputation."""
    products: deque[tuple[Any, Any]] = deque()
    return _Keeping(products, pack), _Taking(products, unpack)


class _Keeping(TorchDispatchMode):
    """Keeps the results of products in the order of computation."""

    def __init__(self, products: deque[tuple[Any, Any]], pack: Pack) -> None:
        super().__init__()
        self._products, self._pack = products, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._products.append((func, tree_map_only(Tensor, self._keep, result)))
        return result

    def _keep(self, tensor: Tensor) -> _Product:
        # Below autograd a view has its own version counter, unless this key is present.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return _Product(self._pack(tensor), tensor._version)


class _Taking(TorchDispatchMode):
    """Returns kept results instead of recomputing them."""

    def __init__(self, products: deque[tuple[Any, Any]], unpack: Unpack) -> None:
        super().__init__()
        self._products, self._unpack = products, unpack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        expected, result = self._products.popleft() if self._products else (None, None)
        if expected is not func:
            raise RuntimeError(
                f"a checkpointed layer computed {expected or 'nothing more'}, but {func} in its recomputation: its"
                " forward depends on more than its arguments"
            )
        return tree_map_only(_Product, self._take, result)

    def _take(self, product: _Product) -> Tensor:
        tensor = self._unpack(product.packed)
        if isinstance(product.packed, Tensor) and tensor._version != product.version:
            raise RuntimeError(
                f"a product {list(tensor.shape)} {tensor.dtype} kept by a checkpointed layer was changed in place"
                f" (version {product.version}, now {tensor._version})"
            )
        return tensor


for _mode in (_Keeping, _Taking):
    redirect_to_mode(torch._higher_order_ops.flex_attention, _mode)


def run_checkpointed(forward: Forward, choice: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run with torch's own checkpointing, "full" or "selective", which torch.compile supports."""
    if choice == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


# --- full --------------------------------------------------------------------------------------------------------


class _Saved:
    """Replaces a tensor that autograd wanted to save; owned only by the graph."""

    __slots__ = ("__weakref__", "dtype", "shape", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.tensor: Tensor | None = None


def only_saves(count: int = 1) -> bool:
    """Return whether a layer's forward is being repeated and the next `count` saved tensors are the last ones needed;
    other results are then ignored."""
    call = _repeated.call
    return call is not None and call.remaining == count


class _AllComputed(BaseException):
    """Ends a repeated forward as soon as it has computed everything that the backward needs."""


class _Call:
    """A call of a layer: how to repeat it, and which tensors the graph will need."""

    def __init__(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], torch_device: torch.device
    ) -> None:
        self._forward: Forward | None = forward
        self._random_state: RandomState | None = RandomState.of(torch_device)
        self._saved: list[ReferenceType[_Saved]] = []
        self._recomputed = 0
        # Inputs with a gradient (the hidden states) are saved by a node of the graph, other arguments are kept here.
        self._arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs
        self._differentiable = [
            key for key, value in self._arguments.items() if isinstance(value, Tensor) and value.requires_grad
        ]
        inputs = [self._arguments.pop(key) for key in self._differentiable]
        self._versions = {
            key: value._version
            for key, value in self._arguments.items()
            if isinstance(value, Tensor) and not value.is_inference()
        }
        # The entire output, since torch 2.11 frees the saved tensors of the node once nothing holds its output.
        self._inputs: Any = _Inputs.apply(*inputs) if inputs else None

    def forget(self, tensor: Tensor) -> _Saved:
        """Return a placeholder for a tensor of the first run."""
        saved = _Saved(tensor)
        self._saved.append(ref(saved))
        return saved

    def recall(self, saved: _Saved) -> Tensor:
        """Return that tensor from the second run, which starts at the first request of the backward."""
        if self._forward is not None:
            self._run_again()
        assert saved.tensor is not None
        return saved.tensor

    def _run_again(self) -> None:
        forward, random_state = self._forward, self._random_state
        assert forward is not None and random_state is not None
        arguments = self._arguments
        for key, version in self._versions.items():  # autograd checks those with a gradient
            if arguments[key]._version != version:
                raise RuntimeError(
                    f"argument {key} of a checkpointed layer {list(arguments[key].shape)} was changed in place, and its"
                    ' forward is repeated from it: expected checkpointing "none" for this layer'
                )
        if self._inputs is not None:
            for key, value in zip(self._differentiable, self._inputs.grad_fn.saved_tensors, strict=True):
                arguments[key] = value.detach().requires_grad_()
        args = [arguments[key] for key in sorted(key for key in arguments if isinstance(key, int))]
        kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
        self._forward = self._random_state = self._inputs = None
        self._arguments = arguments = {}
        with random_state.restored(), torch.enable_grad(), saved_tensors_hooks(self._save_again, _never):
            _repeated.call = self
            try:
                forward(*args, **kwargs)
            except _AllComputed:
                pass
            finally:
                _repeated.call = None
        if self._recomputed != len(self._saved):
            raise RuntimeError(
                f"a checkpointed layer saved {count(len(self._saved), 'tensor')} for its backward, but"
                f" {self._recomputed} in its recomputation: its forward depends on more than its arguments"
            )

    @property
    def remaining(self) -> int:
        """Number of tensors still to be saved."""
        return len(self._saved) - self._recomputed

    def _save_again(self, tensor: Tensor) -> None:
        saved = self._saved[self._recomputed]()
        if saved is not None:
            if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
                raise RuntimeError(
                    f"a checkpointed layer saved {list(saved.shape)} {saved.dtype} for its backward, but"
                    f" {list(tensor.shape)} {tensor.dtype} in its recomputation: its forward depends on more than its"
                    " arguments"
                )
            saved.tensor = tensor.detach()  # its graph would keep the entire second run alive
        self._recomputed += 1
        if self._recomputed == len(self._saved):
            raise _AllComputed


def _never(packed: None) -> Tensor:
    raise AssertionError("the graph of a repeated forward has no backward")


class _Repeated(threading.local):
    """The call that is being repeated, per thread: the backwards of a thread run one after the other."""

    call: _Call | None = None


_repeated = _Repeated()


class _Inputs(torch.autograd.Function):
    """Saves tensors only; never gets a gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing depends on the output")
