"""A transformer layer, written once as a sequence of operations: every family is one of its shapes.

The order of operations and the lifetime of variables are those of transformers' modules, so `Operations` counts what
they hold; for "fused" `Kernels`, one operation replaces several.
"""

from __future__ import annotations

from collections.abc import Callable

from evenpipe.errors import InputError
from evenpipe.memory.attention import Attention
from evenpipe.memory.own_experts import ExpertSizes, OwnExperts
from evenpipe.memory.routers import Router
from evenpipe.memory.sketch import Sketch
from evenpipe.model.shape import ExpertsShape

SAVES_INPUT = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "mish")
SAVES_RESULT = ("relu", "tanh", "sigmoid")
"""Activations with a backward of their own that saves the result."""


class Block(Attention):
    """One layer on one tape."""

    def __call__(self, hidden: Sketch) -> Sketch:
        """Return the layer's output for its input."""
        if self._shape.parallel:
            return self._side_by_side(hidden)
        add, norms = self._operations.add, self._shape.norms
        residual = hidden
        hidden, _weights = self._part("attention", self._attention_part, hidden)
        _attended = hidden if self._shape.holds_attention else None
        if "after attention" in norms:
            hidden = self.norm(hidden, "norm behind attention")
        hidden = add(residual, self._scaled(hidden), "middle of the layer")
        residual = hidden
        hidden, _ = self._part("mlp", self._mlp_part, hidden)
        if "after mlp" in norms:
            hidden = self.norm(hidden, "norm behind the MLP")
        return add(residual, self._scaled(hidden), "output")

    def _side_by_side(self, hidden: Sketch) -> Sketch:
        residual = hidden
        hidden = self.norm(hidden, "norm")
        attended, _weights = self._attention(hidden)
        if "before mlp" in self._shape.norms:
            hidden = self.norm(residual, "norm before the MLP")
        hidden = self._mlp(hidden)
        return self._operations.add(self._operations.add(residual, attended), hidden, "output")

    def _part(
        self, name: str, part: Callable[[Sketch], tuple[Sketch, Sketch | None]], hidden: Sketch
    ) -> tuple[Sketch, Sketch | None]:
        if name in self._again:
            return self._tape.checkpointed(lambda one: part(one)[0], hidden), None
        return part(hidden)

    def _scaled(self, hidden: Sketch) -> Sketch:
        return self._operations.scaled(hidden) if self._shape.scaled_residual else hidden

    def _attention_part(self, hidden: Sketch) -> tuple[Sketch, Sketch | None]:
        if "before attention" in self._shape.norms:
            hidden = self.norm(hidden, "norm before attention")
        return self._attention(hidden)

    # --- MLP -----------------------------------------------------------------------------------------------------

    def _mlp_part(self, hidden: Sketch) -> tuple[Sketch, Sketch | None]:
        if "before mlp" in self._shape.norms:
            hidden = self.norm(hidden, "norm before the MLP")
        return self._mlp(hidden), None

    def _mlp(self, hidden: Sketch) -> Sketch:
        if self._shape.mlp.experts is not None:
            return self._mixture(hidden, self._shape.mlp.experts)
        weight = self._sizes.mlp * self._sizes.hidden
        with self._whole(hidden) as whole:
            inner = self._remade(self._inner(whole), "activation")
            return self._rows(inner, weight, self._shape.mlp.bias, "result of the MLP")

    def _inner(self, hidden: Sketch) -> Sketch:
        """Return the tensor between the products."""
        operations, shape, sizes = self._operations, self._shape, self._sizes
        fused = self._kernels.activation == "fused"
        if not shape.mlp.gated:
            up = self._columns(hidden, sizes.mlp, shape.mlp.bias, "up")
            return operations.elementwise(up, "input of down") if fused else self._activated(up, "input of down")
        if shape.mlp.packed_gate:
            packed = self._columns(hidden, 2 * sizes.mlp, shape.mlp.bias, "gate and up")
            if fused:
                return operations.fused_packed_gate(packed, "input of down")
            gate, up = operations.parts(packed, [sizes.tokens * sizes.mlp] * 2)
            return operations.times(up, self._activated(gate, "activated gate"), "input of down")
        gate = self._columns(hidden, sizes.mlp, shape.mlp.bias, "gate")
        if not fused:
            gate = self._activated(gate, "activated gate")
        return operations.times(gate, self._columns(hidden, sizes.mlp, shape.mlp.bias, "up"), "input of down")

    # --- experts -------------------------------------------------------------------------------------------------

    def _mixture(self, hidden: Sketch, experts: ExpertsShape) -> Sketch:
        sizes, mlp = self._sizes, self._shape.mlp
        routed = Router(self._operations)(hidden, sizes.tokens, experts)  # its caller has all of it until the end
        called = ExpertSizes(
            tokens=sizes.tokens,
            choices=experts.choices,
            experts=experts.count,
            hidden=sizes.hidden,
            inner=mlp.size,
            element=sizes.element,
            weight=routed.weights.element,
        )
        return OwnExperts(self._tape, called, self._gate_of_experts)(hidden, routed.weights)

    def _gate_of_experts(self, first: Sketch) -> Sketch:
        operations = self._operations
        gate, up = operations.parts(first, [first.elements // 2] * 2)
        return operations.times(self._activated(gate, "activated gate"), up, "gate's result")

    def _activated(self, x: Sketch, name: str) -> Sketch:
        operations, function = self._operations, self._shape.mlp.activation
        if function in SAVES_INPUT or function in SAVES_RESULT:
            return operations.elementwise(x, name, saves_result=function in SAVES_RESULT)
        if function == "relu2":
            return operations.power(operations.elementwise(x, saves_result=True), name)
        if function == "gelu_new":  # 0.5 x (1 + tanh(c (x + 0.044715 x^3)))
            half = operations.scaled(x, "half of up")
            inner = operations.scaled(operations.add(x, operations.scaled(operations.power(x))))
            tangent = [operations.elementwise(inner, "tanh", saves_result=True)]
            del inner
            return operations.times(half, operations.offset(tangent.pop(), "1 + tanh"), name)
        raise InputError(
            f"activation: {function!r} is not known in closed form; it must be one of "
            f"{', '.join((*SAVES_INPUT, *SAVES_RESULT, 'relu2', 'gelu_new'))}"
        )
