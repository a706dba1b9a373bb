"""The engine that moves a device's activations to the host, as its options say."""

from __future__ import annotations

from pathlib import Path

import torch

from evenpipe.errors import InputError
from evenpipe.host.copies import FileCopies, StreamCopies
from evenpipe.host.offload import Activations
from evenpipe.host.pool import FileSlab, HostPool, PinnedSlab, power_of_two
from evenpipe.recipe.offload import OffloadOptions


def activations_engine(options: OffloadOptions, torch_device: torch.device) -> Activations:
    """Return the engine of a device. Raises InputError for a directory on a GPU."""
    keeps = options.when_full == "keep"
    if torch_device.type == "cuda":
        if options.directory is not None:
            raise InputError(
                f"offload.directory: {str(options.directory)!r}, expected None on a GPU, which copies to pinned memory"
            )
        pool = HostPool(PinnedSlab, options.host_memory, power_of_two)
        return Activations(pool, StreamCopies(pool, torch_device, options.streams), torch_device, keep_when_full=keeps)
    directory = None if options.directory is None else Path(options.directory)
    pool = HostPool(lambda size: FileSlab(size, directory), options.host_memory)
    return Activations(pool, FileCopies(pool, options.streams), torch_device, keep_when_full=keeps)
