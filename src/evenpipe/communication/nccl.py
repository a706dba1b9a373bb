"""Options of NCCL: how its kernels share a GPU with compute.

NCCL moves data with its own kernels, on a stream per communicator, beside the kernels of the passes. These options have
no effect with gloo: on CPUs, and if processes share a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Annotated, Any

from annotated_types import Ge, Le

from evenpipe.declaration import declare
from evenpipe.processes.environment import default_variable

MOST_CHANNELS = 64
"""NCCL has no more (MAXCHANNELS in its src/include/device.h), and silently reduces a higher number to this."""


@declare("nccl")
class NcclOptions:
    """For every communicator of a pipeline and of its replicas. Neither default has been measured.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    high_priority: bool = True
    """Whether ready communication runs before queued compute, on the multiprocessors that become free next. True,
    unlike in torch: another device nearly always waits for a transfer of a pipeline, and it costs compute the same
    whenever it runs. TORCH_NCCL_HIGH_PRIORITY=1 in the environment also means True."""
    channels: Annotated[int, Ge(1), Le(MOST_CHANNELS)] | None = None
    """Most channels of a communicator, 1 to 64. Each is a thread block that occupies a multiprocessor until its part of
    the data is transferred, including the wait for the peer: fewer channels leave more to compute, but take longer for
    large tensors. None: NCCL chooses, by the links between the GPUs. NCCL_MAX_CTAS in the environment takes precedence.
    `maxCTAs` of NCCL's `ncclConfig_t`."""

    def of_group(self, timeout: timedelta) -> Any:
        """Return `pg_options` for one NCCL process group; not shared, since torch writes into them which group it is.

        timeout: of the group; torch warns if they differ.
        """
        from torch.distributed import ProcessGroupNCCL  # exists only if torch is built with NCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        options._timeout = timeout
        if self.channels is not None:
            options.config.max_ctas = self.channels
        return options


def quietly() -> AbstractContextManager[None]:
    """Silence a warning of torch about groups that are made within: each reads the environment then.

    torch warns about unbatched sends on eagerly connected groups, because these wait for all other operations of their
    communicator, and recommends separate groups. Hops have separate groups by default; if a user wants fewer, the
    checker of schedules knows that they wait for each other.
    """
    return default_variable("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
