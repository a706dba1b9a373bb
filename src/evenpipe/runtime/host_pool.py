"""Memory of the host for what the device has no room for: slots of a few large slabs, used again and again.

    PinnedSlab    locked pages, which a GPU copies to and from beside its compute
    FileSlab      a part of a file without a name: its pages belong to no process, so that resident memory falls

Sizes that come again in every step find the slots of the step before. Neighbouring free slots become one, so that other
sizes fit too. One pool serves all stages of a device, and is no larger than it is allowed to be.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from evenpipe.errors import InputError

PAGE = 4096
"""Bytes. Slots begin and end with pages."""
SLAB = 64 * 2**20
"""Bytes: the smallest slab, where the limit leaves room for one."""


class Slab(Protocol):
    """One piece of memory of the host."""

    size: int


@dataclass(slots=True, eq=False)
class Slot:
    """A stretch of a slab."""

    slab: int
    """Its number in the pool."""
    offset: int
    size: int
    """Bytes: whole pages."""


class HostPool:
    """Slots of a device.

    Args:
        make: makes a slab of so many bytes.
        limit: bytes of all slabs; None: as many as there are.
    """

    def __init__(self, make: Callable[[int], Slab], limit: int | None = None) -> None:
        self._make, self._limit = make, limit
        self.slabs: list[Slab] = []
        self._free: list[list[tuple[int, int]]] = []
        """By slab: first byte and first byte behind of each free stretch, in order, no two of them touching."""
        self.used = self.most_used = 0
        """Bytes of slots that are taken, now and at most."""

    @property
    def size(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.size for slab in self.slabs)

    def take(self, size: int) -> Slot | None:
        """A slot for so many bytes; None where the limit leaves no room."""
        size = max(PAGE, -(-size // PAGE) * PAGE)
        slot = self._fit(size)
        if slot is None:
            room = None if self._limit is None else (self._limit - self.size) // PAGE * PAGE
            if room is not None and room < size:
                return None
            wanted = max(size, SLAB) if room is None else min(max(size, SLAB), room)
            self.slabs.append(self._make(wanted))
            self._free.append([(0, wanted)])
            slot = self._fit(size)
            assert slot is not None
        self.used += size
        self.most_used = max(self.most_used, self.used)
        return slot

    def give(self, slot: Slot) -> None:
        """The slot is free: nobody reads or writes it any more."""
        free, first, last = self._free[slot.slab], slot.offset, slot.offset + slot.size
        at = bisect_left(free, (first, last))
        if at < len(free) and free[at][0] == last:
            last = free.pop(at)[1]
        if at and free[at - 1][1] == first:
            first = free.pop(at - 1)[0]
        insort(free, (first, last))
        self.used -= slot.size

    def _fit(self, size: int) -> Slot | None:
        """The smallest free stretch that is large enough."""
        found: tuple[int, int, int] | None = None
        for number, free in enumerate(self._free):
            for first, last in free:
                if last - first >= size and (found is None or last - first < found[0]):
                    found = (last - first, number, first)
        if found is None:
            return None
        _, number, first = found
        free = self._free[number]
        at = next(index for index, stretch in enumerate(free) if stretch[0] == first)
        last = free[at][1]
        free[at : at + 1] = [(first + size, last)] if first + size < last else []
        return Slot(number, first, size)


class PinnedSlab:
    """Locked pages. torch rounds them up to a power of two, so slabs are powers of two already, but the last one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def view(self, slot: Slot, size: int) -> torch.Tensor:
        """[size] uint8: the first bytes of a slot."""
        return self._bytes[slot.offset : slot.offset + size]


class FileSlab:
    """A file in `directory` that has no name, and so no traces: it is gone with the process."""

    def __init__(self, size: int, directory: Path | None = None) -> None:
        """Raises InputError where there is no such directory, or no room for the file in it."""
        self.size = size
        where = Path(tempfile.gettempdir()) if directory is None else directory
        try:
            self._file = tempfile.TemporaryFile(prefix="evenpipe-", dir=where)  # noqa: SIM115  (lives as long as this)
            os.posix_fallocate(self._file.fileno(), 0, size)  # so that no copy fails for want of room
        except OSError as error:
            raise InputError(
                f"offload.directory: {str(where)!r}, no file of {size} bytes can be made there: {error.strerror}"
            ) from None

    def write(self, slot: Slot, address: int, size: int) -> None:
        """Copies so many bytes from an address into a slot."""
        self._whole(os.pwritev, address, size, slot.offset)

    def read(self, slot: Slot, address: int, size: int) -> None:
        """Copies them back, to an address."""
        self._whole(os.preadv, address, size, slot.offset)

    def _whole(self, move: Callable[..., int], address: int, size: int, offset: int) -> None:
        memory = memoryview((ctypes.c_char * size).from_address(address))
        done = 0
        while done < size:  # the system moves 2 GiB at a time at most
            moved = move(self._file.fileno(), [memory[done:]], offset + done)
            if moved <= 0:
                raise OSError(f"the file for activations ends at {offset + done}")
            done += moved
