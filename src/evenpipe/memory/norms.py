"""The norms of a layer, as transformers' modules or a kernel compute them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from evenpipe.memory.cut import Sizes
from evenpipe.memory.kernels import Kernels
from evenpipe.memory.operations import WIDE, Operations
from evenpipe.memory.sketch import Remade, Sketch, Tape
from evenpipe.model.shape import LayerShape


class Norms:
    """Of one layer on one tape; what the other parts of the layer need is here too.

    Args:
        again: recomputed parts of the layer, of `layers.REGIONS`.
        tables: cosines and sines; empty without rotary embedding.
        masked: attention needs a mask.
    """

    def __init__(
        self,
        tape: Tape,
        shape: LayerShape,
        kernels: Kernels,
        sizes: Sizes,
        *,
        again: frozenset[str] = frozenset(),
        tables: tuple[Sketch, ...] = (),
        masked: bool = False,
    ) -> None:
        self._tape, self._shape, self._kernels, self._sizes = tape, shape, kernels, sizes
        self._again, self._tables, self._masked = again, tables, masked
        self._is_flash = not kernels.is_eager(shape)
        self.operations = self._operations = Operations(tape, fuses_weight_gradients=kernels.weight_gradient == "fused")

    def release_tables(self) -> None:
        """No forward is to come."""
        self._tables = ()

    def _remade(self, made: Sketch, where: str) -> Sketch:
        """Recompute the result in the backward instead of keeping it, if wanted."""
        if where in self._again:
            made.storage.again = Remade(self._tape, made.bytes, made.storage.name)
        return made

    def _whole(self, hidden: Sketch) -> AbstractContextManager[Sketch]:
        """What a block gets: its input, gathered from tensor ranks."""
        sizes = self._sizes
        if not sizes.blocks:
            return nullcontext(hidden)
        return self._operations.block(hidden, sizes.whole, keeps=sizes.repeats)

    def norm(self, hidden: Sketch, name: str) -> Sketch:
        """A norm of the residual stream."""
        sizes = self._sizes
        return self._remade(self._normed(hidden, sizes.stream_tokens, sizes.hidden, name), "norms")

    def _normed(self, hidden: Sketch, rows: int, size: int, name: str) -> Sketch:
        """rows: normalised separately, of `size` elements each."""
        operations, shape, element = self._operations, self._shape, self._sizes.element
        if self._kernels.norm == "fused":
            return operations.norm(hidden, rows, size, (WIDE,) * (2 if shape.norm_style == "torch" else 1), name)
        if shape.norm_style == "torch":
            return operations.norm(hidden, rows, size, (element, element), name)
        if shape.norm_style == "centred":
            return self._centred(hidden, rows, size, name)
        if shape.norm_style == "plus one":
            return self._plus_one(operations.to(hidden, WIDE), rows, size, name)
        hidden = operations.to(hidden, WIDE, f"{name}, input in fp32")
        variance = operations.mean(operations.power(hidden), rows)
        hidden = operations.times_rows(hidden, self._deviation(variance), f"{name}, before the weight")
        if shape.norm_style == "narrow":
            narrow = operations.to(hidden, element, f"{name}, before the weight")
            return operations.times_weight(narrow, size, element, name, first=True)
        return operations.to(operations.times_weight(hidden, size, element, first=True), element, name)

    def _normed_over_ranks(self, hidden: Sketch, rows: int, size: int, name: str) -> Sketch:
        """A norm over all heads, of which this GPU has some: `tensor/norms.py`."""
        operations, element = self._operations, self._sizes.element
        wide = operations.to(hidden, WIDE)
        total = operations.scaled(operations.summed(operations.sum(operations.power(wide), rows)))
        normed = operations.times_rows(wide, self._deviation(total), f"{name}, before the weight")
        if self._shape.norm_style == "narrow":
            narrow = operations.to(normed, element, f"{name}, before the weight")
            return operations.times_weight(narrow, size, element, name, first=True)
        return operations.to(operations.times_weight(normed, size, element), element, name)

    def _deviation(self, variance: Sketch) -> Sketch:
        """Inverse deviation, after a small number is added to the variance."""
        return self._operations.inverse_root(self._operations.offset(variance), "statistics of norms")

    def _plus_one(self, hidden: Sketch, rows: int, size: int, name: str) -> Sketch:
        operations, element = self._operations, self._sizes.element
        deviation = self._deviation(operations.mean(operations.power(hidden), rows))
        output = operations.times_rows(hidden, deviation, f"{name}, before the weight")
        del hidden, deviation
        weight = self._tape.new(size, WIDE) if element != WIDE else None
        table = self._tape.new(size, WIDE, "weights of norms in fp32")
        del weight
        output = operations.times_weight(output, size, element, name, table=table)
        return operations.to(output, element, name)

    def _centred(self, hidden: Sketch, rows: int, size: int, name: str) -> Sketch:
        operations, element = self._operations, self._sizes.element
        hidden = operations.to(hidden, WIDE)
        mean = operations.mean(hidden, rows)
        difference = operations.minus_rows(hidden, mean, f"{name}, difference")
        variance = operations.mean(operations.power(difference), rows)
        del difference
        hidden = operations.times_rows(
            operations.minus_rows(hidden, mean, f"{name}, difference"),
            self._deviation(variance),
            f"{name}, before the weight",
        )
        table = None if element == WIDE else self._tape.new(size, WIDE, "weights of norms in fp32")
        hidden = operations.times_weight(hidden, size, element, name, table=table, first=True)
        return operations.to(hidden, element, name)
