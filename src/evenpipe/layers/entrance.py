"""The graph of a stage: where autograd enters it, and where its backward begins.

    F    inputs = graph.enter(inputs)       stage(*inputs) -> outputs
         graph.leave(outputs)               the graph stays, and the outputs themselves need not
    B    graph.backward(gradients)          -> gradients of the inputs

Layers decide what depends on what: a skipped layer returns its input, `detach` or `no_grad` ends the way of gradients.
So an output may depend on the inputs, on parameters only, or on nothing that has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class StageGraph:
    """The graph of one forward of a stage."""

    __slots__ = ("_anchor", "_edges", "_gradients")

    def __init__(self, anchor: Tensor) -> None:
        """anchor: an empty tensor that requires a gradient, so that operations on the input have a graph."""
        self._anchor = anchor
        self._edges: list[GradientEdge | None] = []
        self._gradients: list[Tensor | None] = []

    def enter(self, inputs: Sequence[Tensor], have_gradients: Sequence[bool]) -> list[Tensor]:
        """Return the inputs for the layers, which may change them in place: they share memory with `inputs`, and
        autograd notices if something else needs those as they were. Only the graph keeps them.

        have_gradients: of which inputs the backward returns a gradient.
        """
        gradients = self._gradients = [None] * sum(have_gradients)
        places = iter(range(len(gradients)))
        return [
            _Entrance.apply(self._anchor, tensor, gradients, next(places)) if has_gradient else tensor
            for tensor, has_gradient in zip(inputs, have_gradients, strict=True)
        ]

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """Keep what the backward from these outputs needs."""
        # Those without a gradient depend neither on an input nor on a parameter.
        self._edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the backward, once, from a gradient for each output. Return the inputs' gradients; None for those on
        which no output depends."""
        edges, self._edges = self._edges, []
        pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if edge is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        of_inputs = self._gradients.copy()
        self._gradients.clear()
        return of_inputs


class _Entrance(torch.autograd.Function):
    """An input of a stage, whose gradient goes into a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, gradients: list[Tensor | None], place: int) -> Tensor:
        ctx.gradients, ctx.place = gradients, place
        return tensor.detach()  # no view: autograd lets nobody change a view in place that a function returned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.place] = gradient
        return None, None, None, None
