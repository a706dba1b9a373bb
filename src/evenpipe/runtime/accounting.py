"""Bytes of tensors in a real run: live, at the peak and left over, and the operations that made them.

    with pipeline.count_bytes() as counted:
        result = pipeline.step(input_ids)
        optimizer.step()
    counted.peak                    # most live bytes: parameters, gradients and everything else
    counted.passes()                # bytes before, during and after every pass of the program
    del result; counted.survivors() # storages made inside that are still live, with their operations

A storage is counted once, however many tensors share it, from the operation that makes it until it is freed. Operations
inside autograd functions and in backwards are counted too, and so are buffers for communication. Temporaries inside an
operation and memory of communication libraries are not. Counting takes about 10 microseconds per operation. FSDP2 frees
unsharded parameters by resizing their storages to 0: this is counted at the end of their RESHARD.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenpipe.layers.own_operations import WITHIN
from evenpipe.schedule import Pass, Transfer
from evenpipe.schedule.passes import FREEING_KINDS

_PLAIN = (Tensor, nn.Parameter, FakeTensor)


@dataclass(frozen=True, slots=True)
class Made:
    """One storage: its size and its origin."""

    bytes: int
    operation: str
    """Name of the operation that returned its first tensor; empty if it existed before."""
    item: Pass | Transfer | None
    """The item that ran when it was made; None outside of a program."""

    def __str__(self) -> str:
        return f"{self.bytes} bytes by {self.operation or 'nobody (existed before)'} in {self.item or 'no pass'}"


@dataclass(frozen=True, slots=True)
class ItemBytes:
    """Live bytes around one pass or transfer of a program, waits included."""

    item: Pass | Transfer
    before: int
    peak: int
    after: int


class Most(NamedTuple):
    """The most live bytes and the most live storages, possibly at different moments."""

    bytes: int
    storages: int


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors, each counted once."""
    storages = {storage._cdata: storage for tensor in tensors for storage in (_local(tensor).untyped_storage(),)}
    return sum(storage.nbytes() for storage in storages.values())


class ByteCounter(TorchDispatchMode):
    """Context manager that counts bytes. `Pipeline.count_bytes` makes one that knows the existing tensors.

    Args:
        existing: tensors, by name; `started` gives their bytes.
        follow: called with the counter on entry and with None on exit, so that the walker calls `at` before each item.
    """

    def __init__(
        self,
        existing: Mapping[str, Iterable[Tensor]] | None = None,
        follow: Callable[[ByteCounter | None], None] | None = None,
    ) -> None:
        super().__init__()
        self._existing = existing or {}
        self._follow = follow
        self.started: dict[str, int] = {}
        """Bytes at entry; a shared storage counts for its first name."""
        self._item: Pass | Transfer | None = None
        self._made: list[Made] = []
        # A storage may be freed on any thread, so events are appended, which is atomic, and summed later.
        # An event is the number of a storage, or its complement when the storage is freed.
        self._events: list[int] = []
        self._marks: list[tuple[int, Pass | Transfer | None]] = []
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._emptied: set[int] = set()

    # --- counting --------------------------------------------------------------------------------------------

    def __enter__(self) -> ByteCounter:
        for name, tensors in self._existing.items():
            self.started[name] = sum(self._see(tensor, "") for tensor in tensors)
        self._existing = {}
        if self._follow is not None:
            self._follow(self)
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self.at(None)
        if self._follow is not None:
            self._follow(None)

    def at(self, item: Pass | Transfer | None) -> None:
        """Note that the walk has reached this item; None for its end."""
        if self._item is not None and self._item.kind in FREEING_KINDS:
            self._see_emptied()
        self._item = item
        self._marks.append((len(self._events), item))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # consists of other tensors, like DTensor: their operations are counted separately
        within = WITHIN.get(operation.name())
        if within is not None:
            super().__enter__()  # count what is allocated inside, too
            try:
                return within(*args)
            finally:
                super().__exit__(None, None, None)
        result = operation(*args, **(kwargs or {}))
        maker = "" if operation.is_view else operation  # the base of a new view existed before
        if isinstance(result, Tensor):
            self._see(result, maker)
        elif isinstance(result, (tuple, list)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._see(leaf, maker)
        elif self._emptied:
            self._see_refilled(tree_leaves((args, kwargs)))
        return result

    def _see_emptied(self) -> None:
        """Check all living storages for emptied ones: no operation reports that a storage was resized."""
        for address, (number, reference) in list(self._living.items()):
            storage = reference()
            if storage is not None and self._made[number].bytes and not storage.nbytes():
                self._count(storage, self._made[number].operation)
                self._emptied.add(address)

    def _see_refilled(self, arguments: Iterable[Any]) -> None:
        """Count emptied storages that an operation without a result has written to."""
        for tensor in arguments:
            if isinstance(tensor, Tensor) and (storage := _local(tensor).untyped_storage())._cdata in self._emptied:
                self._emptied.discard(storage._cdata)
                self._count(storage, "")

    def _see(self, tensor: Tensor, operation: Any) -> int:
        """Count the storage of a tensor. Return its bytes if it is new, else 0."""
        tensor = _local(tensor)
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return 0
        return self._count(tensor.untyped_storage(), operation)

    def _count(self, storage: torch.UntypedStorage, operation: Any) -> int:
        """Count a storage. Return its bytes if it is new or resized, else 0."""
        address, size = storage._cdata, storage.nbytes()
        events, living, emptied = self._events, self._living, self._emptied
        known = living.get(address)
        if known is None:

            def on_free(_: object) -> None:
                events.append(~living.pop(address)[0])
                emptied.discard(address)

            reference = weakref.ref(storage, on_free)
        else:
            number, reference = known
            if self._made[number].bytes == size:
                return 0
            events.append(~number)  # it has been resized
        number = len(self._made)
        self._made.append(Made(size, str(operation), self._item))
        living[address] = (number, reference)
        events.append(number)
        return size

    # --- results -------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Bytes that are live now."""
        return sum(self._made[number].bytes for number, _ in list(self._living.values()))

    @property
    def peak(self) -> int:
        """The most live bytes since entry."""
        return self.most(lambda made: True).bytes

    def survivors(self) -> list[Made]:
        """Return the storages made inside the context that are still live, largest first."""
        alive = (self._made[number] for number, _ in list(self._living.values()))
        return sorted((made for made in alive if made.operation), key=lambda made: -made.bytes)

    def most(self, chosen: Callable[[Made], bool]) -> Most:
        """Return the most live bytes and the most live storages among the storages that `chosen` selects."""
        take = [chosen(made) for made in self._made]
        live = count = most_bytes = most_count = 0
        for event in self._events:
            number = event if event >= 0 else ~event
            if take[number]:
                sign = 1 if event >= 0 else -1
                live += sign * self._made[number].bytes
                count += sign
                most_bytes, most_count = max(most_bytes, live), max(most_count, count)
        return Most(most_bytes, most_count)

    def items(self) -> list[ItemBytes]:
        """Return the live bytes around each pass and transfer, in the order of the program; several steps follow one
        another."""
        return list(self._items())

    def passes(self) -> list[ItemBytes]:
        """Return the same for passes only."""
        return [entry for entry in self._items() if isinstance(entry.item, Pass)]

    def _items(self) -> Iterator[ItemBytes]:
        changes = iter(self._changes())
        live = position = 0
        stops = [position for position, _ in self._marks[1:]] + [len(self._events)]
        for (start, item), stop in zip(self._marks, stops, strict=True):
            while position < start:
                live += next(changes)
                position += 1
            initial = peak = live
            while position < stop:
                live += next(changes)
                peak = max(peak, live)
                position += 1
            if item is not None:
                yield ItemBytes(item, initial, peak, live)

    def _changes(self) -> Iterator[int]:
        for event in self._events:
            yield self._made[event].bytes if event >= 0 else -self._made[~event].bytes


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a distributed tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
