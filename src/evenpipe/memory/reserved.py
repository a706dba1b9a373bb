"""From bytes of tensors to what a card has given out: rounding, the allocator's rest, libraries for communication.

    tensors      what lives (the replay)
    allocated    in blocks of 512 bytes: `torch.cuda.max_memory_allocated`
    reserved     in segments, some of them partly empty: `torch.cuda.max_memory_reserved`
    process      with the context of the driver and the buffers of every communicator: what the card counts

The first is exact. The others are ranges: what was measured here or published elsewhere, from the least to the most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .framework import MIB, Framework
from .parallelism import Parallelism

BLOCK = 512
"""Bytes: the allocator of torch gives out multiples of it."""
SEGMENT = 2 * MIB
"""It takes multiples of this from the driver."""


@dataclass(frozen=True, slots=True)
class Range:
    """Of bytes, or of a share."""

    least: float
    likely: float
    most: float

    def times(self, factor: float) -> Range:
        return Range(self.least * factor, self.likely * factor, self.most * factor)

    def __add__(self, other: Range) -> Range:
        return Range(self.least + other.least, self.likely + other.likely, self.most + other.most)


NOTHING = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What a process holds beside tensors."""

    context: Range = NOTHING
    """Bytes of the driver's context, with the kernels that are loaded into it."""
    communicator: Range = NOTHING
    """Bytes of one communicator."""
    fragments: Range = NOTHING
    """Of the allocated bytes: what is reserved beyond them."""
    second_stream: Range = NOTHING
    """Bytes, where context parallelism exchanges keys and values beside compute: blocks that another stream has used
    are free for compute only when that stream is done."""


CUDA = Overheads(
    context=Range(450 * MIB, 600 * MIB, 1000 * MIB),
    communicator=Range(300 * MIB, 500 * MIB, 700 * MIB),
    fragments=Range(0.01, 0.04, 0.09),
    second_stream=Range(4000 * MIB, 6000 * MIB, 8000 * MIB),
)
"""PyTorch and NCCL on NVIDIA GPUs."""

HOST = Overheads()
"""Processes on a CPU: tensors alone are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Bytes of one device."""

    allocated: int
    reserved: int
    """Likely."""
    communicators: int
    """How many."""
    process: Range

    @property
    def beside(self) -> Range:
        """What is not allocated."""
        return self.process + Range(-self.allocated, -self.allocated, -self.allocated)


def process_memory(
    tensors: int, overheads: Overheads, *, communicators: int = 0, second_stream: bool = False
) -> ProcessMemory:
    """What a process holds whose tensors are `tensors` bytes at most."""
    on_card = overheads is not HOST
    allocated = _multiple(tensors, BLOCK) if on_card else tensors
    fragments = overheads.fragments.times(allocated)
    reserved = allocated + round(fragments.likely)
    process = Range(allocated, allocated, allocated) + fragments + overheads.context
    process += overheads.communicator.times(communicators)
    if second_stream:
        process += overheads.second_stream
    return ProcessMemory(
        allocated=allocated,
        reserved=_multiple(reserved, SEGMENT) if on_card else reserved,
        communicators=communicators,
        process=process,
    )


def communicators_of(
    device: int, parallelism: Parallelism, framework: Framework, transfers: Mapping[str, Iterable[int]]
) -> int:
    """How many communicators one GPU of a pipeline's device is a member of.

    transfers: members (devices) of those of the program, by name.
    """
    sizes = {"dp": parallelism.dp, "tp": parallelism.tp, "cp": parallelism.cp, "pp": parallelism.pp}
    count = 0
    for axes in framework.groups:
        members = 1
        for axis in axes:
            members *= sizes[axis]
        count += members > 1
    if framework.transfers:
        count += sum(device in members for members in transfers.values())
    return count


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit
