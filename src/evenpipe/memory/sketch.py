"""Tensors without elements, and an autograd that runs on them: what memory is taken when, in plain integers.

A `Sketch` knows how many elements it has and which `Storage` they stand in. A storage counts its bytes from the moment
that it is made to the moment that nobody refers to it any more, as a real one does: whoever writes an operation down
with sketches, variable for variable, finds what it holds and for how long. Operations leave a node on the `Tape`, with
the storages that their backward wants and a function that turns gradients into gradients; `Tape.backward` walks the
nodes as torch's engine does:

    the node that was made last among those that are ready comes first;
    a node lets go of what it saved when its gradients are made, and of its output's gradient after that;
    gradients that meet are summed into a new tensor. (Torch sums in place where it can, but not while anybody looks at
    its operations, so this is what is counted in a real run. Elsewhere it may need one such tensor less.)

A part of the layer whose forward runs again in the backward is a `Call`; it does what `runtime/checkpointing.py` does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import ReferenceType, ref


class Meter:
    """Bytes that live, and the most that lived since `reset`."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0

    def reset(self) -> None:
        self.peak = self.live


class Storage:
    """Bytes under one or more sketches."""

    __slots__ = ("again", "bytes", "meter", "name")

    def __init__(self, size: int, meter: Meter, name: str = "") -> None:
        self.bytes, self.meter, self.name = size, meter, name
        self.again: Remade | None = None
        """Set where nobody who saves it keeps it, since it is made again in the backward."""
        meter.live += size
        meter.peak = max(meter.peak, meter.live)

    def __del__(self) -> None:
        self.meter.live -= self.bytes


Gradients = Sequence["Sketch | None"]
Backward = Callable[[list["Sketch"], list[Storage]], Gradients]
"""Gradients of the outputs, saved storages -> gradients of the inputs. It must hold no sketch of the forward."""


class Node:
    """One operation, seen from the backward."""

    __slots__ = ("backward", "edges", "order", "saved")

    def __init__(self, order: int, edges: list[tuple[Node, int] | None], backward: Backward) -> None:
        self.order, self.edges, self.backward = order, edges, backward
        self.saved: list[Storage | Placeholder] = []


@dataclass(slots=True, eq=False)
class Sketch:
    """A tensor: how many elements of how many bytes, and where they stand."""

    storage: Storage
    elements: int
    element: int
    node: Node | None = None
    """Made it, and gets its gradient; None: needs no gradient."""
    slot: int = 0
    """Which of the node's outputs it is."""

    @property
    def bytes(self) -> int:
        return self.elements * self.element

    def detached(self, node: Node | None = None) -> Sketch:
        """The same elements in another graph, or in none."""
        return Sketch(self.storage, self.elements, self.element, node)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Placeholder:
    """Stands in a node for a storage that is made again when it is asked for."""

    owner: Call | Remade
    storage: Storage | None = None


class AllComputed(Exception):  # noqa: N818  (a way out, not a failure)
    """Ends a forward that runs again: the last storage that was wanted of it is there."""


class Call:
    """A run of operations that saves nothing but its inputs, and runs again when the backward comes to it.

    Args:
        keeps_products: the results of products and of attention stay, and are not computed again.
    """

    def __init__(self, tape: Tape, function: Callable[..., Sketch], inputs: tuple[Sketch, ...], keeps_products: bool):
        self._tape = tape
        self._function: Callable[..., Sketch] | None = function
        self._inputs = [(one.detached(), one.node is not None) for one in inputs]
        self._saved: list[ReferenceType[Placeholder]] = []
        self._found = 0
        self.products: list[Storage] | None = [] if keeps_products else None
        """Results that stay; taken out one after the other when it runs again."""
        self.again = False

    def forget(self, storage: Storage) -> Storage | Placeholder:
        """In place of a storage of the first run."""
        placeholder = Placeholder(self)
        self._saved.append(ref(placeholder))
        return placeholder

    def find(self, storage: Storage) -> Storage | Placeholder:
        """What is saved while it runs again goes to who wanted it."""
        placeholder = self._saved[self._found]()
        if placeholder is not None:
            placeholder.storage = storage
        self._found += 1
        if self._found == len(self._saved):
            raise AllComputed
        return storage

    def kept(self) -> list[Storage]:
        """What stays until it runs again."""
        return [one.storage for one, _ in self._inputs] + (self.products or [])

    @property
    def wants_one_more(self) -> bool:
        """It runs again, all of it, and the next storage is the last one."""
        return self.again and self.products is None and self._found == len(self._saved) - 1

    def recall(self) -> None:
        """Runs it again."""
        function, given, self._function = self._function, self._inputs, None
        if function is None:
            return
        if self.products is None:  # torch's own keeps its inputs until the last of its nodes has gone
            self._inputs = []
        inputs = [one.detached(self._tape.leaf() if differentiable else None) for one, differentiable in given]
        del given
        self.again = True
        with self._tape.within(self), suppress(AllComputed):
            function(*inputs)
        self.again = False


class Remade:
    """A storage that is let go after the forward, and made again for all who saved it when the first of them asks."""

    def __init__(self, tape: Tape, size: int, name: str) -> None:
        self._tape, self._size, self._name = tape, size, name
        self._saved: list[ReferenceType[Placeholder]] = []

    def forget(self) -> Placeholder:
        placeholder = Placeholder(self)
        self._saved.append(ref(placeholder))
        return placeholder

    def kept(self) -> list[Storage]:
        """What stays until then: nothing."""
        return []

    def recall(self) -> None:
        """Makes it again."""
        storage = Storage(self._size, self._tape.meter, self._name)
        for reference in self._saved:
            placeholder = reference()
            if placeholder is not None:
                placeholder.storage = storage


@dataclass(slots=True)
class Queued:
    """One use of a linear layer, between I and W."""

    hidden: Storage
    gradient: Storage
    weight: int
    """Bytes of the gradient that W makes, and of the bias's."""
    bias: int


class Tape:
    """Makes sketches, notes operations, runs backwards."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.recording = True
        self.queue: list[Queued] | None = None
        """Where linear layers leave what W needs; None: the backward is not split."""
        self._order = 0
        self._call: Call | None = None

    # --- forward -----------------------------------------------------------------------------------------------

    def new(self, elements: int, element: int, name: str = "") -> Sketch:
        """A new tensor. `name` is for those who want to know what is saved."""
        return Sketch(Storage(elements * element, self.meter, name), elements, element)

    def product(self, elements: int, element: int, name: str = "") -> Sketch:
        """The result of a product or of attention, which "selective" checkpointing keeps."""
        call = self._call
        if call is None or call.products is None:
            return self.new(elements, element, name)
        if call.again:
            return Sketch(call.products.pop(0), elements, element)
        made = self.new(elements, element, name)
        call.products.append(made.storage)
        return made

    def leaf(self) -> Node:
        """Where a gradient ends."""
        return Node(-1, [], lambda gradients, saved: ())

    def begin(self, inputs: Iterable[Sketch], backward: Backward, saves: Iterable[Sketch] = ()) -> Node | None:
        """Notes an operation before its result is made, with those of its inputs that it saves.

        Returns: the node, for `end`; None where no input needs a gradient.
        """
        inputs = tuple(inputs)
        if not self.recording or all(one.node is None for one in inputs):
            return None
        self._order += 1
        edges = [None if one.node is None else (one.node, one.slot) for one in inputs]
        node = Node(self._order, edges, backward)
        self.save(node, *saves)
        return node

    def save(self, node: Node | None, *sketches: Sketch) -> None:
        """Keeps storages for the node's backward."""
        if node is not None:
            for sketch in sketches:
                node.saved.append(self._packed(sketch.storage))

    def end(self, node: Node | None, *outputs: Sketch) -> None:
        """The results, after they are made."""
        for slot, output in enumerate(outputs):
            output.node, output.slot = node, slot

    @property
    def only_saves(self) -> bool:
        """A forward runs again, and only one more storage is wanted of it."""
        return self._call is not None and self._call.wants_one_more

    def _packed(self, storage: Storage) -> Storage | Placeholder:
        if self._call is not None:
            return self._call.find(storage) if self._call.again else self._call.forget(storage)
        return storage if storage.again is None else storage.again.forget()

    def checkpointed(self, function: Callable[..., Sketch], *inputs: Sketch, keeps_products: bool = False) -> Sketch:
        """`function(*inputs)`, of which only the inputs stay (and the results of products, where they are kept)."""
        call = Call(self, function, inputs, keeps_products)
        with self.within(call):
            return function(*inputs)

    @contextmanager
    def within(self, call: Call) -> Iterator[None]:
        """What is noted inside belongs to that call."""
        outer, self._call = self._call, call
        try:
            yield
        finally:
            self._call = outer

    # --- backward ----------------------------------------------------------------------------------------------

    def backward(self, root: Node, arrived: list[Sketch]) -> list[Sketch]:
        """From an output back to the leaves.

        Args:
            root: the node of the output.
            arrived: the output's gradient alone. It is taken out, so that it lives no longer than it has to.

        Returns: the gradients of the leaves.
        """
        awaited = _awaited(root)
        waiting: dict[Node, dict[int, Sketch]] = {root: {0: arrived.pop()}}
        ready = [(-root.order, 0, root)]
        gradients: list[Sketch] = []
        number = 0
        while ready:
            node = heapq.heappop(ready)[2]
            if not node.edges:
                gradients += waiting.pop(node).values()
                continue
            made = _run(node, waiting)
            for edge in node.edges:
                one = made.pop(0)
                if edge is None:
                    continue
                assert one is not None, "an operation left out a gradient"
                follower, slot = edge
                there = waiting.setdefault(follower, {})
                there[slot] = self._sum(there.pop(slot), one) if slot in there else one
                del one
                awaited[follower] -= 1
                if not awaited[follower]:
                    number += 1
                    # The gradient of a leaf is put away before anything else is done.
                    heapq.heappush(ready, (-follower.order if follower.edges else -self._order - 1, number, follower))
        return gradients

    def _sum(self, first: Sketch, second: Sketch) -> Sketch:
        return self.new(first.elements, max(first.element, second.element))


def _run(node: Node, waiting: dict[Node, dict[int, Sketch]]) -> list[Sketch | None]:
    """The node's backward. What it saved and its output's gradients are let go when this returns."""
    arrived = waiting.pop(node)
    saved = [_unpacked(one) for one in node.saved]
    made = node.backward([arrived[slot] for slot in sorted(arrived)], saved)
    node.saved = []
    return list(made)


def _unpacked(saved: Storage | Placeholder) -> Storage:
    if isinstance(saved, Placeholder):
        if saved.storage is None:
            saved.owner.recall()
        assert saved.storage is not None
        return saved.storage
    return saved


def _awaited(root: Node) -> dict[Node, int]:
    """How many gradients come to every node."""
    awaited: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is not None:
                if edge[0] not in awaited:
                    awaited[edge[0]] = 0
                    stack.append(edge[0])
                awaited[edge[0]] += 1
    return awaited


def held(root: Node) -> list[Storage]:
    """The storages that a graph keeps, each once."""
    found: dict[int, Storage] = {}
    for node in _awaited(root):
        for saved in node.saved:
            storages = [saved] if isinstance(saved, Storage) else saved.owner.kept()
            found |= {id(one): one for one in storages}
    return list(found.values())
