"""The attention of sequences in pieces, line by line as `attention.function` and the exchanges compute it.

    keys, values        the own ones, those of all ranks (gathered), or of all slices up to this one (carried)
    kernel              blocks of queries, with a bias where some keys are not seen; the backward likewise
    again               the family's own attention without a graph; the backward runs it with one

Keys and values of a carry, and their gradients, outlive the pass: `Carried` holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evenpipe.attention.function import ROWS
from evenpipe.memory.norms import Norms
from evenpipe.memory.operations import WIDE
from evenpipe.memory.pieces import BlockSize, Piece, blocks_of
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
            del narrow
            found.append(tape.new(one.elements // piece.ranks, element))
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
        self._batch, self._element = sizes.batch, query.element
        size = shape.attention.head_size
        self._heads = query.elements // (sizes.batch * piece.queries * size)
        key_heads = key.elements // (sizes.batch * piece.queries * size)
        self._shared, self._row = self._heads // key_heads, sizes.batch * self._heads * size
        self._key_row = sizes.batch * key_heads * size
        self._queries, self._end = piece.queries, piece.end
        self._blocks: Sequence[BlockSize] = blocks_of(piece, max(1, ROWS // self._shared), shape.attention.window)
        lies_by_heads = shape.rotary.joined or piece.trades_heads
        self._copies_queries = self._shared > 1 and not (lies_by_heads and len(self._blocks) == 1)

    def forward(self) -> tuple[Sketch, Sketch]:
        tape, element = self._tape, self._element
        result = tape.new(self._queries * self._row, element, "attention")
        sums = tape.new(self._batch * self._heads * self._queries, WIDE, "log-sum-exp")
        for block in self._blocks:
            query, bias = self._part(block)
            found = tape.product(block.queries * self._row, element, "attention, block by block")
            logarithms = tape.product(self._batch * self._heads * block.queries, WIDE, "log-sum-exp of blocks")
            spread = tape.new(*logarithms.size) if self._spreads else None
            del query, bias, found, logarithms, spread
        return result, sums

    @property
    def _spreads(self) -> bool:
        """Heads that share keys are apart in what the kernel returns by tokens: putting them together copies."""
        return 1 < self._shared < self._heads

    def backward(self) -> tuple[Sketch, Sketch, Sketch]:
        tape, element = self._tape, self._element
        of_query = tape.new(self._queries * self._row, element)
        of_keys, of_values = (tape.new(self._end * self._key_row, WIDE) for _ in range(2))
        for block in self._blocks:
            query, bias = self._part(block)
            size = block.queries * self._row
            given = [tape.new(size, element) for _ in range(2)] if self._shared > 1 else []  # gradient, result
            if self._shared > 1 and len(self._blocks) > 1:
                given.append(tape.new(self._batch * self._heads * block.queries, WIDE))
            found = [tape.new(size, element), *(tape.new(block.keys * self._key_row, element) for _ in range(2))]
            del given
            spread = tape.new(size, element) if self._spreads else None
            del spread, found, query, bias
        return of_query, of_keys, of_values

    def _part(self, block: BlockSize) -> tuple[Sketch | None, Sketch | None]:
        tape, element = self._tape, self._element
        query = tape.new(block.queries * self._row, element) if self._copies_queries else None
        if block.sees_all:
            return query, None
        size = block.queries * block.keys
        seen = tape.new(size, 1)
        bias = tape.new(size, element)
        unseen = tape.new(size, 1)
        del unseen
        if self._shared > 1:
            bias = tape.new(size * self._shared, element)
        del seen
        return query, bias


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
