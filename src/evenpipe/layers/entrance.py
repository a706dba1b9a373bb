"""The graph of a stage: where autograd enters it, and where its backward begins.

    F    inputs = graph.enter(inputs)       stage(*inputs) -> outputs
         graph.leave(outputs)               the graph is kept, and the outputs may be freed
    B    graph.backward(gradients)          -> gradients of the inputs

Dependences are determined by the layers: a skipped layer returns its input, `detach` or `no_grad` stops gradients. So
an output may depend on the inputs, on parameters only, or on nothing that requires a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class StageGraph:
    """The autograd graph of a stage's forward."""

    __slots__ = ("_anchor", "_edges", "_gradients")

    def __init__(self, anchor: Tensor) -> None:
        """anchor: an empty tensor that requires a gradient, so that operations on inputs have a graph."""
        self._anchor = anchor
        self._edges: list[Any] = []
        """For each output, the edge where its graph begins; None: it has no graph."""
        self._gradients: list[list[Tensor]] = []
        """For each input, a list for its gradient."""

    def enter(self, inputs: Sequence[Tensor], differentiable: Sequence[int]) -> list[Tensor]:
        """Return the inputs for the layers, which may modify them in place: they share memory with `inputs`, and
        autograd detects if anything else needs the unmodified values. Only the graph keeps them alive.

        differentiable: indices of the inputs whose gradients the backward returns.
        """
        entered = [*inputs]
        for index in differentiable:
            gradient: list[Tensor] = []
            entered[index] = _Entrance.apply(self._anchor, inputs[index], gradient)
            self._gradients.append(gradient)
        return entered

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """Keep what the backward from these outputs needs."""
        for output in outputs:  # without a gradient, it depends neither on an input nor on a parameter
            self._edges.append(get_gradient_edge(output) if output.requires_grad else None)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the backward, once, from a gradient for each output. Return the gradients of the differentiable inputs;
        None for an input on which no output depends."""
        edges, self._edges = self._edges, []
        if None in edges:
            gradients = [gradient for edge, gradient in zip(edges, gradients, strict=True) if edge is not None]
            edges = [edge for edge in edges if edge is not None]
        if edges:
            torch.autograd.backward(edges, gradients)
        return [gradient.pop() if gradient else None for gradient in self._gradients]


class _Entrance(torch.autograd.Function):
    """An input of a stage, whose gradient goes into a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return tensor.detach()  # not a view: autograd forbids in-place changes of a view returned by a function

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradients.append(gradient)
        return None, None, None
