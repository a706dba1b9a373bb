"""Activation checkpointing of single layers: what a layer computed is computed again when its backward asks for it.

    "none"        everything that autograd saves stays from F to B (or I)
    "full"        only the layer's input stays; its forward runs a second time in B (or I), never in W
    "selective"   the results of products and of attention stay too; only what lies between them runs again

"full" is ours, "selective" is `torch.utils.checkpoint` with its standard policy; where activations go to the host, with
one that hands what it keeps over to them. Both replace what autograd saves in one graph ("non-reentrant"): gradients
are summed in the order of the plain backward, and hooks of parameters run once. The backward of a microbatch with R in
its order finds everything, so layers keep all of it there: see `Switch`.

Why "full" is not torch's: host time. In processor time of a small Llama layer on the CPU (F and B together, 645 us
without checkpointing; `benchmarks/layer_host_time.py`) torch's adds 1070 us and this one 670, of which 275 are the
second forward. A function of autograd's with a backward inside of its backward adds 460, but it sums the gradients of a
parameter that several layers share in another order and runs its hooks several times; and it cannot stop early. This
one does, as torch's does: the second forward ends with the last tensor that is wanted of it, so the last product of the
layer (a quarter of a Llama layer's work) is not computed again.

The input is saved through autograd, so that a change in place is noticed, and so that hooks on saved tensors around
the layer see that one tensor.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
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

from evenpipe.errors import InputError
from evenpipe.runtime.random_state import RandomState

CHOICES = ("none", "full", "selective")

Forward = Callable[..., Any]
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


@dataclass(slots=True)
class Switch:
    """Shared by all layers of a device."""

    off: bool = False
    """While True, checkpointed layers keep everything, as plain ones do: the microbatch under way has R."""
    hooks: tuple[Pack, Unpack] | None = None
    """Where set, "selective" keeps what the first one makes of a tensor, and computes with what the second one makes of
    that: torch keeps products where hooks on saved tensors do not see them."""


def checkpointing_of_layers(given: str | Sequence[str], layers: int) -> tuple[str, ...]:
    """One choice for each layer of the model.

    Raises:
        InputError: an unknown choice, or not as many as the model has layers.
    """
    accepted = ", ".join(f'"{choice}"' for choice in CHOICES)
    choices = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,) * layers
    for choice in choices:
        if choice not in CHOICES:
            raise InputError(f"checkpointing: {choice!r}, expected one of {accepted}, or one of these per layer")
    if len(choices) != layers:
        raise InputError(f"checkpointing: {len(choices)} choices, expected one for each of the model's {layers} layers")
    return choices


def checkpoint_layer(layer: nn.Module, choice: str, switch: Switch, torch_device: torch.device) -> None:
    """Puts the choice around a layer's forward; hooks of the layer stay outside and run once.

    A layer of transformers has a mechanism of its own, which is switched off.
    """
    if choice == "none":
        return
    if hasattr(layer, "gradient_checkpointing"):
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    layer.forward = checkpointed(layer.forward, choice, switch, torch_device)


def checkpointed(forward: Forward, choice: str, switch: Switch, torch_device: torch.device) -> Forward:
    """`forward` with the same arguments and results, checkpointed where a graph is made and the switch is not off."""
    if choice == "full":
        run = functools.partial(_fully, torch_device=torch_device)
    else:
        run = functools.partial(_selectively, switch=switch)

    @functools.wraps(forward)
    def with_checkpointing(*args: Any, **kwargs: Any) -> Any:
        if switch.off or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return run(forward, args, kwargs)

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
    torch._higher_order_ops.flex_attention,
]
"""What "selective" keeps: these cost far more time than the bytes of their results are worth."""


def _selectively(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], switch: Switch) -> Any:
    if switch.hooks is None:
        return run_checkpointed(forward, "selective", args, kwargs)
    contexts = functools.partial(_handing_over, *switch.hooks)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@dataclass(frozen=True, slots=True)
class _Product:
    """A tensor that is kept."""

    packed: Any
    version: int


def _handing_over(pack: Pack, unpack: Unpack) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What a layer runs in, and what it runs in again."""
    kept: deque[tuple[Any, Any]] = deque()
    return _Keeping(kept, pack), _Taking(kept, unpack)


class _Keeping(TorchDispatchMode):
    """Keeps results of products, in the order in which they are computed."""

    def __init__(self, kept: deque[tuple[Any, Any]], pack: Pack) -> None:
        super().__init__()
        self._kept, self._pack = kept, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._kept.append((func, tree_map_only(Tensor, self._keep, result)))
        return result

    def _keep(self, tensor: Tensor) -> _Product:
        # Below autograd a view has a version of its own, unless this key is there.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return _Product(self._pack(tensor), tensor._version)


class _Taking(TorchDispatchMode):
    """Takes them instead of computing them again."""

    def __init__(self, kept: deque[tuple[Any, Any]], unpack: Unpack) -> None:
        super().__init__()
        self._kept, self._unpack = kept, unpack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        known, result = self._kept.popleft() if self._kept else (None, None)
        if known is not func:
            raise RuntimeError(
                f"a checkpointed layer computed {known or 'nothing more'}, and {func} when it ran again: its forward"
                " depends on something else than its arguments"
            )
        return tree_map_only(_Product, self._take, result)

    def _take(self, product: _Product) -> Tensor:
        tensor = self._unpack(product.packed)
        if isinstance(product.packed, Tensor) and tensor._version != product.version:
            raise RuntimeError(
                f"a product {list(tensor.shape)} {tensor.dtype} that a checkpointed layer keeps was changed in place"
                f" (version {product.version}, now {tensor._version})"
            )
        return tensor


for _mode in (_Keeping, _Taking):
    redirect_to_mode(torch._higher_order_ops.flex_attention, _mode)


def run_checkpointed(forward: Forward, choice: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own checkpointing, "full" or "selective"; torch.compile knows it."""
    if choice == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


# --- full --------------------------------------------------------------------------------------------------------


def _fully(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], torch_device: torch.device) -> Any:
    call = _Call(forward, args, kwargs, torch_device)
    with saved_tensors_hooks(call.forget, call.recall):
        return forward(*args, **kwargs)


class _Saved:
    """Stands in the graph for one tensor that autograd wanted to save; owned by the graph alone."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


def only_saves() -> bool:
    """Whether a layer's forward is running again, and the next tensor saved is the last one that is wanted of it: what
    is computed beside it is not looked at."""
    return _running_again is not None and _running_again.wants_one_more


class _AllComputed(BaseException):
    """Ends a forward that runs again as soon as it has everything that the backward needs of it."""


class _Call:
    """One call of a layer: how to repeat it, and what the graph will want of it."""

    def __init__(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], torch_device: torch.device
    ) -> None:
        self._forward: Forward | None = forward
        self._random_state: RandomState | None = RandomState.of(torch_device)
        self._saved: list[ReferenceType[_Saved]] = []
        self._found = 0
        # Inputs with a gradient (the hidden states) are saved by a node of the graph, everything else is kept as it is.
        self._arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs
        self._differentiable = [
            key for key, value in self._arguments.items() if isinstance(value, Tensor) and value.requires_grad
        ]
        inputs = [self._arguments.pop(key) for key in self._differentiable]
        self._inputs: Any = _Inputs.apply(*inputs).grad_fn if inputs else None

    def forget(self, tensor: Tensor) -> _Saved:
        """In place of a tensor of the first run."""
        saved = _Saved()
        self._saved.append(ref(saved))
        return saved

    def recall(self, saved: _Saved) -> Tensor:
        """That tensor, from the second run; the backward's first question starts it."""
        if self._forward is not None:
            self._run_again()
        assert saved.tensor is not None
        return saved.tensor

    def _run_again(self) -> None:
        forward, random_state = self._forward, self._random_state
        assert forward is not None and random_state is not None
        arguments = self._arguments
        if self._inputs is not None:
            for key, value in zip(self._differentiable, self._inputs.saved_tensors, strict=True):
                arguments[key] = value.detach().requires_grad_()
        args = [arguments[key] for key in sorted(key for key in arguments if isinstance(key, int))]
        kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
        self._forward = self._random_state = self._inputs = None
        self._arguments = arguments = {}
        global _running_again  # noqa: PLW0603  (backwards run one after the other)
        with random_state.restored(), torch.enable_grad(), saved_tensors_hooks(self._found_again, _never):
            _running_again = self
            try:
                forward(*args, **kwargs)
            except _AllComputed:
                pass
            finally:
                _running_again = None
        if self._found != len(self._saved):
            raise RuntimeError(
                f"a checkpointed layer saved {len(self._saved)} tensors for its backward, and {self._found} when it ran"
                " again: its forward depends on something else than its arguments"
            )

    @property
    def wants_one_more(self) -> bool:
        return self._found == len(self._saved) - 1

    def _found_again(self, tensor: Tensor) -> None:
        saved = self._saved[self._found]()
        if saved is not None:
            saved.tensor = tensor.detach()  # with its graph it would keep all of the second run alive
        self._found += 1
        if self._found == len(self._saved):
            raise _AllComputed


def _never(packed: None) -> Tensor:
    raise AssertionError("the graph of a forward that ran again is never run backwards")


_running_again: _Call | None = None


class _Inputs(torch.autograd.Function):
    """Saves tensors and does nothing else; no gradient ever comes here."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing depends on the output")
