"""Element-wise operations and norms: the tensors that each saves for its backward, and its peak.

One method for each operation of torch, with the tensors that it allocates on the CPU, where they can be counted;
`torch/csrc/autograd/generated/Functions.h` of torch 2.13 lists the tensors that autograd saves, and
`FunctionsManual.cpp` has the backwards: temporaries live to the end of a C++ expression, and a broadcast gradient is
expanded before it is summed. Small tensors (a number per token, a parameter's vector) count as well.

    x     full-size: one element per token and column
    row   one element per token (or per token and head)
"""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.memory.sketch import Backward, Gradients, Sketch, Storage, Tape

WIDE = 4
"""Bytes of fp32, in which norms, softmax and statistics are computed."""

Saved = list[Storage]


class Elementwise:
    """On one tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    # --- one element at a time -----------------------------------------------------------------------------------

    def _like(self, x: Sketch, name: str = "") -> Sketch:
        return self.tape.new(x.elements, x.element, name)

    def add(self, x: Sketch, y: Sketch, name: str = "") -> Sketch:
        node = self.tape.begin((x, y), lambda gradients, saved: (gradients[0], gradients[0]))
        result = self.tape.new(x.elements, max(x.element, y.element), name)
        self.tape.end(node, result)
        return result

    def offset(self, x: Sketch, name: str = "") -> Sketch:
        """Add a number."""
        node = self.tape.begin((x,), lambda gradients, saved: gradients)
        result = self._like(x, name)
        self.tape.end(node, result)
        return result

    def scaled(self, x: Sketch, name: str = "") -> Sketch:
        """Multiply by a number, divide by it, or negate."""
        node = self.tape.begin((x,), self._one_new(x.elements, x.element))
        result = self._like(x, name)
        self.tape.end(node, result)
        return result

    def to(self, x: Sketch, element: int, name: str = "") -> Sketch:
        """Convert to another dtype; return the tensor itself if it already has it."""
        if x.element == element:
            return x
        node = self.tape.begin((x,), self._one_new(x.elements, x.element))
        result = self.tape.new(x.elements, element, name)
        self.tape.end(node, result)
        return result

    def clone(self, x: Sketch, name: str = "") -> Sketch:
        """Copy to another order of dimensions."""
        node = self.tape.begin((x,), lambda gradients, saved: gradients)
        result = self._like(x, name)
        self.tape.end(node, result)
        return result

    def power(self, x: Sketch, name: str = "") -> Sketch:
        """Backward: gradient * (exponent * x ** (exponent - 1)), three tensors at its end."""
        elements, element = x.elements, x.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            power, scaled = self.tape.new(elements, element), self.tape.new(elements, element)
            result = self.tape.new(elements, element)
            del power, scaled
            return (result,)

        node = self.tape.begin((x,), backward, (x,))
        result = self._like(x, name)
        self.tape.end(node, result)
        return result

    def elementwise(self, x: Sketch, name: str = "", *, saves_result: bool = False) -> Sketch:
        """A function with its own backward, of its input (SiLU, GELU) or its result (tanh, ReLU)."""
        node = self.tape.begin((x,), self._one_new(x.elements, x.element), () if saves_result else (x,))
        result = self._like(x, name)
        if saves_result:
            self.tape.save(node, result)
        self.tape.end(node, result)
        return result

    def times(self, x: Sketch, y: Sketch, name: str = "") -> Sketch:
        """Both need a gradient, so both are saved."""
        sizes = (x.elements, x.element), (y.elements, y.element)
        node = self.tape.begin((x, y), lambda gradients, saved: [self.tape.new(*size) for size in sizes], (x, y))
        result = self._like(x, name)
        self.tape.end(node, result)
        return result

    def _one_new(self, elements: int, element: int) -> Backward:
        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            return (self.tape.new(elements, element),)

        return backward

    # --- rows, tables and weights --------------------------------------------------------------------------------

    def mean(self, x: Sketch, rows: int) -> Sketch:
        node = self.tape.begin((x,), self._one_new(x.elements, x.element))
        result = self.tape.new(rows, x.element)
        self.tape.end(node, result)
        return result

    def inverse_root(self, row: Sketch, name: str) -> Sketch:
        """Backward: -1/2 * gradient * result ** 3."""
        elements, element = row.elements, row.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            half, power = self.tape.new(elements, element), self.tape.new(elements, element)
            result = self.tape.new(elements, element)
            del half, power
            return (result,)

        node = self.tape.begin((row,), backward)
        result = self._like(row, name)
        self.tape.save(node, result)
        self.tape.end(node, result)
        return result

    def minus_rows(self, x: Sketch, row: Sketch, name: str = "") -> Sketch:
        rows, element = row.elements, row.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            negative = self.tape.new(gradients[0].elements, element)
            summed = self.tape.new(rows, element)
            del negative
            return gradients[0], summed

        node = self.tape.begin((x, row), backward)
        result = self._like(x, name)
        self.tape.end(node, result)
        return result

    def times_rows(self, x: Sketch, row: Sketch, name: str = "") -> Sketch:
        rows, elements, element = row.elements, x.elements, x.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            of_x, of_row = self.tape.new(elements, element), self.tape.new(elements, element)
            summed = self.tape.new(rows, element)
            del of_row
            return of_x, summed

        node = self.tape.begin((x, row), backward, (x, row))
        result = self._like(x, name)
        self.tape.end(node, result)
        return result

    def times_table(self, x: Sketch, table: Sketch) -> Sketch:
        """Multiply by a table of sines or cosines, in its own dtype."""
        elements, element, wide = x.elements, x.element, max(x.element, table.element)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            result = self.tape.new(elements, wide)
            return (result if wide == element else self.tape.new(elements, element),)

        node = self.tape.begin((x,), backward, (table,))
        result = self.tape.new(elements, wide)
        self.tape.end(node, result)
        return result

    def times_weight(
        self, x: Sketch, size: int, element: int, name: str = "", *, table: Sketch | None = None, first: bool = False
    ) -> Sketch:
        """Multiply by a weight of `size` elements.

        Args:
            element: of the parameter.
            table: the converted parameter, if that is a separate tensor.
            first: the weight is the left operand.
        """
        elements, own = x.elements, x.element
        used = element if table is None else table.element
        wide = max(own, used)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            before = self.tape.new(elements, wide) if first else None
            of_x = self.tape.new(elements, wide)
            of_weight = before or self.tape.new(elements, wide)
            before = None
            summed = self.tape.new(size, wide)
            del of_weight
            if wide != element:
                summed = self.tape.new(size, element)
            del summed
            return (of_x if wide == own else self.tape.new(elements, own),)

        node = self.tape.begin((x,), backward, (x,) if table is None else (x, table))
        result = self.tape.new(elements, wide, name)
        self.tape.end(node, result)
        return result

    def layer_norm(self, x: Sketch, rows: int, size: int, statistic: int, name: str = "") -> Sketch:
        """torch's own: saves its input, and the mean and inverse deviation of each row, `statistic` bytes each."""
        return self._norm(x, rows, size, (statistic, statistic), name)

    def fused_norm(self, x: Sketch, rows: int, size: int, vectors: int, name: str = "") -> Sketch:
        """A kernel that saves its input and fp32 statistics: two numbers per row with a bias, one without.

        Args:
            vectors: parameters of `size` elements, 1 (weight) or 2 (bias too).
        """
        return self._norm(x, rows, size, (WIDE,) * vectors, name)

    def _norm(self, x: Sketch, rows: int, size: int, statistics: Sequence[int], name: str) -> Sketch:
        elements, element, vectors = x.elements, x.element, len(statistics)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            result = self.tape.new(elements, element)
            vector_gradients = [self.tape.new(size, element) for _ in range(vectors)]
            del vector_gradients
            return (result,)

        node = self.tape.begin((x,), backward, (x,))
        result = self._like(x, name)
        self.tape.save(node, *[self.tape.new(rows, one, "statistics of norms") for one in statistics])
        self.tape.end(node, result)
        return result
