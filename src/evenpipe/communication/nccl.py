"""Options of NCCL: how its kernels share a GPU with compute.

NCCL moves data with its own kernels, on a stream per communicator, in parallel with the kernels of the passes. These
options have no effect with gloo: on CPUs, and if processes share a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Annotated, Any

from annotated_types import Ge, Le

from evenpipe.declaration import declare
from evenpipe.processes.environment import default_variables
from evenpipe.words import refused

MAX_CHANNELS = 64
"""NCCL's limit (MAXCHANNELS in its src/include/device.h), to which it silently reduces higher numbers."""
DEFAULT_CHANNELS = 32
"""Most channels counted for a communicator for which NCCL chooses them (`NCCL_MAX_CTAS` in its documentation)."""
CHANNELS = {"F": 4, "B": 4, "SMALL": 1, "STATISTICS": 1, "LARGE": 8, "X": 8, "DX": 8, "ROWS": 8, "ALL": 8}
"""Default channels of the communicators of programs, by their names up to a colon. Transfers of a program are issued
early and hold their channels until the peer arrives, so they get few.

Hops: NCCL itself uses 2 for each peer on a network; "4 might give a performance benefit", and more "would probably be
an overkill" (its maintainers, NVIDIA/nccl #1424). Large collectives run beside passes: two per network card come near
its bandwidth (#438), and a node has up to 8 cards. Not measured by us yet.
"""
COMPUTE_SHARE = 0.75
"""Share of a GPU's multiprocessors that waiting transfers of a program should leave to compute."""


@declare("nccl")
class NcclOptions:
    """For every communicator of a pipeline and of its replicas. Neither default has been measured.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    high_priority: bool = True
    """Whether ready communication runs before queued compute, on the multiprocessors that become free next. True,
    unlike in torch: another device nearly always waits for a transfer of a pipeline, and it costs compute the same
    whenever it runs. TORCH_NCCL_HIGH_PRIORITY=1 in the environment also means True."""
    channels: Annotated[int, Ge(1), Le(MAX_CHANNELS)] | None = None
    """Most channels of a communicator, 1 to 64. Each is a thread block that occupies a multiprocessor until its part of
    the data is transferred, including the wait for the peer: fewer channels leave more to compute, but take longer for
    large tensors. None: 1 to 8 for transfers of the pipeline (`CHANNELS`); for all others NCCL chooses, by the links
    between the GPUs. NCCL_MAX_CTAS in the environment takes precedence. `maxCTAs` of NCCL's `ncclConfig_t`."""

    def channels_of(self, name: str) -> int | None:
        """Return the most channels of a communicator; None: NCCL chooses."""
        return self.channels if self.channels is not None else CHANNELS.get(name.partition(":")[0])

    def of_group(self, name: str, timeout: timedelta) -> Any:
        """Return `pg_options` for one NCCL process group; not shared, since torch writes the group into them.

        name: of the communicator.
        timeout: of the group; torch warns if they differ.
        """
        from torch.distributed import ProcessGroupNCCL  # exists only if torch is built with NCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        options._timeout = timeout
        if (channels := self.channels_of(name)) is not None:
            options.config.max_ctas = channels
        return options

    def check_channels(self, names: Sequence[str], multiprocessors: int) -> str | None:
        """Check how many multiprocessors transfers of a program may occupy while they wait for other processes.

        A communicator runs one kernel at a time (they are queued on one stream), so at most one of each waits at once,
        on all of its channels. If those of the program leave room for an exchange within a pass, the passes that they
        wait for can always run: no order of arrival can deadlock.

        names: of all communicators of this process.
        multiprocessors: of its GPU.

        Returns:
            A warning if they leave too little for compute; else None.

        Raises:
            InputError: they could occupy the whole GPU.
        """
        limit = os.environ.get("NCCL_MAX_CTAS", "")
        held = {name: int(limit) if limit.isdecimal() else self.channels_of(name) or DEFAULT_CHANNELS for name in names}
        of_program = sum(channels for name, channels in held.items() if _is_of_program(name))
        in_passes = max((channels for name, channels in held.items() if not _is_of_program(name)), default=0)
        occupied = f"{of_program} of {multiprocessors} multiprocessors while they wait for other processes"
        if of_program + in_passes > multiprocessors:
            at_most = f"fewer, or communicators that are shared: transfers of the pipeline may occupy {occupied}"
            raise refused("nccl.channels", self.channels, at_most)
        if of_program > multiprocessors * (1 - COMPUTE_SHARE):
            return f"transfers of the pipeline may occupy {occupied}; share communicators, or give them fewer channels"
        return None


def _is_of_program(name: str) -> bool:
    return name.partition(":")[0] in CHANNELS


def without_p2p_warning() -> AbstractContextManager[None]:
    """Silence a warning of torch about the groups created within the context, when each reads the environment.

    torch warns about unbatched sends on eagerly connected groups, because they wait for all other operations of their
    communicator, and recommends separate groups. Hops have separate groups by default; if a user wants fewer, the
    schedule checker knows that they wait for each other.
    """
    return default_variables(TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING="false")
