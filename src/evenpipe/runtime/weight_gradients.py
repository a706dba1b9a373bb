"""The split backward: I leaves (input, output gradient) of every linear layer in a queue, W multiplies them.

A linear layer of a stage becomes an instance of a subclass (its class is changed, so that wrappers and checkpointing
see an ordinary module). While a microbatch whose backward is split is under way, its forward is an autograd function
that holds the weight outside of autograd: the backward of that function gives the input's gradient and queues the rest.
At all other times the layer is torch's own, so that fused and split backwards mix in one order.

    I    y.grad -> x.grad, and (x, y.grad) into the queue     norms and other small parameters get their gradient here
    W    weight.grad += y.grad^T x, bias.grad += sum y.grad

Both tensors are queued detached: the saved input would keep its graph alive, and with it the stage's input. What I/W
split means: arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Key = tuple[int, int]
"""Stage and microbatch."""


@dataclass(slots=True, eq=False)
class Entry:
    """What W needs of one use of one layer."""

    parameters: tuple[nn.Parameter, ...]
    """Whose gradients `gradients` gives, in this order."""
    gradients: Callable[[], tuple[Tensor, ...]]
    """Called once; what it holds is let go with the entry."""


class WeightGradients:
    """The queue between I and W, for all stages of a device."""

    def __init__(self) -> None:
        self.under_way: Key | None = None
        """The microbatch whose F, R or I is running, where its backward is split; else None."""
        self._entries: dict[Key, list[Entry]] = {}

    def __len__(self) -> int:
        """Microbatches between their I and their W."""
        return len(self._entries)

    def begin(self, key: Key) -> None:
        """I of that microbatch begins: it has a W, even if no layer leaves anything for it."""
        self.under_way = key
        self._entries[key] = []

    def add(self, entry: Entry) -> None:
        """Called by layers from within the backward."""
        assert self.under_way is not None, "a layer whose backward is split ran outside of I"
        self._entries[self.under_way].append(entry)

    @torch.no_grad()
    def compute(self, key: Key) -> None:
        """W: adds the gradients of that microbatch, in the order in which I came to the layers.

        The uses of one parameter within the microbatch are summed before they are added, as autograd does it.
        """
        entries = self._entries.pop(key)
        uses = Counter(parameter for entry in entries for parameter in entry.parameters)
        sums: dict[nn.Parameter, Tensor] = {}
        entries.reverse()
        while entries:
            entry = entries.pop()  # its tensors are let go one after the other
            for parameter, gradient in zip(entry.parameters, entry.gradients(), strict=True):
                uses[parameter] -= 1
                summed = sums.pop(parameter).add_(gradient) if parameter in sums else gradient
                if uses[parameter]:
                    sums[parameter] = summed
                else:
                    accumulate(parameter, summed)

    def clear(self) -> None:
        """Forgets what a step that failed may have left."""
        self._entries.clear()
        self.under_way = None


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient as autograd would: it becomes `.grad` or is added to it, then the hooks of that moment run."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    hooks: dict[int, Callable[[Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    for hook in list((hooks or {}).values()):
        hook(parameter)


def split_layers(module: nn.Module, queue: WeightGradients) -> list[str]:
    """Lets the linear layers of a module take part in split backwards.

    Returns the names of the matrices (parameters of two and more dimensions) that do not: their gradient is made in I,
    which is right, but leaves less for W.
    """
    split: set[nn.Parameter] = set()
    for layer in module.modules():
        kind = _SPLIT_CLASSES.get(type(layer))
        if kind is not None:
            layer.__class__ = kind
            layer._weight_gradients = queue  # type: ignore[assignment]
            split.update(layer.parameters(recurse=False))
    return [name for name, parameter in module.named_parameters() if parameter.dim() > 1 and parameter not in split]


class SplitLinear(nn.Linear):
    """`nn.Linear` whose weight gradient can wait. Made by `split_layers` only."""

    _weight_gradients: WeightGradients

    def forward(self, input: Tensor) -> Tensor:
        if _is_split(self._weight_gradients, input, self.weight, self.bias):
            return _Linear.apply(input, self.weight.detach(), self, False)
        return functional.linear(input, self.weight, self.bias)


class SplitConv1D(Conv1D):
    """transformers' `Conv1D` (GPT-2: a linear layer with the weight transposed) whose weight gradient can wait."""

    _weight_gradients: WeightGradients

    def forward(self, x: Tensor) -> Tensor:
        if _is_split(self._weight_gradients, x, self.weight, self.bias):
            return _Linear.apply(x, self.weight.detach(), self, True)
        return super().forward(x)


_SPLIT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: SplitLinear, Conv1D: SplitConv1D}


def _is_split(queue: WeightGradients, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this use of a layer goes through the queue. Without a graph there is nothing to split; a layer whose
    input needs no gradient would not be reached by I; a frozen one has no weight gradient."""
    if queue.under_way is None or not torch.is_grad_enabled() or not hidden.requires_grad:
        return False
    return weight.requires_grad or (bias is not None and bias.requires_grad)


class _Linear(torch.autograd.Function):
    """x W^T + b. The parameters stay outside of autograd: their hooks would run in I, before there is a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, layer: nn.Module, transposed: bool) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.layer, ctx.transposed = layer, transposed
        bias = layer.bias
        assert bias is None or isinstance(bias, Tensor)
        return functional.linear(hidden, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (hidden,) = ctx.saved_tensors
        layer, transposed = ctx.layer, ctx.transposed
        weight = layer.weight.detach()
        layer._weight_gradients.add(_linear_entry(layer, hidden.detach(), gradient.detach(), transposed))
        return gradient.matmul(weight.t() if transposed else weight), None, None, None


def _linear_entry(layer: nn.Module, hidden: Tensor, gradient: Tensor, transposed: bool) -> Entry:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, nn.Parameter)
    parameters = tuple(one for one in (weight, bias) if isinstance(one, nn.Parameter) and one.requires_grad)

    def gradients() -> tuple[Tensor, ...]:
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        found = []
        if weight.requires_grad:
            found.append(columns.t() @ rows if transposed else rows.t() @ columns)
        if bias is not None and bias.requires_grad:
            found.append(rows.sum(0))
        return tuple(found)

    return Entry(parameters, gradients)
