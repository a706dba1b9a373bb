"""Tensors without elements, and an autograd for them: which memory is allocated when, in plain integers.

A `Sketch` knows its number of elements and their `Storage`. A storage counts its bytes from its creation until the last
reference is gone, as a real one does: an operation written with sketches, variable by variable, shows what it holds and
for how long. Operations leave a node on the `Tape`, with the storages that their backward needs and a function from
gradients to gradients; `Tape.backward` runs the nodes as torch's engine does:

    of the ready nodes the newest comes first;
    a node releases its saved storages when its gradients are computed, and its output's gradient after that;
    gradients of one tensor are summed into a new tensor. (Torch sums in place if it can, but not while its operations
    are watched, so a counted run does the same. Other runs may need one such tensor less.)

A recomputed part of the layer is a `Call`, which works like `runtime/checkpointing.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol
from weakref import ReferenceType, ref


class Meter:
    """Live bytes, and their peak since `reset`."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0

    def reset(self) -> None:
        self.peak = self.live


class Storage:
    """Bytes shared by one or more sketches."""

    __slots__ = ("again", "bytes", "meter", "name")

    def __init__(self, size: int, meter: Meter, name: str = "") -> None:
        self.bytes, self.meter, self.name = size, meter, name
        self.again: Remade | None = None
        """Set if nodes that save it do not keep it, because it is recomputed in the backward."""
        meter.live += size
        meter.peak = max(meter.peak, meter.live)

    def __del__(self) -> None:
        self.meter.live -= self.bytes


Gradients = Sequence["Sketch | None"]
Backward = Callable[[list["Sketch"], list[Storage]], Gradients]
"""Gradients of the outputs, saved storages -> gradients of the inputs. It must hold no sketch of the forward."""


class Node:
    """One operation, as the backward sees it."""

    __slots__ = ("backward", "edges", "order", "saved")

    def __init__(self, order: int, edges: list[tuple[Node, int] | None], backward: Backward) -> None:
        self.order, self.edges, self.backward = order, edges, backward
        self.saved: list[Storage | Placeholder] = []


@dataclass(slots=True, eq=False)
class Sketch:
    """A tensor: its number of elements, their size, and their storage."""

    storage: Storage
    elements: int
    element: int
    node: Node | None = None
    """The node that made it and gets its gradient; None: needs no gradient."""
    slot: int = 0
    """Its number among the node's outputs."""

    @property
    def size(self) -> tuple[int, int]:
        """Elements, and bytes of each."""
        return self.elements, self.element

    @property
    def bytes(self) -> int:
        return self.elements * self.element

    def detached(self, node: Node | None = None) -> Sketch:
        """Return the same elements in another graph, or in none."""
        return Sketch(self.storage, self.elements, self.element, node)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Placeholder:
    """Replaces a storage in a node that is recomputed on demand."""

    owner: Call | Remade
    storage: Storage | None = None


class AllComputed(Exception):  # noqa: N818  (a way out, not a failure)
    """Ends a recomputed forward: the last needed storage is there."""


class Call:
    """A sequence of operations that saves only its inputs, and is recomputed in the backward.

    Args:
        keeps_products: keep the results of products and of attention instead of recomputing them.
    """

    def __init__(self, tape: Tape, function: Callable[..., Sketch], inputs: tuple[Sketch, ...], keeps_products: bool):
        self._tape = tape
        self._function: Callable[..., Sketch] | None = function
        self._inputs = [(one.detached(), one.node is not None) for one in inputs]
        self._saved: list[ReferenceType[Placeholder]] = []
        self._found = 0
        self.products: list[Storage] | None = [] if keeps_products else None
        """Kept results; taken out one after the other during recomputation."""
        self.again = False

    def forget(self) -> Placeholder:
        """Return a placeholder for a storage of the first run."""
        placeholder = Placeholder(self)
        self._saved.append(ref(placeholder))
        return placeholder

    def find(self, storage: Storage) -> Storage | Placeholder:
        """Pass a storage saved during recomputation to the node that needs it."""
        placeholder = self._saved[self._found]()
        if placeholder is not None:
            placeholder.storage = storage
        self._found += 1
        if self._found == len(self._saved):
            raise AllComputed
        return storage

    def kept(self) -> list[Storage]:
        """Return the storages that stay until recomputation."""
        return [one.storage for one, _ in self._inputs] + (self.products or [])

    @property
    def takes_products(self) -> bool:
        """All of it is being recomputed, with kept results of products."""
        return self.again and self.products is not None

    def only_saves(self, count: int = 1) -> bool:
        """Return whether all of it is being recomputed, and the next `count` storages are the last needed ones."""
        return self.again and self.products is None and self._found == len(self._saved) - count

    def recall(self) -> None:
        """Recompute it."""
        function, given, self._function = self._function, self._inputs, None
        if function is None:
            return
        if self.products is None:  # torch's own keeps its inputs until the last of its nodes is gone
            self._inputs = []
        inputs = [one.detached(self._tape.leaf() if differentiable else None) for one, differentiable in given]
        del given
        self.again = True
        with self._tape.within(self), suppress(AllComputed):
            function(*inputs)
        self.again = False


class Remade:
    """A storage that is freed after the forward, and recomputed for all nodes that saved it when the first of them
    needs it."""

    def __init__(self, tape: Tape, size: int, name: str) -> None:
        self._tape, self._size, self._name = tape, size, name
        self._saved: list[ReferenceType[Placeholder]] = []

    def forget(self) -> Placeholder:
        placeholder = Placeholder(self)
        self._saved.append(ref(placeholder))
        return placeholder

    def kept(self) -> list[Storage]:
        """Nothing stays until then."""
        return []

    def recall(self) -> None:
        """Recompute it."""
        storage = Storage(self._size, self._tape.meter, self._name)
        for reference in self._saved:
            placeholder = reference()
            if placeholder is not None:
                placeholder.storage = storage


class Waiting(Protocol):
    """One use of parameters, between I and W."""

    source: Source | None
    """Gathers the input again."""

    @property
    def storages(self) -> list[Storage]:
        """What stays."""
        ...

    def compute(self) -> list[Storage]:
        """Return the gradients, of those that have bytes."""
        ...


@dataclass(slots=True)
class Queued:
    """One use of a linear layer, between I and W."""

    hidden: Storage
    gradient: Storage
    weight: int
    """Bytes of the gradients that W computes, of the weight and the bias."""
    bias: int
    source: Source | None = None

    @property
    def storages(self) -> list[Storage]:
        return [self.hidden, self.gradient]

    def compute(self) -> list[Storage]:
        whole = None if self.source is None else self.source.whole()
        meter = self.hidden.meter
        made = [Storage(self.weight, meter)] if self.weight else []
        del whole
        return [*made, *([Storage(self.bias, meter)] if self.bias else [])]


class Source:
    """The gathered input of one call of a block, as `tensor.gathered.Gathered`: what its layers multiply.

    Args:
        size: bytes of all rows.
        keeps: layers save all rows; otherwise a rank's own, and all rows are gathered again for weight gradients.
    """

    def __init__(self, size: int, meter: Meter, *, keeps: bool) -> None:
        self._size, self._meter, self.keeps = size, meter, keeps
        self.uses = 0
        """Layers that have saved it, and whose weight gradients are to be made."""
        self._whole: Storage | None = None
        self._waiting: list[Queued] = []

    def start(self) -> None:
        """Begin to gather again."""
        if not self.keeps and self._whole is None:
            self._whole = Storage(self._size, self._meter)

    def whole(self) -> Storage | None:
        """Return all rows, once for each layer; None: they are saved."""
        self.start()
        whole = self._whole
        self.uses -= 1
        if not self.uses:
            self._whole = None
        return whole

    def later(self, entry: Queued) -> None:
        """Make these weight gradients while the input's gradient is summed."""
        self._waiting.append(entry)

    def run(self) -> None:
        """Make them."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            entry.compute()


class Tape:
    """Makes sketches, records operations, runs backwards."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.recording = True
        self.queue: list[Waiting] | None = None
        """Where layers leave the inputs of W; None: the backward is not split."""
        self._order = 0
        self.call: Call | None = None
        """The recomputed part that runs."""

    # --- forward -----------------------------------------------------------------------------------------------

    def new(self, elements: int, element: int, name: str = "") -> Sketch:
        """Return a new tensor. `name` labels saved storages."""
        return Sketch(Storage(elements * element, self.meter, name), elements, element)

    def product(self, elements: int, element: int, name: str = "") -> Sketch:
        """Return the result of a product or of attention, which "selective" checkpointing keeps."""
        call = self.call
        if call is None or call.products is None:
            return self.new(elements, element, name)
        if call.again:
            return Sketch(call.products.pop(0), elements, element)
        made = self.new(elements, element, name)
        call.products.append(made.storage)
        return made

    def leaf(self) -> Node:
        """Return a tensor at which gradients end."""
        return Node(-1, [], lambda gradients, saved: ())

    def begin(self, inputs: Iterable[Sketch], backward: Backward, saves: Iterable[Sketch] = ()) -> Node | None:
        """Record an operation before its result is made, with the inputs that it saves.

        Returns: the node, for `end`; None where no input needs a gradient.
        """
        edges = [None if one.node is None else (one.node, one.slot) for one in inputs]
        if not self.recording or not any(edges):
            return None
        self._order += 1
        node = Node(self._order, edges, backward)
        self.save(node, *saves)
        return node

    def save(self, node: Node | None, *sketches: Sketch) -> None:
        """Keep storages for the node's backward."""
        if node is not None:
            for sketch in sketches:
                node.saved.append(self._packed(sketch.storage))

    def end(self, node: Node | None, *outputs: Sketch) -> None:
        """Add the results, after they are made."""
        for slot, output in enumerate(outputs):
            output.node, output.slot = node, slot

    def _packed(self, storage: Storage) -> Storage | Placeholder:
        if self.call is not None:
            return self.call.find(storage) if self.call.again else self.call.forget()
        return storage if storage.again is None else storage.again.forget()

    def checkpointed(self, function: Callable[..., Sketch], *inputs: Sketch, keeps_products: bool = False) -> Sketch:
        """Run `function(*inputs)`, keeping only the inputs (and the results of products, if these are kept)."""
        call = Call(self, function, inputs, keeps_products)
        with self.within(call):
            return function(*inputs)

    @contextmanager
    def within(self, call: Call) -> Iterator[None]:
        """Assign operations recorded inside to that call."""
        outer, self.call = self.call, call
        try:
            yield
        finally:
            self.call = outer

    # --- backward ----------------------------------------------------------------------------------------------

    def backward(self, root: Node, arrived: list[Sketch]) -> list[Sketch]:
        """Run from an output back to the leaves.

        Args:
            root: the node of the output.
            arrived: a list with only the output's gradient. It is removed from the list, so that it is freed early.

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
                assert one is not None, "an operation returned too few gradients"
                follower, slot = edge
                there = waiting.setdefault(follower, {})
                first = there.pop(slot, None)
                there[slot] = one if first is None else self.new(one.elements, max(first.element, one.element))
                del first, one
                awaited[follower] -= 1
                if not awaited[follower]:
                    number += 1
                    # The gradient of a leaf is stored before anything else.
                    heapq.heappush(ready, (-follower.order if follower.edges else -self._order - 1, number, follower))
        return gradients


def _run(node: Node, waiting: dict[Node, dict[int, Sketch]]) -> list[Sketch | None]:
    """Run the node's backward. Its saved storages and its output's gradients are released when this returns."""
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
    """Return the number of gradients that each node receives."""
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
    """Return the storages of a graph, each once."""
    found: dict[int, Storage] = {}
    for node in _awaited(root):
        for saved in node.saved:
            storages = [saved] if isinstance(saved, Storage) else saved.owner.kept()
            found |= {id(one): one for one in storages}
    return list(found.values())
