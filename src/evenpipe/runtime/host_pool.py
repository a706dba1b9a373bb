"""Memory of the host for what the device has no room for: slots of a few large slabs, used again and again.

    PinnedSlab    locked pages, which a GPU copies to and from beside its compute
    FileSlab      a part of a file without a name: its pages belong to no process, so that resident memory falls

Sizes that come again in every step find the slots of the step before. Neighbouring free slots become one, so that other
sizes fit too. One pool serves all stages of a device, and is no larger than it is allowed to be.

What is there for the whole run, and all sizes known before, needs no pool: `carve` cuts it out of pinned slabs.
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
from typing import IO, Protocol

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


def any_size(size: int, room: int | None) -> int | None:
    """Bytes of a new slab that holds so many, within the room there is; None where that is too little."""
    if room is None:
        return max(size, SLAB)
    return min(max(size, SLAB), room) if size <= room else None


def power_of_two(size: int, room: int | None) -> int | None:
    """The same for a `PinnedSlab`."""
    least = _power_from(size)
    if room is None:
        return max(least, SLAB)
    return min(max(least, SLAB), 1 << (room.bit_length() - 1)) if least <= room else None


def _power_from(size: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (size - 1).bit_length()


class HostPool:
    """Slots of a device.

    Args:
        make: makes a slab of so many bytes.
        limit: bytes of all slabs; None: as many as there are.
        slab_size: of a new slab, from the bytes that it has to hold and the room there is.
    """

    def __init__(
        self,
        make: Callable[[int], Slab],
        limit: int | None = None,
        slab_size: Callable[[int, int | None], int | None] = any_size,
    ) -> None:
        self._make, self._limit, self._slab_size = make, limit, slab_size
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
        size = _in_pages(size)
        slot = self._fit(size)
        if slot is None:
            room = None if self._limit is None else (self._limit - self.size) // PAGE * PAGE
            wanted = self._slab_size(size, room)
            if wanted is None:
                return None
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


def carve(sizes: Sequence[int]) -> tuple[list[int], list[Slot]]:
    """Slabs for things that stay, and a slot of theirs for each.

    Each slab is the power of two of which the things that are left, the largest first, leave the least free: always
    more than half of it is taken. What fits into `SLAB` at the end shares one.

    Returns: the sizes of the slabs, and a slot for each of the `sizes`.
    """
    pages = [_in_pages(size) for size in sizes]
    left = sorted(range(len(sizes)), key=lambda index: -pages[index])
    slabs: list[int] = []
    slots: dict[int, Slot] = {}
    while left:
        least, most = _power_from(pages[left[0]]), _power_from(sum(pages[index] for index in left))
        powers = [most] if most <= SLAB else [1 << bit for bit in range(least.bit_length() - 1, most.bit_length())]
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
    """Those that still fit, in their order."""
    chosen = []
    for index in left:
        if pages[index] <= room:
            chosen.append(index)
            room -= pages[index]
    return chosen


def _in_pages(size: int) -> int:
    return max(PAGE, -(-size // PAGE) * PAGE)


class PinnedSlab:
    """Locked pages: a power of two, since torch's allocator would round up to one and lock what nobody asked for."""

    def __init__(self, size: int) -> None:
        assert size == _power_from(size), f"{size} bytes are no power of two"
        self.size = size
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def view(self, slot: Slot, size: int) -> torch.Tensor:
        """[size] uint8: the first bytes of a slot."""
        return self._bytes[slot.offset : slot.offset + size]


def unnamed_file(size: int, directory: str | Path | None, option: str) -> IO[bytes]:
    """A file of so many bytes that has no name, and so no traces: it is gone with the process.

    All of its room is taken at once. In a file with holes a copy would fail later for want of room, and a process that
    has mapped it would die of SIGBUS.

    Args:
        directory: where; None: the system's directory for temporary files.
        option: what the user calls the directory.

    Raises:
        InputError: there is no such directory, or no room for the file in it.
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
                _write_zeros(file, size)  # a file system that takes room only for what is written
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
    """A file without a name in `directory`."""

    def __init__(self, size: int, directory: Path | None = None) -> None:
        """Raises InputError where there is no such directory, or no room for the file in it."""
        self.size = size
        self._file = unnamed_file(size, directory, "offload.directory")

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
