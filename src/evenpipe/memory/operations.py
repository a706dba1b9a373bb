"""The operations of a layer: the tensors that each saves for its backward, and its peak.

One method for each operation of torch, with the tensors that it allocates on the CPU, where they can be counted;
`torch/csrc/autograd/generated/Functions.h` of torch 2.13 lists the tensors that autograd saves, and
`FunctionsManual.cpp` has the backwards: temporaries live to the end of a C++ expression, and a broadcast gradient is
expanded before it is summed. Small tensors (a number per token, a parameter's vector) count as well.

    x     full-size: one element per token and column
    row   one element per token (or per token and head)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from evenpipe.memory.sketch import Backward, Gradients, Queued, Sketch, Source, Storage, Tape

WIDE = 4
"""Bytes of fp32, in which norms, softmax and statistics are computed."""

Saved = list[Storage]


class _Given(NamedTuple):
    """The input of the block that runs."""

    whole: Storage
    saved: Sketch
    """What layers save that multiply it."""
    source: Source


class Operations:
    """On one tape.

    Args:
        fuses_weight_gradients: a product adds a weight's gradient to the existing one; else it makes a new tensor
        first.
    """

    def __init__(self, tape: Tape, *, fuses_weight_gradients: bool = False) -> None:
        self.tape = tape
        self.fuses = fuses_weight_gradients
        self._given: _Given | None = None

    # --- what they have in common --------------------------------------------------------------------------------

    def _made(
        self,
        inputs: Sequence[Sketch],
        size: tuple[int, int],
        name: str = "",
        *,
        backward: Backward | None = None,
        saves: Sequence[Sketch] = (),
        saves_result: bool = False,
    ) -> Sketch:
        """Record an operation with one new result, of (elements, bytes of each). backward: None allocates a gradient
        for every input."""
        node = self.tape.begin(inputs, backward or self._all_new(*inputs), saves)
        result = self.tape.new(*size, name)
        if saves_result:
            self.tape.save(node, result)
        self.tape.end(node, result)
        return result

    def _all_new(self, *inputs: Sketch) -> Backward:
        """A backward that allocates a gradient for every input."""
        sizes = [x.size for x in inputs]
        return lambda gradients, saved: [self.tape.new(*size) for size in sizes]

    def _of_power(self, x: Sketch) -> Backward:
        """A backward with a power of a tensor, its product with a number, and its product with the gradient."""
        size = x.size

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            power, scaled, result = (self.tape.new(*size) for _ in range(3))
            del power, scaled
            return (result,)

        return backward

    # --- one element at a time -----------------------------------------------------------------------------------

    def add(self, x: Sketch, y: Sketch, name: str = "") -> Sketch:
        size = x.elements, max(x.element, y.element)
        return self._made((x, y), size, name, backward=lambda gradients, saved: (gradients[0], gradients[0]))

    def offset(self, x: Sketch, name: str = "") -> Sketch:
        """Add a number, or copy to another order of dimensions: the gradient is passed on."""
        return self._made((x,), x.size, name, backward=lambda gradients, saved: gradients)

    def scaled(self, x: Sketch, name: str = "") -> Sketch:
        """Multiply by a number, divide by it, or negate."""
        return self._made((x,), x.size, name)

    def to(self, x: Sketch, element: int, name: str = "") -> Sketch:
        """Convert to another dtype; return the tensor itself if it already has it."""
        return x if x.element == element else self._made((x,), (x.elements, element), name)

    def power(self, x: Sketch, name: str = "") -> Sketch:
        """Backward: gradient * (exponent * x ** (exponent - 1)), three tensors at its end."""
        return self._made((x,), x.size, name, backward=self._of_power(x), saves=(x,))

    def elementwise(self, x: Sketch, name: str = "", *, saves_result: bool = False) -> Sketch:
        """A function with its own backward, of its input (SiLU, GELU) or its result (tanh, ReLU, softmax)."""
        return self._made((x,), x.size, name, saves=() if saves_result else (x,), saves_result=saves_result)

    def times(self, x: Sketch, y: Sketch, name: str = "") -> Sketch:
        """Both need a gradient, so both are saved. Also a kernel that activates x first."""
        return self._made((x, y), x.size, name, saves=(x, y))

    def fused_packed_gate(self, packed: Sketch, name: str) -> Sketch:
        """Activation of one half of a tensor, times the other half, in one kernel."""
        return self._made((packed,), (packed.elements // 2, packed.element), name, saves=(packed,))

    # --- rows, tables and weights --------------------------------------------------------------------------------

    def mean(self, x: Sketch, rows: int) -> Sketch:
        return self._made((x,), (rows, x.element))

    def sum(self, x: Sketch, rows: int) -> Sketch:
        """The gradient is expanded in place."""

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            return (Sketch(gradients[0].storage, elements, gradients[0].element),)

        elements = x.elements
        return self._made((x,), (rows, x.element), backward=backward)

    def inverse_root(self, row: Sketch, name: str) -> Sketch:
        """Backward: -1/2 * gradient * result ** 3."""
        return self._made((row,), row.size, name, backward=self._of_power(row), saves_result=True)

    def minus_rows(self, x: Sketch, row: Sketch, name: str = "") -> Sketch:
        rows, element = row.size

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            negative = self.tape.new(gradients[0].elements, element)
            summed = self.tape.new(rows, element)
            del negative
            return gradients[0], summed

        return self._made((x, row), x.size, name, backward=backward)

    def times_rows(self, x: Sketch, row: Sketch, name: str = "") -> Sketch:
        rows, elements, element = row.elements, x.elements, x.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            of_x, of_row = self.tape.new(elements, element), self.tape.new(elements, element)
            summed = self.tape.new(rows, element)
            del of_row
            return of_x, summed

        return self._made((x, row), x.size, name, backward=backward, saves=(x, row))

    def times_table(self, x: Sketch, table: Sketch) -> Sketch:
        """Multiply by a table of sines or cosines, in its own dtype."""
        elements, element, wide = x.elements, x.element, max(x.element, table.element)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            result = self.tape.new(elements, wide)
            return (result if wide == element else self.tape.new(elements, element),)

        return self._made((x,), (elements, wide), backward=backward, saves=(table,))

    def times_weight(
        self, x: Sketch, size: int, element: int, name: str = "", *, table: Sketch | None = None, first: bool = False
    ) -> Sketch:
        """Multiply by a weight of `size` elements.

        Args:
            element: of the parameter.
            table: the converted parameter, if that is a separate tensor.
            first: the weight is the left operand.
        """
        elements, own = x.size
        wide = max(own, element if table is None else table.element)

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

        saves = (x,) if table is None else (x, table)
        return self._made((x,), (elements, wide), name, backward=backward, saves=saves)

    def norm(self, x: Sketch, rows: int, size: int, statistics: Sequence[int], name: str = "") -> Sketch:
        """One kernel, torch's own or another: saves its input and statistics of each row.

        Args:
            size: elements of a row, and of each of its parameters.
            statistics: bytes of each: inverse deviation, and with a bias the mean. There are as many parameters.
        """
        elements, element, vectors = x.elements, x.element, len(statistics)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            result = self.tape.new(elements, element)
            vector_gradients = [self.tape.new(size, element) for _ in range(vectors)]
            del vector_gradients
            return (result,)

        node = self.tape.begin((x,), backward, (x,))
        result = self.tape.new(*x.size, name)
        self.tape.save(node, *[self.tape.new(rows, one, "statistics of norms") for one in statistics])
        self.tape.end(node, result)
        return result

    # --- parts ---------------------------------------------------------------------------------------------------

    def part(self, x: Sketch, elements: int) -> Sketch:
        """Take some columns, in place. Their gradient is written into zeros of the whole size."""
        return self.parts(x, (elements,))[0]

    def parts(self, x: Sketch, sizes: Sequence[int]) -> list[Sketch]:
        """Split all columns into parts, in place; the gradients are concatenated."""
        node = self.tape.begin((x,), self._all_new(x))
        results = [Sketch(x.storage, size, x.element) for size in sizes]
        self.tape.end(node, *results)
        return results

    def turned(self, x: Sketch, *, copies: bool = False, copies_gradient: bool = True, name: str = "") -> Sketch:
        """Transpose two dimensions, in place or in a new tensor; the gradient is copied on its way back, or not."""
        node = self.tape.begin((x,), self._all_new(x) if copies_gradient else lambda gradients, saved: gradients)
        result = self.tape.new(*x.size, name) if copies else x.detached()
        self.tape.end(node, result)
        return result

    def together(self, xs: Sequence[Sketch], name: str = "") -> Sketch:
        """Concatenate tensors; their gradients are views of its gradient."""
        sizes = [x.elements for x in xs]

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            whole = gradients[0]
            return [Sketch(whole.storage, size, whole.element) for size in sizes]

        return self._made(xs, (sum(sizes), xs[0].element), name, backward=backward)

    def repeated(self, x: Sketch, times: int, *, copies: bool = True) -> Sketch:
        """Repeat heads of keys or values, once for every query head that uses them; a single one in place."""
        node = self.tape.begin((x,), self._all_new(x))
        size = x.elements * times
        result = self.tape.new(size, x.element) if copies else Sketch(x.storage, size, x.element)
        self.tape.end(node, result)
        return result

    # --- products ------------------------------------------------------------------------------------------------

    def linear(
        self,
        x: Sketch,
        size: int,
        weight: int,
        bias: int,
        name: str,
        *,
        gathered: int = 0,
        scattered: int = 0,
        summed: int = 0,
    ) -> Sketch:
        """A linear layer.

        Args:
            size: elements of the result.
            weight, bias: their elements.
            gathered: elements of the input gathered from all GPUs of tensor parallelism (its gradient is then as large,
                before each gets its part); 0: not gathered.
            scattered: elements of the result before it is summed over these GPUs and scattered; its gradient is
                gathered in the backward. 0: not scattered.
            summed: elements of own rows, if the layer itself sums its results over tensor ranks and its backward
                gathers the gradient (`tensor/summed.py`); 0: it does not.
        """
        tape, elements, element, queue = self.tape, x.elements, x.element, self.tape.queue
        weight_bytes, bias_bytes = (0, 0) if self.fuses else (weight * element, bias * element)
        given = self._given if self._given is not None and x.storage is self._given.whole else None
        source = None if given is None else given.source

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            whole_gradient = tape.new(scattered, element) if scattered else None
            transient = weight_bytes + (gathered + scattered) * element
            given_gradient = tape.new(size, element) if summed else gradients[0]
            entry = Queued(saved[0], given_gradient.storage, transient, bias_bytes, source)
            if queue is not None:
                queue.append(entry)
                result = tape.new(gathered or elements, element)
                return (tape.new(elements, element) if gathered else result,)
            if source is not None:
                source.start()
                source.later(entry)
                return (tape.new(elements, element),)
            del entry
            whole_input = tape.new(gathered, element) if gathered else None
            result = tape.new(gathered or elements, element)
            cut = tape.new(elements, element) if gathered else result
            of_parameters = Storage(weight_bytes, tape.meter), Storage(bias_bytes, tape.meter)
            del of_parameters, whole_input, whole_gradient
            return (cut,)

        saves, is_late = x if given is None else given.saved, bool(queue is not None or given is not None or summed)
        node = tape.begin((x,), backward, () if is_late else (saves,))
        there = tape.new(gathered, element) if gathered else None
        before = tape.new(scattered, element) if scattered else None
        only_saves = is_late and tape.call is not None and tape.call.only_saves()
        if only_saves:
            result = tape.new(summed or size, element, name)
        elif summed:
            result = self._own_rows_of_product(size, summed, element, name)
        else:
            result = tape.product(size, element, name)
        del there, before
        if is_late:
            tape.save(node, saves)
        if source is not None and node is not None:
            source.uses += 1
        tape.end(node, result)
        return result

    # --- between tensor ranks ------------------------------------------------------------------------------------

    @contextmanager
    def block(self, rows: Sketch, elements: int, *, keeps: bool) -> Iterator[Sketch]:
        """Gather the input of a block, of `elements`, from the rows of all tensor ranks.

        keeps: layers save all of it; also if the block is recomputed.
        """
        keeps = keeps or self.tape.call is not None
        element, own = rows.element, rows.elements
        source = Source(elements * element, self.tape.meter, keeps=keeps)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            parts = self.tape.new(elements, element)  # a copy, which the sum destroys
            result = self.tape.new(own, element)
            source.run()
            del parts
            return (result,)

        node = self.tape.begin((rows,), backward)
        whole = self.tape.new(elements, element, "gathered")
        self.tape.end(node, whole)
        self._given = _Given(whole.storage, whole if keeps else rows, source)
        try:
            yield whole
        finally:
            self._given = None

    def _own_rows_of_product(self, size: int, own: int, element: int, name: str) -> Sketch:
        """ "selective" checkpointing keeps own rows only, and repeats neither the product nor the sum."""
        if self.tape.call is not None and self.tape.call.takes_products:
            return self.tape.product(own, element, name)
        partial = self.tape.new(size, element)
        parts = self.tape.new(size, element)  # a copy, which the sum destroys
        result = self.tape.product(own, element, name)
        del partial, parts
        return result

    def own_rows(self, whole: Sketch, elements: int) -> Sketch:
        """Keep own rows of what all tensor ranks have; the backward puts them into zeros."""
        return self._made((whole,), (elements, whole.element))

    def summed(self, x: Sketch) -> Sketch:
        """Sum over tensor ranks, also in the backward."""
        return self._made((x,), x.size)

    def product(self, x: Sketch, y: Sketch, size: int) -> Sketch:
        """Multiply two tensors, head by head."""
        node = self.tape.begin((x, y), self._all_new(x, y), (x, y))
        result = self.tape.product(size, x.element)
        self.tape.end(node, result)
        return result

    # --- kernels -------------------------------------------------------------------------------------------------

    def flash_attention(
        self, q: Sketch, k: Sketch, v: Sketch, *, size: int, rows: int, mask: Sketch | None = None, others: int = 0
    ) -> Sketch:
        """Attention that saves its inputs, its result and the log-sum-exp of each row.

        Args:
            size: elements of the result.
            rows: tokens times heads.
            others: elements of the keys and values of other GPUs (context parallelism), while it runs; in the backward
                their gradients too.
        """
        inputs = q.size, k.size, v.size
        element = q.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            there = self.tape.new(2 * others, element)
            result = [self.tape.new(*one) for one in inputs]
            del there
            return result

        node = self.tape.begin((q, k, v), backward, (q, k, v) if mask is None else (q, k, v, mask))
        there = self.tape.new(others, element)
        result = self.tape.product(size, element, "attention")
        logarithms = self.tape.product(rows, max(WIDE, element), "log-sum-exp")
        del there
        self.tape.save(node, result, logarithms)
        self.tape.end(node, result)
        return result

    def fused_rotary(self, q: Sketch, k: Sketch, tables: Sequence[Sketch]) -> tuple[Sketch, Sketch]:
        """Queries and keys at once; saves only the tables."""
        node = self.tape.begin((q, k), self._all_new(q, k), tables)
        results = self.tape.new(*q.size, "queries"), self.tape.new(*k.size, "keys")
        self.tape.end(node, *results)
        return results
