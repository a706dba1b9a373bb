"""What a user says about NCCL: how its kernels share a GPU with compute. And what torch and NCCL are told beside.

NCCL moves data with kernels of its own, on a stream of each communicator, beside the kernels of the passes. Nothing
here has an effect where gloo communicates: on CPUs, and where processes share a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from evenpipe.errors import InputError

MOST_CHANNELS = 64
"""NCCL has no more (MAXCHANNELS in its src/include/device.h), and takes a higher number for this one in silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclOptions:
    """Of every communicator of a pipeline and of its replicas. Neither default has been measured.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    high_priority: bool = True
    """Whether communication that is ready goes before what compute has queued, onto the multiprocessors that become
    free next. True, unlike in torch: another device nearly always waits for a transfer of a pipeline, and it takes as
    much from compute whenever it runs. TORCH_NCCL_HIGH_PRIORITY=1 in the environment means True too."""
    channels: int | None = None
    """The most that a communicator uses, 1 to 64. Each is a thread block that occupies a multiprocessor until its part
    of the data has come and gone, waiting for the peer included: fewer leave more to compute, and take longer for large
    tensors. None: NCCL chooses, by the links that it finds between the GPUs. NCCL_MAX_CTAS in the environment goes
    first. `maxCTAs` of NCCL's `ncclConfig_t`."""

    def __post_init__(self) -> None:
        if not isinstance(self.high_priority, bool):
            raise InputError(f"nccl.high_priority: {self.high_priority!r}, expected True or False")
        if self.channels is not None and (type(self.channels) is not int or not 1 <= self.channels <= MOST_CHANNELS):
            raise InputError(
                f"nccl.channels: {self.channels!r}, expected a whole number from 1 to {MOST_CHANNELS}, or None"
            )

    def of_group(self, timeout: timedelta) -> Any:
        """`pg_options` for a process group of NCCL: for one, since torch writes into it what group it is.

        timeout: that of the group; torch warns if they differ.
        """
        from torch.distributed import ProcessGroupNCCL  # only where torch is built with NCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        options._timeout = timeout
        if self.channels is not None:
            options.config.max_ctas = self.channels
        return options


def quieten() -> None:
    """To be called before groups are made: each reads the environment for itself.

    torch warns of sends outside of batches on groups that are connected from the start, since these wait for all else
    of their communicator, and recommends groups of their own. That is what hops have; and where a user wants fewer, the
    checker of schedules knows that they wait for each other.
    """
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
