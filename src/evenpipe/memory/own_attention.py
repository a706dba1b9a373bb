"""The attention of sequences in pieces, line by line as `attention.function` and the exchanges compute it.

    keys, values        the own ones, those of all ranks (gathered), or of all slices up to this one (carried)
    kernel              blocks of queries, look by look, which are then put together; the backward likewise
    again               the family's own attention without a graph; the backward runs it with one

Keys and values of a carry, and their gradients, outlive the pass: `Carried` holds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from evenpipe.attention.blocks import Block, Look
from evenpipe.memory.norms import Norms
from evenpipe.memory.operations import WIDE
from evenpipe.memory.pieces import Piece, blocks_of
from evenpipe.memory.sketch import Gradients, Meter, Node, Sketch, Storage, Tape

OwnCore = Callable[[Sketch, Sketch, Sketch], Sketch]


@dataclass(eq=False)
class Carried:
    """The carry of one layer: keys and values of whole sequences, and their gradients in fp32."""

    sizes: tuple[int, int]
    """Elements of keys and of values."""
    element: int
    keys: list[Storage] = field(default_factory=list)
    gradients: list[Storage] = field(default_factory=list)

    @property
    def made(self) -> int:
        """Bytes of keys and values."""
        return sum(self.sizes) * self.element

    @property
    def summed(self) -> int:
        """Bytes of their gradients."""
        return sum(self.sizes) * WIDE

    def hold_keys(self, meter: Meter) -> None:
        """Hold what earlier slices have left, or an earlier forward."""
        self.keys = [Storage(size * self.element, meter) for size in self.sizes]

    def hold_gradients(self, meter: Meter) -> None:
        """Hold what later slices have left."""
        self.gradients = [Storage(size * WIDE, meter) for size in self.sizes]


class OwnAttention(Norms):
    """Of one layer on one tape."""

    carried: Carried | None = None

    def _in_pieces(self, piece: Piece, query: Sketch, key: Sketch, value: Sketch, core: OwnCore) -> Sketch:
        """core: the family's own attention on [query, keys, values], whose result lies by tokens."""
        tape = self._tape
        if piece.trades_heads:
            query, key, value = self._to_heads(piece, query, key, value)
        run = _Kernel(self, piece, query, key, value) if self._has_kernel(piece) else None
        own = (key, value) if not piece.carried else ()
        node = tape.begin((query, key, value), _backward(self, piece, (query, key, value), run, core))
        keys, values = self._keys(piece, key, value)
        made: tuple[Sketch, ...] = ()
        if run is not None:
            made = run.forward()
            result = made[0]
        else:
            recording, tape.recording = tape.recording, False
            result = core(query, keys, values)
            tape.recording = recording
        del keys, values
        tape.save(node, query, *own, *made)
        del made
        tape.end(node, result)
        return self._traded(result, "attention, all heads") if piece.trades_heads else result

    @property
    def _values_return_by_heads(self) -> bool:
        """Whether the gradient of values comes back by heads."""
        piece = self._sizes.piece
        return piece is not None and (piece.carried or (piece.gathers and self._sizes.batch > 1))

    def _has_kernel(self, piece: Piece) -> bool:
        return piece.kernel and self._is_flash

    # --- keys and values ------------------------------------------------------------------------------------------

    def _keys(self, piece: Piece, key: Sketch, value: Sketch) -> tuple[Sketch, Sketch]:
        """Exchange keys and values, and write them into the carry."""
        made = self._gathered(piece, key, value) if piece.gathers else (key.detached(), value.detached())
        carried = self.carried
        if carried is None:
            return made
        if not carried.keys:
            carried.hold_keys(self._tape.meter)
        return self._kept(piece, carried)

    def _kept(self, piece: Piece, carried: Carried) -> tuple[Sketch, Sketch]:
        found = [
            Sketch(storage, size * piece.end // piece.length, carried.element)
            for storage, size in zip(carried.keys, carried.sizes, strict=True)
        ]
        return found[0], found[1]

    def _gathered(self, piece: Piece, key: Sketch, value: Sketch) -> tuple[Sketch, Sketch]:
        """Tokens come first in what travels."""
        tape, tables = self._tape, []
        owns: list[Storage] = []  # until the wait
        for one, is_so in ((key, self._keys_lie_by_tokens), (value, self._values_lie_by_tokens)):
            owns.append(one.storage if is_so else tape.new(*one.size).storage)
            tables.append(tape.new(one.elements * piece.ranks, one.element))
        return tables[0], tables[1]

    @property
    def _keys_lie_by_tokens(self) -> bool:
        return self._sizes.batch == 1 and not self._shape.rotary.joined

    @property
    def _values_lie_by_tokens(self) -> bool:
        return self._sizes.batch == 1 and self._shape.attention.qkv == "apart"

    def _gradients(
        self, piece: Piece, given: Sequence[Sketch], element: int, *, lie_by_tokens: bool
    ) -> tuple[Sketch, Sketch]:
        """Return the gradients of the own keys and values from those of all; `element`: bytes of each."""
        tape, carried = self._tape, self.carried
        if carried is not None:
            if piece.is_last:
                wide = [one if one.element == WIDE else tape.new(one.elements, WIDE) for one in given]
                carried.gradients = [one.storage for one in wide]
                del wide
            own = [one.elements * piece.whole // piece.end for one in given]
            given, lie_by_tokens = [tape.new(elements, WIDE) for elements in own], False
            if piece.is_first:
                carried.gradients, carried.keys = [], []
        if not piece.gathers:
            found = [one if one.element == element else tape.new(one.elements, element) for one in given]
            return found[0], found[1]
        found, sent = [], []
        for one in given:
            narrow = one if one.element == element else tape.new(one.elements, element)
            sent.append(narrow if lie_by_tokens else tape.new(*narrow.size))
            found.append(tape.new(one.elements // piece.ranks, element))
            del narrow
        return found[0], found[1]

    # --- heads for tokens -----------------------------------------------------------------------------------------

    def _to_heads(self, piece: Piece, query: Sketch, key: Sketch, value: Sketch) -> tuple[Sketch, Sketch, Sketch]:
        operations, own = self._operations, self._sizes.key_value_heads
        if own % piece.ranks:
            key, value = (operations.repeated(one, piece.ranks // own) for one in (key, value))
        return (
            self._traded(query, "queries"),
            self._traded(key, "keys"),
            self._traded(value, "values"),
        )

    def _traded(self, x: Sketch, name: str) -> Sketch:
        """Stack the parts, exchange them, concatenate what came."""
        tape, size = self._tape, x.size

        def made(name: str = "") -> Sketch:
            parts = tape.new(*size)
            found = tape.new(*size)
            result = tape.new(*size, name)
            del parts, found
            return result

        node = tape.begin((x,), lambda gradients, saved: (made(),))
        result = made(name)
        tape.end(node, result)
        return result


class _Kernel:
    """Blocks of queries. `forward` returns the result and the sums; `backward` allocates what its lines do."""

    def __init__(self, attention: OwnAttention, piece: Piece, query: Sketch, key: Sketch, value: Sketch) -> None:
        sizes, shape = attention._sizes, attention._shape
        self._tape = attention._tape
        self._element = query.element
        row = sizes.batch * shape.attention.head_size
        heads = query.elements // (row * piece.queries)
        key_heads = key.elements // (row * piece.queries)
        self._shared, self._queries, self._end = heads // key_heads, piece.queries, piece.end
        self._heads = sizes.batch * key_heads
        self._row = key_heads * row
        """Elements of a token's keys, and of its queries that are attended with at a time."""
        self._blocks = blocks_of(piece, shape.attention.window)

    def forward(self) -> tuple[Sketch, Sketch]:
        tape, element = self._tape, self._element
        result = tape.new(self._queries * self._row * self._shared, element, "attention")
        sums = tape.new(self._heads * self._shared * self._queries, WIDE, "log-sum-exp")
        for block in self._parts():
            rows = _length(block.queries)
            size = rows * self._row
            attended: tuple[Sketch, Sketch] | None = None
            for look in block.looks:
                bias = self._bias(rows, look)
                found = tape.product(size, element, "attention, look by look")
                of_look = found, tape.product(self._heads * rows, WIDE, "log-sum-exp of looks")
                del bias
                attended = of_look if attended is None else self._together(attended, of_look)
                del found, of_look
            del attended
        return result, sums

    def _together(self, one: tuple[Sketch, Sketch], other: tuple[Sketch, Sketch]) -> tuple[Sketch, Sketch]:
        tape, (values, sums) = self._tape, other
        share = tape.new(*sums.size)
        wide = [made if made.element == WIDE else tape.new(made.elements, WIDE) for made in (one[0], values)]
        values = tape.new(values.elements, WIDE)
        del wide
        sums = tape.new(*sums.size)
        del share
        return values, sums

    def backward(self) -> tuple[Sketch, Sketch, Sketch]:
        tape, element = self._tape, self._element
        of_query = tape.new(self._queries * self._row * self._shared, element)
        of_keys, of_values = (tape.new(self._end * self._row, WIDE) for _ in range(2))
        for block in self._parts():
            rows = _length(block.queries)
            size = rows * self._row
            total: Sketch | None = None
            for look in block.looks:
                bias = self._bias(rows, look)
                found = [tape.new(size, element), *(tape.new(_length(look.keys) * self._row, element) for _ in "kv")]
                del bias
                if total is None:
                    total = found[0]
                else:
                    wide = total if total.element == WIDE else tape.new(size, WIDE)
                    total = tape.new(size, WIDE)
                    del wide
                del found
            del total
        return of_query, of_keys, of_values

    def _parts(self) -> Iterator[Block]:
        """Each block once for each of the heads that share keys."""
        for block in self._blocks:
            yield from itertools.repeat(block, self._shared)

    def _bias(self, rows: int, look: Look) -> Sketch | None:
        if look.how != "some":
            return None
        size = rows * _length(look.keys)
        seen = self._tape.new(size, 1)
        bias = self._tape.new(size, self._element)
        unseen = self._tape.new(size, 1)
        del unseen, seen
        return bias


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _backward(
    attention: OwnAttention,
    piece: Piece,
    inputs: Sequence[Sketch],
    run: _Kernel | None,
    core: OwnCore,
) -> Callable[[list[Sketch], list[Storage]], Gradients]:
    """Return the backward of the attention. It holds no sketch of the forward."""
    sizes = [one.size for one in inputs]

    def backward(gradients: list[Sketch], saved: list[Storage]) -> Gradients:
        keys: tuple[Sketch, Sketch]
        if attention.carried is not None:
            keys = attention._kept(piece, attention.carried)
        else:
            keys = Sketch(saved[1], *sizes[1]), Sketch(saved[2], *sizes[2])
            keys = attention._gathered(piece, *keys) if piece.gathers else keys
        if run is not None:
            of_query, *of_keys = run.backward()
        else:
            of_query, *of_keys = _again(attention._tape, core, [Sketch(saved[0], *sizes[0]), *keys], gradients[0])
        of_key, of_value = attention._gradients(piece, of_keys, sizes[0][1], lie_by_tokens=run is not None)
        return of_query, of_key, of_value

    return backward


def _again(tape: Tape, core: OwnCore, given: list[Sketch], gradient: Sketch) -> list[Sketch]:
    """Run the family's own attention with a graph, and return the gradients of what it was given."""
    caught: dict[int, Sketch] = {}

    def leaf(place: int) -> Node:
        def catch(gradients: list[Sketch], saved: list[Storage]) -> Gradients:
            caught[place] = gradients[0]
            return (None,)

        return Node(-1, [None], catch)

    query, keys, values = (one.detached(leaf(place)) for place, one in enumerate(given))
    root = core(query, keys, values).node
    del query, keys, values
    assert root is not None
    tape.backward(root, [gradient])
    return [caught.pop(place) for place in range(len(given))]
