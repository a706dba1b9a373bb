"""The experts of a layer, line by line as `experts.function` and `experts.layout` compute them.

kept F to B     X, which is the layer's input of the experts, pre, the weights of pairs, and the layout
kept I to W     X, dZ, dpre, the gate's result, the weights of pairs, and the layout
layout          integers of every pair and of every row, from F to W

n  tokens      k  choices of each      P  pairs of a row and an expert      h  hidden size
f  width of an expert      F  of its first product, with the gate in it: 2 f
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from evenpipe.memory.operations import WIDE
from evenpipe.memory.routers import INDEX
from evenpipe.memory.sketch import Gradients, Node, Sketch, Source, Storage, Tape

GROUP_END, FLAG = 4, 1
"""Bytes of the end of a group, and of a boolean."""

OUTPUT = "output of experts"


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The call of a layer's experts on a process that holds all of them."""

    tokens: int
    choices: int
    experts: int
    hidden: int
    inner: int
    """Width of an expert."""
    element: int
    """Bytes of hidden states."""
    weight: int
    """Bytes of a routing weight."""

    @property
    def pairs(self) -> int:
        return self.tokens * self.choices

    @property
    def first(self) -> int:
        """Columns of the first product."""
        return 2 * self.inner

    @property
    def wide(self) -> int:
        """Bytes of a sum over columns."""
        return max(self.element, WIDE)


@dataclass(eq=False)
class _Layout:
    """Storages of a layout's tensors."""

    tensors: list[Storage]
    sums: list[Storage] = field(default_factory=list)
    """Of the pairs of each row; made when they are first needed."""


@dataclass(eq=False)
class QueuedExperts:
    """One call between I and W."""

    experts: OwnExperts
    layout: _Layout
    kept: list[Storage]
    source: Source | None = None

    @property
    def storages(self) -> list[Storage]:
        return [*self.kept, *self.layout.tensors, *self.layout.sums]

    def compute(self) -> list[Storage]:
        """Return the gradients of the matrices."""
        return self.experts.weight_gradients()


class OwnExperts:
    """On one tape.

    gate: what the second product multiplies, from the first one.
    """

    def __init__(self, tape: Tape, sizes: ExpertSizes, gate: Callable[[Sketch], Sketch]) -> None:
        self._tape, self._sizes, self._gate = tape, sizes, gate

    def __call__(self, hidden: Sketch, weights: Sketch) -> Sketch:
        """Return the output, as large as the hidden states."""
        tape, layout = self._tape, self._alone()
        held = [layout]  # by the node's backward: not a saved tensor, so no checkpointing forgets it
        node = tape.begin((hidden, weights), self._backward(held))
        first, weight = self._to_experts()
        call = tape.call
        if call is not None and call.only_saves(3):
            output = tape.new(*hidden.size)
        else:
            output = self._to_tokens(first, layout)
        tape.save(node, hidden, first, weight)
        tape.end(node, output)
        return output

    # --- layout --------------------------------------------------------------------------------------------------

    def _alone(self) -> _Layout:
        tape, sizes = self._tape, self._sizes
        present = tape.new(sizes.pairs, FLAG)
        clamped = tape.new(sizes.pairs, INDEX)
        expert, order = tape.new(sizes.pairs, INDEX), tape.new(sizes.pairs, INDEX)
        del clamped
        every = tape.new(sizes.experts, INDEX)
        row, slot = tape.new(sizes.pairs, INDEX), tape.new(sizes.pairs, INDEX)
        ends = tape.new(sizes.experts, GROUP_END)
        del every, order
        return _Layout([one.storage for one in (present, row, slot, expert, ends)])

    def _sort_by_row(self, layout: _Layout) -> None:
        tape, sizes = self._tape, self._sizes
        if not layout.sums:
            ordered, order = tape.new(sizes.pairs, INDEX), tape.new(sizes.pairs, INDEX)
            every, starts = tape.new(sizes.tokens, INDEX), tape.new(sizes.tokens, INDEX)
            layout.sums = [order.storage, starts.storage]
            del ordered, every

    def _sum_by_row(self, layout: _Layout, new: Callable[[int, int, str], Sketch]) -> Sketch:
        tape, sizes = self._tape, self._sizes
        self._sort_by_row(layout)
        result = new(sizes.tokens * sizes.hidden, sizes.element, OUTPUT)
        counts = [tape.new(sizes.tokens, INDEX) for _ in range(2)]
        if sizes.element == 8:  # torch has no quick way for fp64
            counts.append(tape.new(sizes.pairs + 1, INDEX))
        del counts
        return result

    # --- forward -------------------------------------------------------------------------------------------------

    def _to_experts(self) -> tuple[Sketch, Sketch]:
        """Return the first product and the weights of pairs."""
        tape, sizes = self._tape, self._sizes
        with self._computing() as computes:
            if computes:
                asked = tape.new(sizes.pairs, sizes.weight)
                rows = self._pairs(sizes.hidden)
            first = tape.product(sizes.pairs * sizes.first, sizes.element, "first product of experts")
            if computes:
                del rows
            weight = tape.product(sizes.pairs, sizes.weight, "weights of pairs")
            if computes:
                del asked
        return first, weight

    def _to_tokens(self, first: Sketch, layout: _Layout) -> Sketch:
        tape, sizes = self._tape, self._sizes
        with self._computing() as computes:
            if not computes:
                return tape.product(sizes.tokens * sizes.hidden, sizes.element, OUTPUT)
            gated = self._gate(first.detached())
            weighted = self._pairs(sizes.inner)
            del gated
            products = self._pairs(sizes.hidden)
            self._sort_by_row(layout)
            output = self._sum_by_row(layout, tape.product)
            del products, weighted
        return output

    @contextmanager
    def _computing(self) -> Iterator[bool]:
        """Run inside of an operation of ours, without a graph. Whether it computes: not where its result is kept."""
        tape, call = self._tape, self._tape.call
        recording, tape.recording = tape.recording, False
        try:
            yield not (call is not None and call.again and call.products is not None)
        finally:
            tape.recording = recording

    def _pairs(self, columns: int) -> Sketch:
        return self._tape.new(self._sizes.pairs * columns, self._sizes.element)

    # --- backward ------------------------------------------------------------------------------------------------

    def _backward(self, held: list[_Layout]) -> Callable[[list[Sketch], list[Storage]], Gradients]:
        tape, sizes = self._tape, self._sizes

        def backward(gradients: list[Sketch], saved: list[Storage]) -> Gradients:
            layout, (rows, first, weight) = held.pop(), saved
            plain, of_first, of_pairs = self._through_gate(first)
            of_weights = self._gradients_of_weights()
            products = self._pairs(sizes.hidden)
            of_hidden = self._sum_by_row(layout, tape.new)
            del products
            entry = QueuedExperts(self, layout, [rows, gradients[0].storage, of_first, plain, weight])
            if tape.queue is None:
                entry.compute()
            else:
                tape.queue.append(entry)
            del of_pairs
            return of_hidden, of_weights

        return backward

    def _through_gate(self, first: Storage) -> tuple[Storage, Storage, Sketch]:
        """Return the gate's result, the gradient of the first product, and that of the weights of pairs."""
        tape, sizes = self._tape, self._sizes
        caught: list[Sketch] = []

        def catch(gradients: list[Sketch], saved: list[Storage]) -> Gradients:
            caught.append(gradients[0])
            return (None,)

        gated = self._gate(Sketch(first, sizes.pairs * sizes.first, sizes.element, Node(-1, [None], catch)))
        rows = self._pairs(sizes.hidden)
        of_gated = self._pairs(sizes.inner)
        del rows
        product = self._pairs(sizes.inner)
        of_weight = tape.new(sizes.pairs, sizes.wide)
        del product
        weighted = self._pairs(sizes.inner)
        plain, root = gated.storage, gated.node
        del gated
        assert root is not None
        tape.backward(root, [weighted])
        del weighted, of_gated, root
        return plain, caught.pop().storage, of_weight

    def _gradients_of_weights(self) -> Sketch:
        tape, sizes = self._tape, self._sizes
        tables = [tape.new(sizes.pairs, sizes.wide) for _ in range(2)]
        return tables.pop() if sizes.weight == sizes.wide else tape.new(sizes.pairs, sizes.weight)

    def weight_gradients(self) -> list[Storage]:
        """Return new storages of the gradients of the matrices."""
        tape, sizes = self._tape, self._sizes
        output, hidden, weighted = (self._pairs(width) for width in (sizes.hidden, sizes.hidden, sizes.inner))
        matrix = sizes.experts * sizes.hidden
        made = [tape.new(matrix * sizes.first, sizes.element), tape.new(matrix * sizes.inner, sizes.element)]
        del output, hidden, weighted
        return [one.storage for one in made]
