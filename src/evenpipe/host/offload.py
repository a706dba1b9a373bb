"""Activations on the host: tensors that a forward saves for its backward leave the device at O and D, and return at L.

    F    the tensors that autograd saves for a microbatch are packed: shared memory only once
    O    the copy to the host begins
    D    the copy is over, and the device's memory is freed
    L    memory is allocated, and the copy back begins
    B    (or R, or I) the copy back is over; the backward uses the tensors, and frees them as usual

Parameters and buffers, the inputs of a step, and tensors smaller than a page stay on the device. Whole storages are
moved: tensors that shared memory before share it afterwards. Sizes may differ from step to step and between
microbatches. Activations that do not fit on the host stay on the device, or are an error, as configured.

Hooks on saved tensors disable autograd's check for tensors that are changed in place after they were saved. This file
checks instead, before a copy and before a tensor is used.

The stage's input is moved too: an autograd function passes on its gradient, because a leaf would keep it. Source of the
passes: arXiv 2503.01328; the engine of its artifact requires static shapes, and supports no checkpointing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from evenpipe.errors import RunError
from evenpipe.host.copies import Copies, FileCopies, StreamCopies, Ticket
from evenpipe.host.pool import FileSlab, HostPool, PinnedSlab, Slot
from evenpipe.recipe.offload import PAGE, OffloadOptions
from evenpipe.schedule.passes import StageUnit
from evenpipe.words import refused

_PLAIN = (Tensor, nn.Parameter)


class _Memory:
    """One storage that autograd wants to keep. Owned by the graph, through `Packed`."""

    __slots__ = ("__weakref__", "bytes", "seen", "storage", "version")

    def __init__(self, tensor: Tensor, storage: UntypedStorage) -> None:
        self.storage: UntypedStorage | None = storage
        self.bytes = storage.nbytes()
        self.seen: Tensor | None = tensor.detach()  # shares its version; the tensor itself would make a cycle
        self.version = tensor._version

    def check(self) -> None:
        """Raise RuntimeError if the tensor was changed in place since it was saved."""
        if self.seen is not None and self.seen._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.seen.shape)} {self.seen.dtype} that is needed for a backward was changed in place"
                f" after it was saved (version {self.version}, now {self.seen._version})"
            )

    def free(self) -> None:
        """Free the device's memory, if nobody else holds it."""
        self.storage = self.seen = None


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Replaces a tensor in the graph."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Moved:
    """The tensors of a microbatch on their way to the host, there, or on their way back."""

    memories: list[_Memory]
    slots: list[Slot]
    out: Ticket
    given_back: bool = False
    """Whether the device's memory is freed."""
    back: Ticket | None = None


Stash = list[ReferenceType[_Memory]]
"""Storages saved by F of a microbatch, as long as they are on the device."""


class Activations:
    """Activations of a device's microbatches whose orders have O, D and L. If the pool is full, they stay on the device
    with `keep_when_full`; else that is an error."""

    smallest_bytes = PAGE
    """Smaller tensors stay on the device."""

    def __init__(
        self, pool: HostPool, copies: Copies, torch_device: torch.device, *, keep_when_full: bool = False
    ) -> None:
        self.pool, self.copies = pool, copies
        self.active = True
        """False while a layer runs whose activations stay on the device."""
        self.recorded: list[tuple[str, Sequence[Any]]] | None = None
        """If not None, gets the pass that requested a copy, as text, and the copy's stamps."""
        self._torch_device = torch_device
        self._keep_when_full = keep_when_full
        self._stashes: dict[StageUnit, Stash] = {}
        self._moved: dict[StageUnit, _Moved] = {}
        self._under_way: Stash | None = None
        self._known: dict[int, ReferenceType[_Memory]] = {}
        self._staying: set[int] = set()

    # --- F -----------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self, key: StageUnit, staying: Iterable[Tensor]) -> Iterator[None]:
        """Active during F of that microbatch. `staying`: tensors whose memory does not belong to this microbatch
        alone."""
        self._under_way = self._stashes[key] = []
        self._staying = {tensor.untyped_storage()._cdata for tensor in staying}
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._under_way = None
            self._known.clear()
            self._staying = set()

    def pack(self, tensor: Tensor) -> Packed | Tensor:
        """Return the graph's replacement for a tensor that is being saved."""
        stash = self._under_way
        storage = self._storage_to_move(tensor)
        if stash is None or storage is None:
            return tensor.detach()
        number = storage._cdata
        known = self._known.get(number)
        memory = None if known is None else known()
        if memory is None:  # a new one, or a reused id
            if not self.active:
                self._staying.add(number)  # shared with other layers
                return tensor.detach()
            memory = _Memory(tensor, storage)
            self._known[number] = ref(memory)
            stash.append(self._known[number])
        return Packed(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Packed | Tensor) -> Tensor:
        """Return that tensor again."""
        if isinstance(packed, Tensor):
            return packed
        memory = packed.memory
        memory.check()
        assert memory.storage is not None, "activations are used while they are on the host"
        tensor = torch.empty(0, dtype=packed.dtype, device=self._torch_device)
        return tensor.set_(memory.storage, packed.offset, packed.size, packed.stride)

    def _storage_to_move(self, tensor: Tensor) -> UntypedStorage | None:
        """None if it stays: it is small, belongs not only to F, or size, stride and offset do not describe it
        completely."""
        if type(tensor) not in _PLAIN or tensor.device.type != self._torch_device.type:
            return None
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        stays = storage.nbytes() < self.smallest_bytes or storage._cdata in self._staying
        return None if stays else storage

    # --- O, D, L -----------------------------------------------------------------------------------------------

    def offload(self, key: StageUnit, label: str = "") -> None:
        """O. label: text of the pass, for `recorded`.

        Raises:
            RunError: the host has no room, unless activations then stay.
        """
        memories: list[_Memory] = []
        slots: list[Slot] = []
        for reference in self._stashes.pop(key):
            memory = reference()
            if memory is None:
                continue
            memory.check()
            slot = self.pool.take(memory.bytes)
            if slot is not None:
                memories.append(memory)
                slots.append(slot)
            elif not self._keep_when_full:
                for reserved in slots:
                    self.pool.give(reserved)
                raise RunError(
                    f"offload: the host has no room for {memory.bytes} bytes of stage {key[0]}, microbatch {key[1]}:"
                    f' {self.pool.used} bytes are used; expected more host_memory, or when_full = "keep"'
                )
        moves = [(memory.storage, slot) for memory, slot in zip(memories, slots, strict=True) if memory.storage]
        moved = self._moved[key] = _Moved(memories, slots, self.copies.out(moves))
        self._record(label, moved.out)

    def give_back(self, key: StageUnit) -> None:
        """D."""
        moved = self._moved[key]
        assert not moved.given_back
        moved.given_back = True
        self.copies.wait(moved.out)
        for memory in moved.memories:
            memory.free()

    def load(self, key: StageUnit, label: str = "") -> None:
        """L. label: text of the pass, for `recorded`."""
        moved = self._moved[key]
        assert moved.given_back and moved.back is None
        moves = []
        for memory, slot in zip(moved.memories, moved.slots, strict=True):
            memory.storage = torch.empty(memory.bytes, dtype=torch.uint8, device=self._torch_device).untyped_storage()
            moves.append((memory.storage, slot))
        moved.back = self.copies.back(moves, moved.out)
        for slot in moved.slots:
            self.pool.give(slot)
        self._record(label, moved.back)

    def ready(self, key: StageUnit) -> None:
        """Make the activations available to B, I or R of that microbatch."""
        moved = self._moved.pop(key)
        assert moved.back is not None
        self.copies.wait(moved.back)

    def _record(self, label: str, ticket: Ticket) -> None:
        if self.recorded is not None:
            self.recorded.append((label, ticket.stamps))

    # --- the step ----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the remains of a failed step, after its copies are over."""
        for moved in self._moved.values():
            for ticket in (moved.out, moved.back):
                if ticket is not None:
                    with suppress(RunError):  # perhaps the reason of the failure
                        self.copies.wait(ticket)
            if moved.back is None:
                for slot in moved.slots:
                    self.pool.give(slot)
        self._moved.clear()
        self._stashes.clear()
        self.active = True

    @property
    def left(self) -> tuple[StageUnit, ...]:
        """Return microbatches with unused activations."""
        return (*self._stashes, *self._moved)


@dataclass(frozen=True, slots=True)
class KeptOnDevice:
    """The `LayerTransform` that keeps the tensors which some layers save on the device."""

    activations: Activations
    numbers: Collection[int]
    """Of these layers."""

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        for index in layers.keys() & self.numbers:
            layers[index].forward = self._staying(layers[index].forward)

    def _staying(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        activations = self.activations

        @functools.wraps(forward)
        def staying(*args: Any, **kwargs: Any) -> Any:
            was_active, activations.active = activations.active, False
            try:
                return forward(*args, **kwargs)
            finally:
                activations.active = was_active

        return staying


def activations_engine(options: OffloadOptions, torch_device: torch.device) -> Activations:
    """Return what moves the activations of a device, as the options say. Raises InputError for a directory on a GPU."""
    keeps = options.when_full == "keep"
    if torch_device.type == "cuda":
        if options.directory is not None:
            raise refused("offload.directory", str(options.directory), "None on a GPU, which copies to pinned memory")
        pool = HostPool(PinnedSlab, options.host_memory, powers=True)
        return Activations(pool, StreamCopies(pool, torch_device, options.streams), torch_device, keep_when_full=keeps)
    directory = None if options.directory is None else Path(options.directory)
    pool = HostPool(lambda size: FileSlab(size, directory), options.host_memory)
    return Activations(pool, FileCopies(pool, options.streams), torch_device, keep_when_full=keeps)
