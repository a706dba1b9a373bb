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
from torch.autograd.graph import get_gradient_edge


class StageGraph:
    """The graph of one forward of a stage."""

    __slots__ = ("_anchor", "_edges", "_gradients")

    def __init__(self, anchor: Tensor) -> None:
        """anchor: an empty tensor that requires a gradient, so that operations on inputs have a graph."""
        self._anchor = anchor
        self._edges: list[Any] = []
        """For each output, where its graph begins; None: it has none."""
        self._gradients: list[list[Tensor]] = []
        """For each input, a list for its gradient."""

    def enter(self, inputs: Sequence[Tensor], differentiable: Sequence[int]) -> list[Tensor]:
        """Return the inputs for the layers, which may change them in place: they share memory with `inputs`, and
        autograd notices if something else needs those as they were. Only the graph keeps them.

        differentiable: places of the inputs of which the backward returns a gradient.
        """
        entered = [*inputs]
        for index in differentiable:
            gradient: list[Tensor] = []
            entered[index] = _Entrance.apply(self._anchor, inputs[index], gradient)
            self._gradients.append(gradient)
        return entered

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """Keep what the backward from these outputs needs."""
        for output in outputs:  # those without a gradient depend neither on an input nor on a parameter
            self._edges.append(get_gradient_edge(output) if output.requires_grad else None)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the backward, once, from a gradient for each output. Return those of the differentiable inputs;
        None where no output depends on one."""
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
        return tensor.detach()  # no view: autograd lets nobody change a view in place that a function returned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradients.append(gradient)
        return None, None, None
