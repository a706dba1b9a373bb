"""Layers compiled by torch.compile, whose backward can still be split.

A compiled region cannot put tensors into a queue: its backward is a separate graph, which would reuse the memory of a
queued tensor. So the inputs of W leave the region as gradients. Each split linear layer gets two more inputs, *taps*,
with the shapes of its input and of its output's gradient; they take no memory and are never read. The region's backward
returns the input and the output's gradient as "the gradients of the taps", and the node outside the region that created
the taps queues them. This needs no graph break and no copy, and the same tensors are kept between I and W as without
compilation.

    hidden ---> _Taps ---> taps, detached weights, hidden ---> [ compiled layer ] ---> output
    queue  <--- _Taps <--- x and g of every linear layer  <--- [ its backward   ] <--- gradient

Weights are passed detached: a compiled region gives every parameter that it sees a gradient, even if empty, and hooks
of the parameter would run in I.

Each decoder layer is compiled separately; layers of the same structure share the compiled code. Not compiled are the
rest of the model's forward (masks, rotary tables, modules before and after the layers), the vocabulary layers and the
loss, W, and the first forward with a split backward, which shows how a layer uses its linear layers. A linear layer
that is used several times, or not on all tokens, has its weight gradient in I. Checkpointing of a compiled layer is
torch's own, inside the region: there it costs no host time, and the compiler drops what the backward does not need.

If torch.compile finds no single graph, a layer is compiled in pieces, which is logged: between exchanges of tensor
ranks, attention of context ranks, slices and documents, and experts. Then "full" is our checkpointing, around the
pieces. "selective" is what the compiler does in each piece anyway: it keeps products and recomputes the operations
between them, if that saves memory.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.layers.checkpointing import Checkpointing, Switch, checkpoint_layer, checkpointed, run_checkpointed
from evenpipe.layers.weight_gradients import SplitLayer, Taps, WeightGradients, is_trained, linear_entry
from evenpipe.words import count

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]

PIECES = "pieces"
"""Used instead of a checkpointing choice: the layer is not a single graph, and has no checkpointing inside."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """The `LayerTransform` that compiles layers, with their checkpointing."""

    checkpointing: Checkpointing
    queue: WeightGradients

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        options = self.checkpointing
        for index, layer in layers.items():
            compile_layer(layer, self.queue, options.choices[index], options.switch, options.torch_device)


def compile_layer(
    layer: nn.Module,
    queue: WeightGradients,
    checkpointing: str,
    switch: Switch,
    torch_device: torch.device,
    *,
    backend: str = "inductor",
) -> None:
    """Compile a layer's forward and backward on the first call; hooks of the layer remain outside.

    Args:
        queue: as for `SplitBackward`.
        checkpointing: "none", "full" or "selective".
        switch: while it is off, the layer keeps everything for its backward.
        backend: of torch.compile.
    """
    if hasattr(layer, "gradient_checkpointing"):
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    instance_forward = vars(layer).get("forward")
    forward: Forward = (
        type(layer).forward
        if instance_forward is None
        else lambda layer, *args, **kwargs: instance_forward(*args, **kwargs)
    )
    plain = layer.forward
    checkpoint_layer(layer, checkpointing, switch, torch_device)
    compiled = _CompiledLayer(layer, forward, layer.forward, queue, checkpointing, switch, torch_device, backend)
    layer.forward = functools.update_wrapper(compiled, plain)


@dataclass(eq=False)
class _CompiledLayer:
    """Replaces a layer's forward."""

    _layer: nn.Module
    _forward: Forward
    _eager: Forward
    """The uncompiled layer."""
    _queue: WeightGradients
    _checkpointing: str
    _switch: Switch
    _torch_device: torch.device
    _backend: str
    _once: list[SplitLayer] | None = None
    """Linear layers used once, on all tokens; known after a microbatch with a split backward."""
    _trained: list[bool] = field(default_factory=list)
    _linears: list[SplitLayer] = field(default_factory=list)
    """Linear layers with taps, as long as these weights are trainable."""
    _in_pieces: bool = False
    """Whether the layer is known not to be a single graph."""
    _ran: bool = False
    """Whether the compiled layer has run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        key = next(
            (key for key, value in arguments.items() if isinstance(value, Tensor)), None
        )  # that of the hidden states
        if key is not None and not self._queue.takes(arguments[key]):
            key = None
        if key is not None and self._once is None:
            return self._find_linears(arguments[key], args, kwargs)
        choice = self._checkpointing if torch.is_grad_enabled() and not self._switch.off else "none"
        if not self._in_pieces:
            try:
                return self._run(choice, key, args, kwargs)
            except _unsupported():
                self._in_pieces = True

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(PIECES, key, args, kwargs)

        if choice == "full":
            run = checkpointed(run, choice, self._switch, self._torch_device)
        return run(*args, **kwargs)

    def _run(self, choice: str, key: int | str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled layer. key: key of the hidden states among the arguments, if the backward is split."""
        if self._ran:
            return self._run_compiled(choice, key, args, kwargs)
        with _counting_breaks(type(self._layer).__name__):
            result = self._run_compiled(choice, key, args, kwargs)
        self._ran = True
        return result

    def _run_compiled(self, choice: str, key: int | str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain, tapped = _compiled(self._backend, choice)
        inside = "none" if choice == PIECES else choice
        if key is not None:
            assert self._once is not None
            trained = [is_trained(linear) for linear in self._once]
            if trained != self._trained:
                self._trained, self._linears = trained, self._choose_linears(self._once)
        if key is None or not self._linears:
            return plain(self._forward, self._layer, inside, args, kwargs)
        taps = _Taps.apply(args[key] if isinstance(key, int) else kwargs[key], self._linears)
        layer_taps: list[Taps] = []
        for index, linear in enumerate(self._linears):
            bias = None if linear.bias is None else linear.bias.detach()
            layer_taps.append((linear.weight.detach(), bias, taps[2 * index], taps[2 * index + 1]))
        try:
            return tapped(
                self._forward, self._layer, inside, args, kwargs, linears=self._linears, layer_taps=layer_taps
            )
        except BaseException:
            _clear_taps(self._linears)
            raise

    def _find_linears(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer uncompiled for the first time, to find the linear layers that can have taps."""
        tokens = hidden.numel() // hidden.shape[-1]
        uses: Counter[nn.Module] = Counter()
        partial: set[nn.Module] = set()

        def count(linear: nn.Module, arguments: tuple[Any, ...]) -> None:
            uses[linear] += 1
            if arguments[0].numel() // arguments[0].shape[-1] != tokens:
                partial.add(linear)

        linears = [linear for linear in self._layer.modules() if isinstance(linear, SplitLayer)]
        hooks = [linear.register_forward_pre_hook(count) for linear in linears]
        try:
            result = self._eager(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        self._once = [linear for linear in linears if uses[linear] == 1 and linear not in partial]
        return result

    def _choose_linears(self, candidates: list[SplitLayer]) -> list[SplitLayer]:
        """Return the trainable candidates whose parameters are not used by any layer without taps."""
        tapped = {linear for linear in candidates if is_trained(linear)}
        untapped = {
            parameter
            for linear in self._layer.modules()
            if isinstance(linear, SplitLayer) and linear not in tapped
            for parameter in linear.parameters(recurse=False)
        }
        return [
            linear
            for linear in candidates
            if linear in tapped and untapped.isdisjoint(linear.parameters(recurse=False))
        ]


@contextmanager
def _counting_breaks(kind: str) -> Iterator[None]:
    """Log once for each kind of layer how often torch.compile breaks its graph."""
    from torch._dynamo.utils import counters

    count_before = counters["graph_break"].total()
    yield
    breaks = counters["graph_break"].total() - count_before
    if breaks and kind not in _told:
        _told.add(kind)
        logger.info("layers compiled in pieces: %s, with %s in its graph", kind, count(breaks, "break"))


_told: set[str] = set()


@functools.cache
def _compiled(backend: str, choice: str) -> tuple[Forward, Forward]:
    """Return `_run` and `_run_tapped` compiled for layers with a choice. Checkpointed layers must be a single graph;
    pieces are compiled for each sequence length, so that a repeated forward uses the same ones.

    Each has its own code object, since torch.compile limits how often it compiles a code object, and when it gives up,
    it does so for all functions with that code object, including those that must be a single graph.
    """
    options: dict[str, Any] = {"fullgraph": choice not in {"none", PIECES}}
    if choice == PIECES:
        options["dynamic"] = False
    return tuple(
        torch.compile(_copy(run, f"{run.__name__}_{choice}"), backend=backend, **options) for run in (_run, _run_tapped)
    )  # type: ignore[return-value]


def _copy(function: Any, name: str) -> Any:
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _unsupported() -> tuple[type[BaseException], ...]:
    """Return the exceptions of torch.compile if it does not find a required single graph, or compiles too often."""
    from torch._dynamo import exc

    return exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError, exc.FailOnRecompileLimitHit


def _run(forward: Forward, layer: nn.Module, choice: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compiled function: a layer whose parameters get their gradients in the backward."""
    if choice == "none":
        return forward(layer, *args, **kwargs)
    run = run_checkpointed if torch.compiler.is_compiling() else _run_uncompiled
    return run(functools.partial(forward, layer), choice, args, kwargs)


@torch.compiler.disable
def _run_uncompiled(forward: Forward, choice: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Used when torch.compile has given up on an entire frame: it would otherwise compile pieces of it in the forward,
    but not when the backward repeats them."""
    return run_checkpointed(forward, choice, args, kwargs)


def _run_tapped(
    forward: Forward,
    layer: nn.Module,
    choice: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    linears: list[SplitLayer],
    layer_taps: list[Taps],
) -> Any:
    """Compiled function: a layer whose linear layers return the inputs of W."""

    def set_taps() -> None:
        for linear, taps in zip(linears, layer_taps, strict=True):
            linear._tapped = taps

    # The first access puts a guard on `choice`: pieces compiled without checkpointing are not reused with it. Nothing
    # may be assigned inside a checkpointed region.
    if choice == "none" or torch.compiler.is_compiling():
        set_taps()
        result = _run(forward, layer, choice, args, kwargs)
        _clear_taps(linears)
        return result

    def with_taps(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        set_taps()
        try:
            return forward(layer, *args, **kwargs)
        finally:
            _clear_taps(linears)

    # Not compiled after all: the backward may repeat this, and then needs the taps again.
    return _run(with_taps, layer, choice, args, kwargs)


def _clear_taps(linears: list[SplitLayer]) -> None:
    for linear in linears:
        linear._tapped = None


class _Taps(torch.autograd.Function):
    """Creates two taps for each linear layer, and queues the tensors returned as their gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, linears: list[SplitLayer]) -> tuple[Tensor, ...]:
        """hidden: makes the taps require gradients; its shape gives the number of tokens."""
        ctx.linears = linears
        ctx.set_materialize_grads(False)
        tokens = hidden.numel() // hidden.shape[-1]
        taps: list[Tensor] = []
        for linear in linears:
            weight = linear.weight
            outside, inside = reversed(weight.shape) if linear.transposed else weight.shape
            taps += (weight.new_empty(1).expand(tokens, width) for width in (inside, outside))
        return tuple(taps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        for index in reversed(range(len(ctx.linears))):  # in the order in which autograd reaches the layers
            linear, hidden, gradient = ctx.linears[index], gradients[2 * index], gradients[2 * index + 1]
            if hidden is not None and gradient is not None:
                linear._weight_gradients.add(linear_entry(linear, hidden.detach(), gradient.detach()))
        return None, None
