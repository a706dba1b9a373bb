"""Converts bytes of tensors to the memory in use on a GPU: rounding, the allocator's overhead, communication
libraries.

    tensors      live bytes (the replay)
    allocated    in blocks of 512 bytes: `torch.cuda.max_memory_allocated`
    reserved     in segments, some of them partly empty: `torch.cuda.max_memory_reserved`
    process      with the context of the driver and the buffers of every communicator: as the GPU counts it

The first is exact. The others are ranges, from the smallest to the largest value measured here or published elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from evenpipe.costs.hardware import Hardware
from evenpipe.recipe.parallelism import Parallelism

from .framework import MIB, Framework

BLOCK = 512
"""torch's allocator gives out multiples of this many bytes."""
SEGMENT = 2 * MIB
"""The allocator takes multiples of this many bytes from the driver."""

Verdict = Literal["fits", "at risk", "does not fit"]
"""Whether it fits, from best to worst."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of bytes, or of a share."""

    low: float
    likely: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.likely * factor, self.high * factor)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.likely + other.likely, self.high + other.high)


NOTHING = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Memory of a process besides tensors."""

    context: Range = NOTHING
    """Bytes of the driver's context, with its loaded kernels."""
    communicator: Range = NOTHING
    """Bytes of a communicator."""
    fragments: Range = NOTHING
    """Reserved beyond the allocated bytes, as a share of them."""
    context_parallel: Range = NOTHING
    """Bytes for context parallelism: buffers for sends and receives, and blocks used by another stream, which compute
    can reuse only after that stream is done."""


CUDA = Overheads(
    context=Range(600 * MIB, 800 * MIB, 1000 * MIB),
    communicator=Range(544 * MIB, 616 * MIB, 688 * MIB),
    fragments=Range(0.05, 0.06, 0.09),
    context_parallel=Range(6350 * MIB, 7400 * MIB, 8500 * MIB),
)
"""PyTorch and NCCL on NVIDIA GPUs.

context: 300 to 500 MB bare (the paper's authors), and the kernels of attention, products and communication.
communicator: of 2 and of more GPUs on 4 A100 (NVIDIA/nccl #964). Others report 0.5 to 4 GB, by version and network.
fragments: in 17 published layouts on B200 (SimuMax, 2 steps each) the fullest GPU reserved 2 to 9 % more than was
    allocated, 4 % in the median. The lower end is fitted: with 5 % the published runs on A100 that failed without
    context parallelism do not fit.
context_parallel: fitted to the published runs on A100 with 40 GB (`okoge-kaz/Megatron-LM`, TE 1.x, NCCL 2.17, without
    TORCH_NCCL_AVOID_RECORD_STREAMS), where equal layouts with and without it differ by this much. NCCL's buffers for
    sends and receives alone are reported at 1 to 4.3 GB (NVIDIA/nccl #1685). The same authors' runs on H100, whose
    scripts load NCCL 2.21, need less than the upper end: 6 of 52 that ran with context parallelism are called at risk.
    How much less is not known, since all that failed lack memory without any of it: another range would be a guess.
"""

TODAY = replace(CUDA, context_parallel=Range(1024 * MIB, 4300 * MIB, 8500 * MIB))
"""The same on known hardware, with a later NCCL: its buffers alone (NVIDIA/nccl #1685), up to what the older version
needs. Llama 3 405B ran with context ranks on 576 H100, with at most 5.8 GiB for them (NVIDIA/dgxc-benchmarking
25.02)."""

HOST = Overheads()
"""Processes on a CPU: only tensors are counted."""


MORE_CONTEXT = 200 * MIB
"""A context may exceed the measurement by this much, with kernels that were not loaded then."""


def overheads_of(hardware: Hardware | None) -> Overheads:
    """Return the overheads of hardware, with its measured context; None: of some NVIDIA GPU with NCCL 2.17."""
    if hardware is None:
        return CUDA
    if hardware.torch_device == "cpu":
        return HOST
    if not hardware.context_bytes:
        return TODAY
    measured = hardware.context_bytes
    return replace(TODAY, context=Range(measured, measured, measured + MORE_CONTEXT))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Bytes of a device."""

    allocated: int
    reserved: int
    """The likely value."""
    communicators: int
    """Number of communicators."""
    process: Range
    """Everything that the GPU counts for the process."""


def process_memory(
    tensors: int, overheads: Overheads, *, communicators: int = 0, context_parallel: bool = False
) -> ProcessMemory:
    """Return the memory of a process whose tensors take at most `tensors` bytes."""
    on_card = overheads is not HOST
    allocated = _multiple(tensors, BLOCK) if on_card else tensors
    fragments = overheads.fragments.times(allocated)
    reserved = allocated + round(fragments.likely)
    process = Range(allocated, allocated, allocated) + fragments + overheads.context
    process += overheads.communicator.times(communicators)
    if context_parallel:
        process += overheads.context_parallel
    return ProcessMemory(
        allocated=allocated,
        reserved=_multiple(reserved, SEGMENT) if on_card else reserved,
        communicators=communicators,
        process=process,
    )


def verdict_of(process: ProcessMemory, memory: int) -> Verdict:
    """Return the verdict for one device on a GPU with `memory` bytes.

    "fits": even if everything besides tensors is as large as the largest value seen. "does not fit": not even if it is
    as small as the smallest. "at risk": in between.
    """
    if process.process.high <= memory:
        return "fits"
    return "does not fit" if process.process.low > memory else "at risk"


def communicators_of(parallelism: Parallelism, framework: Framework, transfers: int, *, vocabulary: bool) -> int:
    """Return the number of communicators that one GPU is a member of.

    transfers: communicators of the program that its device is a member of.
    vocabulary: whether all devices share the rows of the vocabulary layers.
    """
    sizes = {"dp": parallelism.dp, "tp": parallelism.tp, "cp": parallelism.cp, "pp": parallelism.pp}
    axes = list(framework.groups)
    if framework.transfers and parallelism.tp > 1:  # rows that are cut along several axes
        axes += [("pp", "tp")] * vocabulary + [("dp", "cp", "tp")] * (parallelism.zero == 3)
    long = [frozenset(axis for axis in group if sizes[axis] > 1) for group in axes]
    # Our runtime makes only one communicator for the same processes.
    count = len({*filter(None, long)}) if framework.transfers else sum(map(bool, long))
    if parallelism.ep > 1:  # the members of a group, and the same member of all groups
        count += 1 + (parallelism.replicas > parallelism.ep)
    count += parallelism.shards < parallelism.replicas
    if framework.transfers:
        count += transfers
    return count


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit
