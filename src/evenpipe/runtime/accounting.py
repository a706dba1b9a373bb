"""Bytes of tensors in a real run: how many live, what was the most, which operation made what is left over.

    with pipeline.count_bytes() as counted:
        result = pipeline.step(input_ids)
        optimizer.step()
    counted.peak                    # bytes: parameters, gradients and everything else that lived at one moment
    counted.passes()                # before, at most and after every pass of the program
    del result; counted.survivors() # what was made inside and still lives, and by which operation

Counted is what tensors stand on: storages, each once, however many tensors share it, from the operation that makes it
to the moment that it is given back. Operations inside autograd functions and in backwards are seen like all others, and
so are buffers for communication. Not seen is what an operation allocates and frees within itself, and what libraries
for communication hold. About 10 microseconds per operation.
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

from evenpipe.schedule import Pass, Transfer

_PLAIN = (Tensor, nn.Parameter, FakeTensor)


@dataclass(frozen=True, slots=True)
class Made:
    """One storage: its size, and where it comes from."""

    bytes: int
    operation: str
    """Name of the operation that returned its first tensor; empty for what was there before."""
    item: Pass | Transfer | None
    """Under way at that moment; None outside of a program."""

    def __str__(self) -> str:
        return f"{self.bytes} bytes by {self.operation or 'nobody (there before)'} in {self.item or 'no pass'}"


@dataclass(frozen=True, slots=True)
class ItemBytes:
    """Live bytes around one pass or transfer of a program, waits included."""

    item: Pass | Transfer
    before: int
    peak: int
    after: int


class Most(NamedTuple):
    """The most that lived at one moment: of bytes and of storages, which need not be the same moment."""

    bytes: int
    storages: int


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that these tensors stand on, each counted once."""
    storages = {storage._cdata: storage for tensor in tensors for storage in (_local(tensor).untyped_storage(),)}
    return sum(storage.nbytes() for storage in storages.values())


class ByteCounter(TorchDispatchMode):
    """Counts while it is entered. `Pipeline.count_bytes` makes one that knows what is there already.

    Args:
        there: tensors from before, by name; `started` tells their bytes.
        follow: called with the counter when it is entered and with None when it is left: whoever walks a program calls
            `at` before each of its items.
    """

    def __init__(
        self,
        there: Mapping[str, Iterable[Tensor]] | None = None,
        follow: Callable[[ByteCounter | None], None] | None = None,
    ) -> None:
        super().__init__()
        self._there = there or {}
        self._follow = follow
        self.started: dict[str, int] = {}
        """Bytes that were there when it was entered; a storage counts for the first name that has it."""
        self._item: Pass | Transfer | None = None
        self._made: list[Made] = []
        # A storage may be given back on any thread, so events are appended (one step of the interpreter) and summed
        # later. An event is the number of a storage, or its complement where the storage goes.
        self._events: list[int] = []
        self._marks: list[tuple[int, Pass | Transfer | None]] = []
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}

    # --- counting --------------------------------------------------------------------------------------------

    def __enter__(self) -> ByteCounter:
        for name, tensors in self._there.items():
            self.started[name] = sum(self._see(tensor, "") for tensor in tensors)
        self._there = {}
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
        """The walk of a program has come to this item; None: to its end."""
        self._item = item
        self._marks.append((len(self._events), item))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # made of other tensors, as DTensor is: what it does with those comes here by itself
        result = operation(*args, **(kwargs or {}))
        maker = "" if operation.is_view else operation  # what a view shows first was there before
        if isinstance(result, Tensor):
            self._see(result, maker)
        elif isinstance(result, (tuple, list)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._see(leaf, maker)
        return result

    def _see(self, tensor: Tensor, operation: Any) -> int:
        """Takes note of the storage of a tensor. Returns its bytes if it is new."""
        tensor = _local(tensor)
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        known = self._living.get(address)
        if known is not None:
            number = known[0]
            if self._made[number].bytes == size:
                return 0
            self._events.append(~number)  # an operation with `out` has given it another size
        number = len(self._made)
        self._made.append(Made(size, str(operation), self._item))

        events, living = self._events, self._living

        def gone(_: object) -> None:
            events.append(~living.pop(address)[0])

        self._living[address] = (number, weakref.ref(storage, gone))
        self._events.append(number)
        return size

    # --- what was counted ------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Bytes that live now."""
        return sum(self._made[number].bytes for number, _ in list(self._living.values()))

    @property
    def peak(self) -> int:
        """The most bytes that lived at one moment since it was entered."""
        return self.most(lambda made: True).bytes

    def survivors(self) -> list[Made]:
        """What was made inside and lives now, largest first."""
        alive = (self._made[number] for number, _ in list(self._living.values()))
        return sorted((made for made in alive if made.operation), key=lambda made: -made.bytes)

    def most(self, chosen: Callable[[Made], bool]) -> Most:
        """The most that lived at one moment of those storages that `chosen` chooses."""
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
        """Live bytes around every pass and transfer, in the order of the program; of several steps one by one."""
        return list(self._items())

    def passes(self) -> list[ItemBytes]:
        """The same of passes only."""
        return [one for one in self._items() if isinstance(one.item, Pass)]

    def _items(self) -> Iterator[ItemBytes]:
        changes = iter(self._changes())
        live = position = 0
        stops = [position for position, _ in self._marks[1:]] + [len(self._events)]
        for (start, item), stop in zip(self._marks, stops, strict=True):
            while position < start:
                live += next(changes)
                position += 1
            before = peak = live
            while position < stop:
                live += next(changes)
                peak = max(peak, live)
                position += 1
            if item is not None:
                yield ItemBytes(item, before, peak, live)

    def _changes(self) -> Iterator[int]:
        for event in self._events:
            yield self._made[event].bytes if event >= 0 else -self._made[~event].bytes


def _local(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that is here."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
