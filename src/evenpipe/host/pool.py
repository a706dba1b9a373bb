"""Host memory for data that does not fit on the device: slots of a few large slabs, which are reused.

    PinnedSlab    pinned pages, which a GPU copies to and from beside its compute
    FileSlab      a part of an unnamed file: its pages do not count as memory of the process, so resident memory falls

Sizes that recur in every step reuse the slots of the previous step. Neighbouring free slots are merged, so that other
sizes fit too. One pool serves all stages of a device, within a size limit.

Permanent data of known sizes needs no pool: `carve` places it in pinned slabs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from evenpipe.errors import InputError
from evenpipe.recipe.offload import PAGE

SLAB = 64 * 2**20
"""Bytes of the smallest slab, if the limit leaves room for one."""


@dataclass(slots=True, eq=False)
class Slot:
    """A range of a slab."""

    slab: int
    """Its number in the pool."""
    offset: int
    size: int
    """Bytes: whole pages."""


def slab_size(size: int, room: int | None, *, powers: bool) -> int | None:
    """Return the bytes of a new slab for this many, within the available room; None if that is too small.

    powers: a power of two, for a `PinnedSlab`.
    """
    minimum = _power_from(size) if powers else size
    if room is None:
        return max(minimum, SLAB)
    maximum = 1 << (room.bit_length() - 1) if powers and room else room
    return min(max(minimum, SLAB), maximum) if minimum <= maximum else None


def _power_from(size: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


class HostPool:
    """Slots of a device.

    `make` makes a slab of a given number of bytes, with `powers` always a power of two; `limit`: most bytes of all
    slabs, None: no limit.
    """

    def __init__(self, make: Callable[[int], Slab], limit: int | None = None, *, powers: bool = False) -> None:
        self._make, self._limit, self._powers = make, limit, powers
        self.slabs: list[Slab] = []
        self._free: list[list[tuple[int, int]]] = []
        """By slab: (start, end) of each free range, sorted, no two of them touching."""
        self.used = self.most_used = 0
        """Bytes of used slots, now and at most."""

    @property
    def size(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.size for slab in self.slabs)

    def take(self, size: int) -> Slot | None:
        """Return a slot of this many bytes; None if the limit leaves no room."""
        size = _in_pages(size)
        slot = self._fit(size)
        if slot is None:
            room = None if self._limit is None else (self._limit - self.size) // PAGE * PAGE
            slab_bytes = slab_size(size, room, powers=self._powers)
            if slab_bytes is None:
                return None
            self.slabs.append(self._make(slab_bytes))
            self._free.append([(0, slab_bytes)])
            slot = self._fit(size)
            assert slot is not None
        self.used += size
        self.most_used = max(self.most_used, self.used)
        return slot

    def give(self, slot: Slot) -> None:
        """Free a slot that is no longer read or written."""
        free, first, last = self._free[slot.slab], slot.offset, slot.offset + slot.size
        at = bisect_left(free, (first, last))
        if at < len(free) and free[at][0] == last:
            last = free.pop(at)[1]
        if at and free[at - 1][1] == first:
            first = free.pop(at - 1)[0]
        insort(free, (first, last))
        self.used -= slot.size

    def _fit(self, size: int) -> Slot | None:
        """Return the smallest free range that is large enough."""
        best: tuple[int, int, int] | None = None
        for number, free in enumerate(self._free):
            for first, last in free:
                if last - first >= size and (best is None or last - first < best[0]):
                    best = (last - first, number, first)
        if best is None:
            return None
        _, number, first = best
        free = self._free[number]
        at = next(index for index, stretch in enumerate(free) if stretch[0] == first)
        last = free[at][1]
        free[at : at + 1] = [(first + size, last)] if first + size < last else []
        return Slot(number, first, size)


def carve(sizes: Sequence[int]) -> tuple[list[int], list[Slot]]:
    """Return the sizes of slabs for permanent data, and a slot for each item.

    Each slab is the power of two that the remaining items, the largest first, fill best: always more than half of it is
    used. The last items that fit into `SLAB` share one.
    """
    pages = [_in_pages(size) for size in sizes]
    left = sorted(range(len(sizes)), key=lambda index: -pages[index])
    slabs: list[int] = []
    slots: dict[int, Slot] = {}
    while left:
        smallest, largest = _power_from(pages[left[0]]), _power_from(sum(pages[index] for index in left))
        powers = (
            [largest]
            if largest <= SLAB
            else [1 << bit for bit in range(smallest.bit_length() - 1, largest.bit_length())]
        )
        filled = {power: _filled(power, left, pages) for power in reversed(powers)}
        slab = max(filled, key=lambda power: sum(pages[index] for index in filled[power]) / power)
        offset = 0
        for index in filled[slab]:
            slots[index] = Slot(len(slabs), offset, pages[index])
            offset += pages[index]
        slabs.append(slab)
        left = [index for index in left if index not in slots]
    return slabs, [slots[index] for index in range(len(sizes))]


def _filled(room: int, left: Sequence[int], pages: Sequence[int]) -> list[int]:
    """Return the items that still fit, in order."""
    chosen = []
    for index in left:
        if pages[index] <= room:
            chosen.append(index)
            room -= pages[index]
    return chosen


def _in_pages(size: int) -> int:
    return max(PAGE, -(-size // PAGE) * PAGE)


class PinnedSlab:
    """Pinned pages: a power of two, because torch's allocator would round up to one and pin unused memory."""

    def __init__(self, size: int) -> None:
        assert size == _power_from(size), f"{size} bytes is not a power of two"
        self.size = size
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def view(self, slot: Slot, size: int) -> torch.Tensor:
        """Return [size] uint8: the first bytes of a slot."""
        return self._bytes[slot.offset : slot.offset + size]


def unnamed_file(size: int, directory: str | Path | None, option: str) -> IO[bytes]:
    """Return an unnamed file of this many bytes, which disappears with the process.

    All of its space is allocated at once. In a sparse file a copy could fail later because the disk is full, and a
    process that has mapped it would die of SIGBUS.

    directory: its place; None: the system's directory for temporary files. option: the user's name of the directory.

    Raises InputError if there is no such directory, or not enough space in it.
    """
    where = tempfile.gettempdir() if directory is None else str(directory)
    with contextlib.ExitStack() as on_failure:
        try:
            file = on_failure.enter_context(tempfile.TemporaryFile(prefix="evenpipe-", dir=where))
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                _write_zeros(file, size)  # a file system that allocates space only when it is written
        except OSError as error:
            raise InputError(
                f"{option}: {where!r}, no file of {size} bytes can be made there: {error.strerror}"
            ) from None
        on_failure.pop_all()
    return file


def _write_zeros(file: IO[bytes], size: int) -> None:
    zeros = bytes(min(size, 2**20))
    for start in range(0, size, len(zeros)):
        file.write(zeros[: size - start])
    file.flush()


class FileSlab:
    """An unnamed file in `directory`."""

    def __init__(self, size: int, directory: Path | None = None) -> None:
        """Raises InputError if there is no such directory, or not enough space in it."""
        self.size = size
        self._file = unnamed_file(size, directory, "offload.directory")

    def write(self, slot: Slot, address: int, size: int) -> None:
        """Copy this many bytes from an address into a slot."""
        self._whole(os.pwritev, address, size, slot.offset)

    def read(self, slot: Slot, address: int, size: int) -> None:
        """Copy them back to an address."""
        self._whole(os.preadv, address, size, slot.offset)

    def _whole(self, move: Callable[..., int], address: int, size: int, offset: int) -> None:
        memory = memoryview((ctypes.c_char * size).from_address(address))
        transferred = 0
        while transferred < size:  # the system moves at most 2 GiB at a time
            moved = move(self._file.fileno(), [memory[transferred:]], offset + transferred)
            if moved <= 0:
                raise OSError(f"the file for activations ends at {offset + transferred}")
            transferred += moved


Slab = PinnedSlab | FileSlab
