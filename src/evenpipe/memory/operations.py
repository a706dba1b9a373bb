"""The operations of a layer beyond element-wise arithmetic: parts of tensors, products, kernels."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.memory.elementwise import WIDE, Elementwise, Saved
from evenpipe.memory.sketch import Gradients, Queued, Sketch, Storage, Tape


class Operations(Elementwise):
    """On one tape.

    Args:
        fuses_weight_gradients: a product adds a weight's gradient to the existing one; else it makes a new tensor
        first.
    """

    def __init__(self, tape: Tape, *, fuses_weight_gradients: bool = False) -> None:
        super().__init__(tape)
        self._fuses = fuses_weight_gradients

    # --- parts ---------------------------------------------------------------------------------------------------

    def part(self, x: Sketch, elements: int) -> Sketch:
        """Take some columns, in place. Their gradient is written into zeros of the whole size."""
        node = self.tape.begin((x,), self._one_new(x.elements, x.element))
        result = Sketch(x.storage, elements, x.element)
        self.tape.end(node, result)
        return result

    def parts(self, x: Sketch, sizes: Sequence[int]) -> list[Sketch]:
        """Split all columns into parts, in place; the gradients are concatenated."""
        node = self.tape.begin((x,), self._one_new(x.elements, x.element))
        results = [Sketch(x.storage, size, x.element) for size in sizes]
        self.tape.end(node, *results)
        return results

    def turned(self, x: Sketch, *, copies: bool = False, copies_gradient: bool = True, name: str = "") -> Sketch:
        """Transpose two dimensions, in place or in a new tensor; the gradient is copied on its way back, or not."""
        elements, element = x.elements, x.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            return (self.tape.new(elements, element),) if copies_gradient else gradients

        node = self.tape.begin((x,), backward)
        result = self._like(x, name) if copies else x.detached()
        self.tape.end(node, result)
        return result

    def together(self, xs: Sequence[Sketch], name: str = "") -> Sketch:
        """Concatenate tensors; their gradients are views of its gradient."""
        sizes = [x.elements for x in xs]

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            whole = gradients[0]
            return [Sketch(whole.storage, size, whole.element) for size in sizes]

        node = self.tape.begin(xs, backward)
        result = self.tape.new(sum(sizes), xs[0].element, name)
        self.tape.end(node, result)
        return result

    def repeated(self, x: Sketch, times: int) -> Sketch:
        """Repeat heads of keys or values, once for every query head that uses them."""
        node = self.tape.begin((x,), self._one_new(x.elements, x.element))
        result = self.tape.new(x.elements * times, x.element)
        self.tape.end(node, result)
        return result

    # --- products ------------------------------------------------------------------------------------------------

    def linear(
        self, x: Sketch, size: int, weight: int, bias: int, name: str, *, gathered: int = 0, scattered: int = 0
    ) -> Sketch:
        """A linear layer.

        Args:
            size: elements of the result.
            weight, bias: their elements.
            gathered: elements of the input gathered from all GPUs of tensor parallelism (its gradient is then as large,
                before each gets its part); 0: not gathered.
            scattered: elements of the result before it is summed over these GPUs and scattered; its gradient is
                gathered in the backward. 0: not scattered.
        """
        tape, elements, element, queue = self.tape, x.elements, x.element, self.tape.queue
        weight_bytes, bias_bytes = (0, 0) if self._fuses else (weight * element, bias * element)

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            whole_gradient = tape.new(scattered, element) if scattered else None
            if queue is not None:
                transient = weight_bytes + (gathered + scattered) * element
                queue.append(Queued(saved[0], gradients[0].storage, transient, bias_bytes))
                result = tape.new(gathered or elements, element)
                return (tape.new(elements, element) if gathered else result,)
            whole_input = tape.new(gathered, element) if gathered else None
            result = tape.new(gathered or elements, element)
            cut = tape.new(elements, element) if gathered else result
            of_parameters = Storage(weight_bytes, tape.meter), Storage(bias_bytes, tape.meter)
            del of_parameters, whole_input, whole_gradient
            return (cut,)

        node = tape.begin((x,), backward, () if queue is not None else (x,))
        there = tape.new(gathered, element) if gathered else None
        before = tape.new(scattered, element) if scattered else None
        if queue is not None and tape.only_saves:
            result = tape.new(size, element, name)
        else:
            result = tape.product(size, element, name)
        del there, before
        if queue is not None:
            tape.save(node, x)
        tape.end(node, result)
        return result

    def product(self, x: Sketch, y: Sketch, size: int) -> Sketch:
        """Multiply two tensors, head by head."""
        sizes = (x.elements, x.element), (y.elements, y.element)
        node = self.tape.begin((x, y), lambda gradients, saved: [self.tape.new(*one) for one in sizes], (x, y))
        result = self.tape.product(size, x.element)
        self.tape.end(node, result)
        return result

    def softmax(self, x: Sketch, name: str) -> Sketch:
        """Softmax in the dtype of its input, along rows; saves its result."""
        return self.elementwise(x, name, saves_result=True)

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
        inputs = tuple((one.elements, one.element) for one in (q, k, v))
        element = q.element

        def backward(gradients: list[Sketch], saved: Saved) -> Gradients:
            there = self.tape.new(2 * others, element)
            result = [self.tape.new(*one) for one in inputs]
            del there
            return result

        node = self.tape.begin((q, k, v), backward, (q, k, v) if mask is None else (q, k, v, mask))
        there = self.tape.new(others, element)
        result = self.tape.product(size, element, "attention")
        logarithms = self.tape.product(rows, WIDE, "log-sum-exp")
        del there
        self.tape.save(node, result, logarithms)
        self.tape.end(node, result)
        return result

    def fused_gate(self, gate: Sketch, up: Sketch, name: str) -> Sketch:
        """Activation of the gate, times up: saves only its two inputs."""
        sizes = (gate.elements, gate.element), (up.elements, up.element)
        node = self.tape.begin((gate, up), lambda gradients, saved: [self.tape.new(*one) for one in sizes], (gate, up))
        result = self._like(gate, name)
        self.tape.end(node, result)
        return result

    def fused_packed_gate(self, packed: Sketch, name: str) -> Sketch:
        """The same, with both inputs as halves of one tensor."""
        node = self.tape.begin((packed,), self._one_new(packed.elements, packed.element), (packed,))
        result = self.tape.new(packed.elements // 2, packed.element, name)
        self.tape.end(node, result)
        return result

    def fused_rotary(self, q: Sketch, k: Sketch, tables: Sequence[Sketch]) -> tuple[Sketch, Sketch]:
        """Queries and keys at once; saves only the tables."""
        sizes = (q.elements, q.element), (k.elements, k.element)
        node = self.tape.begin((q, k), lambda gradients, saved: [self.tape.new(*one) for one in sizes], tables)
        results = self._like(q, "queries"), self._like(k, "keys")
        self.tape.end(node, *results)
        return results
