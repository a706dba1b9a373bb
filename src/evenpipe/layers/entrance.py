"""The graph of a stage: where autograd enters it, and where its backward begins.

    F    x = graph.enter(hidden)            stage(x) -> output
         graph.leave(output)                the graph stays, and the output itself need not
    B    graph.backward(gradient)           -> gradient of the input

Layers decide what depends on what: a skipped layer returns its input, `detach` or `no_grad` ends the way of gradients.
So an output may depend on the input, on parameters only, or on nothing that has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class StageGraph:
    """The graph of one forward of a stage."""

    __slots__ = ("_anchor", "_edge", "_gradients")

    def __init__(self, anchor: Tensor) -> None:
        """anchor: an empty tensor that requires a gradient, so that operations on the input have a graph."""
        self._anchor = anchor
        self._edge: GradientEdge | None = None
        self._gradients: list[Tensor] = []

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the input for the layers, which may change it in place: it shares memory with `hidden`, and autograd
        notices if something else needs that as it was. Only the graph keeps it."""
        entered: Tensor = _Entrance.apply(self._anchor, hidden, self._gradients)
        return entered

    def leave(self, output: Tensor) -> None:
        """Keep what the backward needs."""
        if output.requires_grad:  # else it depends neither on the input nor on a parameter
            self._edge = get_gradient_edge(output)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Run the backward, once. Return the input's gradient; None if the output does not depend on the input."""
        edge, self._edge = self._edge, None
        if edge is not None:
            torch.autograd.backward((edge,), (gradient,))
        return self._gradients.pop() if self._gradients else None


class _Entrance(torch.autograd.Function):
    """A stage's input, whose gradient goes into a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return hidden.detach()  # no view: autograd lets nobody change a view in place that a function returned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradients.append(gradient)
        return None, None, None
