"""The attention of a layer: projections, rotation, and its core with a kernel or with all probabilities."""

from __future__ import annotations

from evenpipe.memory.operations import WIDE
from evenpipe.memory.own_attention import OwnAttention
from evenpipe.memory.sketch import Sketch


class Attention(OwnAttention):
    """Of one layer on one tape."""

    def _attention(self, hidden: Sketch) -> tuple[Sketch, Sketch | None]:
        """Return the result, and the probabilities if there are any."""
        with self._whole(hidden) as whole:
            return self._attended(whole)

    def _attended(self, hidden: Sketch) -> tuple[Sketch, Sketch | None]:
        query, key, value = self._projected(hidden)
        if self._shape.rotary.size:
            query, key = self._rotated(query, key)
        if "core attention" in self._again:
            core = self._tape.checkpointed(lambda *given: self._core(*given)[0], query, key, value)
            return self._output(core), None
        result, weights = self._core(query, key, value)
        return self._output(result), weights

    def _output(self, result: Sketch) -> Sketch:
        shape, sizes = self._shape, self._sizes
        weight = sizes.heads * shape.attention.head_size * sizes.hidden
        return self._rows(result, weight, shape.attention.output_bias, "result of attention")

    def _projected(self, hidden: Sketch) -> tuple[Sketch, Sketch, Sketch]:
        shape, sizes = self._shape.attention, self._sizes
        heads = (sizes.heads, sizes.key_value_heads, sizes.key_value_heads)
        widths = [count * shape.head_size for count in heads]
        if shape.qkv != "apart":
            packed = self._columns(hidden, sum(widths), shape.bias, "packed queries, keys and values")
            if shape.qkv == "sliced":
                query, key, value = (self._operations.part(packed, sizes.tokens * width) for width in widths)
            else:
                if self._shape.rotary.joined:
                    packed = self._turned(packed)
                query, key, value = self._operations.parts(packed, [sizes.tokens * width for width in widths])
            return self._query_key_norm(query, sizes.heads), self._query_key_norm(key, sizes.key_value_heads), value

        def norm(x: Sketch, heads: int, *, late: bool) -> Sketch:
            return self._query_key_norm(x, heads) if late == shape.late_norm else x

        query = norm(self._turned(self._columns(hidden, widths[0], shape.bias, "queries")), heads[0], late=False)
        key = norm(self._turned(self._columns(hidden, widths[1], shape.bias, "keys")), heads[1], late=False)
        value = self._columns(hidden, widths[2], shape.bias, "values")
        value = value if self._is_flash and not self._values_return_by_heads else self._turned(value)
        return norm(query, heads[0], late=True), norm(key, heads[1], late=True), value

    def _columns(self, hidden: Sketch, width: int, bias: bool, name: str) -> Sketch:
        """A product whose result is split over tensor parallelism, `width` columns here."""
        sizes = self._sizes
        weight = sizes.hidden * width
        return self._operations.linear(
            hidden, sizes.tokens * width, weight, width if bias else 0, name, gathered=sizes.gathered
        )

    def _rows(self, x: Sketch, weight: int, bias: bool, name: str) -> Sketch:
        """A product whose input is split over tensor parallelism, and whose results are summed."""
        operations, sizes = self._operations, self._sizes
        size, vector = sizes.whole, sizes.hidden if bias else 0
        if not sizes.blocks:
            return operations.linear(x, size, weight, vector, name, scattered=sizes.gathered)
        return operations.linear(x, size, weight, vector, name, summed=sizes.stream)

    def _turned(self, x: Sketch) -> Sketch:
        """Heads before tokens, in place; in memory the gradient arrives in that order too, and is copied back."""
        if self._kernels.rotary == "fused" and self._is_flash and self._shape.attention.qkv == "apart":
            return x
        return self._operations.turned(x)

    def _query_key_norm(self, x: Sketch, heads: int) -> Sketch:
        style, sizes = self._shape.attention.query_key_norm, self._sizes
        if style == "none":
            return x
        if style == "whole" and sizes.blocks and self._kernels.norm == "eager":
            return self._normed_over_ranks(x, sizes.tokens, x.elements // sizes.tokens, "norm of queries and keys")
        rows = sizes.tokens * heads if style == "head" else sizes.tokens
        return self._normed(x, rows, x.elements // rows, "norm of queries and keys")

    def _rotated(self, query: Sketch, key: Sketch) -> tuple[Sketch, Sketch]:
        operations, element = self._operations, self._sizes.element
        if self._kernels.rotary == "fused":
            return operations.fused_rotary(query, key, self._tables)
        if self._shape.rotary.wide:
            query, key = operations.to(query, WIDE), operations.to(key, WIDE)
        turned_query, turned_key = self._by_angles(query, "queries"), self._by_angles(key, "keys")
        return operations.to(turned_query, element, "queries"), operations.to(turned_key, element, "keys")

    def _by_angles(self, x: Sketch, name: str) -> Sketch:
        """x cos + rotate_half(x) sin."""
        operations, shape = self._operations, self._shape
        rest = None
        if shape.rotary.joined:
            rotated = x.elements * shape.rotary.size // shape.attention.head_size
            x, rest = operations.part(x, rotated), operations.part(x, x.elements - rotated)
        cosine, sine = self._tables
        result = operations.add(operations.times_table(x, cosine), operations.times_table(self._half(x), sine), name)
        return result if rest is None else operations.together((result, rest), name)

    def _half(self, x: Sketch) -> Sketch:
        operations = self._operations
        first, second = operations.part(x, x.elements // 2), operations.part(x, x.elements // 2)
        return operations.together((operations.scaled(second), first))

    # --- core ---------------------------------------------------------------------------------------------------

    def _core(self, query: Sketch, key: Sketch, value: Sketch) -> tuple[Sketch, Sketch | None]:
        operations, sizes, shape, kernels = self._operations, self._sizes, self._shape, self._kernels
        if sizes.piece is not None:
            return self._in_pieces(sizes.piece, query, key, value, self._own_core), None
        if not self._is_flash:
            return self._eager(query, key, value)
        mask = None
        if self._masked:
            key, value = self._for_every_head(key), self._for_every_head(value)
            size = sizes.batch * sizes.context**2
            inverted = self._tape.new(size, 1)
            mask = self._tape.new(size, sizes.element, "mask of one layer")
            del inverted
        result = operations.flash_attention(
            query,
            key,
            value,
            size=sizes.tokens * sizes.heads * shape.attention.head_size,
            rows=sizes.tokens * sizes.heads,
            mask=mask,
            others=(sizes.context_parallel - 1) * (key.elements + value.elements),
        )
        del mask
        if shape.rotary.joined and kernels.attention == "sdpa" and kernels.rotary == "eager":
            # The result has the memory layout of the queries, which were concatenated by heads.
            result = operations.turned(result, copies=True, copies_gradient=False, name="attention, by tokens")
        return result, None

    def _own_core(self, query: Sketch, keys: Sketch, values: Sketch) -> Sketch:
        """The family's own attention on all keys of a piece, with a mask that is made for each call."""
        operations, sizes, piece = self._operations, self._sizes, self._sizes.piece
        assert piece is not None
        pairs = piece.queries * piece.end
        seen = self._tape.new(pairs, 1)
        if not self._is_flash:
            mask, unseen = self._tape.new(sizes.batch * pairs, sizes.element), self._tape.new(sizes.batch * pairs, 1)
            del seen, unseen
            result, _ = self._eager(query, keys, values)
            del mask
            return result
        rows = query.elements // self._shape.attention.head_size
        if self._kernels.attention == "flash":  # looks at no mask
            result = operations.flash_attention(query, keys, values, size=query.elements, rows=rows)
            del seen
            return result
        keys, values = (self._for_every_head(one) for one in (keys, values))
        inverted = self._tape.new(sizes.batch * pairs, 1)
        mask = self._tape.new(sizes.batch * pairs, sizes.element, "mask of one layer")
        del inverted
        return operations.flash_attention(query, keys, values, size=query.elements, rows=rows, mask=mask)

    def _eager(self, query: Sketch, key: Sketch, value: Sketch) -> tuple[Sketch, Sketch]:
        operations, sizes, shape = self._operations, self._sizes, self._shape
        grouped = self._groups > 1 and self._key_heads > 1
        key, value = self._for_every_head(key), self._for_every_head(value)
        keys_seen = sizes.context if sizes.piece is None else sizes.piece.end
        scores = query.elements // shape.attention.head_size * keys_seen
        # Matrices of all heads in one row: tensors ordered by tokens must be copied, unless there is only one sequence.
        lies_by_heads = shape.rotary.joined
        weights = operations.scaled(
            operations.product(
                self._by_heads(query, lies_by_heads), self._by_heads(key, grouped or lies_by_heads), scores
            )
        )
        if shape.attention.soft_cap:
            weights = operations.scaled(weights)
            weights = operations.elementwise(weights, "capped scores", saves_result=True)
            weights = operations.scaled(weights)
        weights = operations.offset(weights)  # plus the mask
        if shape.attention.wide_softmax:
            weights = operations.to(weights, WIDE)
        weights = operations.to(
            operations.elementwise(weights, "probabilities", saves_result=True), sizes.element, "probabilities"
        )
        result = operations.product(weights, self._by_heads(value, grouped), query.elements)
        result = operations.turned(result, copies=True, copies_gradient=sizes.batch > 1, name="attention")
        return result, weights

    def _by_heads(self, x: Sketch, lies_so: bool) -> Sketch:
        return x if lies_so or self._sizes.batch == 1 else self._operations.offset(x, x.storage.name)

    def _for_every_head(self, x: Sketch) -> Sketch:
        if self._groups == 1:
            return x
        return self._operations.repeated(x, self._groups, copies=self._key_heads > 1)

    @property
    def _key_heads(self) -> int:
        """Heads of keys and values that attention gets."""
        piece, own = self._sizes.piece, self._sizes.key_value_heads
        return max(1, own // piece.ranks) if piece is not None and piece.trades_heads else own

    @property
    def _groups(self) -> int:
        """Heads of queries that share one of these."""
        piece, heads = self._sizes.piece, self._sizes.heads
        return (heads // piece.ranks if piece is not None and piece.trades_heads else heads) // self._key_heads
