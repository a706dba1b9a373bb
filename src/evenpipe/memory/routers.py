"""The router in front of a layer's experts, which takes the largest probabilities of a softmax in fp32."""

from __future__ import annotations

from typing import NamedTuple

from evenpipe.memory.operations import WIDE, Operations, Saved
from evenpipe.memory.sketch import Gradients, Sketch, Storage
from evenpipe.model.shape import ExpertsShape

INDEX = 8
"""Bytes of an index."""


class Routed(NamedTuple):
    """What a router returns."""

    logits: Sketch
    weights: Sketch
    """[tokens, choices]"""
    chosen: Sketch
    """[tokens, choices]: the experts."""


class Router:
    """On the tape of `operations`."""

    def __init__(self, operations: Operations) -> None:
        self._operations, self._tape = operations, operations.tape

    def __call__(self, hidden: Sketch, tokens: int, experts: ExpertsShape) -> Routed:
        """Route [tokens, hidden_size]."""
        operations, element = self._operations, hidden.element
        logits = self._logits(hidden, tokens * experts.count, experts.count * (hidden.elements // tokens))
        shares = operations.elementwise(operations.to(logits, WIDE), "probabilities of experts", saves_result=True)
        weights, index = self._largest(shares, tokens * experts.choices)
        del shares
        if experts.shares:
            weights = self._divided_by_sums(weights, tokens)
        if experts.narrow_weights:
            weights = operations.to(weights, element)
        return Routed(logits, weights, index)

    def _logits(self, x: Sketch, size: int, weight: int) -> Sketch:
        """A product with a matrix that is in no linear layer, so that I computes its gradient."""
        tape, elements, element = self._tape, x.elements, x.element
        of_weight = 0 if self._operations.fuses else weight * element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            result, of_matrix = tape.new(elements, element), Storage(of_weight, tape.meter)
            del of_matrix
            return (result,)

        node = tape.begin((x,), backward, (x,))
        result = tape.product(size, element, "logits of experts")
        tape.end(node, result)
        return result

    def _largest(self, x: Sketch, elements: int) -> tuple[Sketch, Sketch]:
        """Return the largest of each row, and where they were, which is saved. The gradient is scattered."""
        tape, size = self._tape, x.size
        node = tape.begin((x,), lambda gradients, saved: (tape.new(*size),))
        result, index = tape.new(elements, x.element, "weights of experts"), tape.new(elements, INDEX, "chosen experts")
        tape.save(node, index)
        tape.end(node, result)
        return result, index

    def _divided_by_sums(self, x: Sketch, rows: int) -> Sketch:
        """Divide rows by their sums in place; a copy of what they were is saved."""
        tape, size, total = self._tape, x.size, self._operations.sum(x, rows)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            of_x = tape.new(*size)
            parts = [tape.new(*size) for _ in range(4)]  # of the sums: negated, twice divided, multiplied
            of_total = tape.new(rows, size[1])
            del parts
            return of_x, of_total

        node = tape.begin((x, total), backward)
        if node is not None:
            tape.save(node, tape.new(*size, "weights before they are divided"), total)
        result = x.detached()
        tape.end(node, result)
        return result
