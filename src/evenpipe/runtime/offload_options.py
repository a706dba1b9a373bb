"""What a user says about moving activations to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from evenpipe.errors import InputError
from evenpipe.given import shown
from evenpipe.runtime.copies import FileCopies, StreamCopies
from evenpipe.runtime.host_pool import PAGE, FileSlab, HostPool, PinnedSlab, power_of_two
from evenpipe.runtime.offload import Activations
from evenpipe.schedule.costs import ASSUMED_COPY, Cost
from evenpipe.schedule.planning import check_offload

LAYER_CHOICES = ("offload", "keep")

MOST_BYTES = 2**63
"""8 EiB, what a system can count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Which activations go to the host, and what they find there.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    activations: str | float = "scheduled"
    """"scheduled": what the order says, as those of "po-h" and "po-f" do. "none": nothing. "free": all that lowers the
    memory of a device and costs no time. "all": whatever it takes to hold as little as can be. A number: what it takes
    to hold no more bytes than that, as `Pipeline`'s costs count them."""
    copy_time: float | Sequence[float] = ASSUMED_COPY
    """Of what a stage keeps of a microbatch, to the host or back, over its forward and backward together; one number,
    or one per stage. Copies are arranged by it where `Pipeline`'s costs do not say how long they take.
    `evenpipe plan --offload` finds it."""
    layers: str | Sequence[str] = "offload"
    """What that means for the layers of a stage: "offload" moves what a layer keeps for its backward, "keep" leaves it
    on the device; one of these for all layers of the model, or one per layer. With checkpointing a layer keeps less:
    with "full" only its input is moved."""
    host_memory: int | None = None
    """Bytes of the host that one device may take; None: as many as it needs. A GPU takes them in powers of two, each of
    them at least as large as what lies in it."""
    when_full: str = "error"
    """What happens when they are taken: "error", or "keep" on the device what does not fit."""
    directory: str | Path | None = None
    """On the CPU: where the file is made that activations are written to; it has no name, and is gone with the process.
    None: the system's directory for temporary files."""
    streams: int = 1
    """1: copies to the host and back take turns. 2: each direction has a stream of its own."""

    def __post_init__(self) -> None:
        check_offload(self.activations)
        for time in self.copy_times if isinstance(self.copy_times, tuple) else (self.copy_times,):
            if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
                raise InputError(f"offload.copy_time: {self.copy_time!r}, expected numbers of at least 0")
        if self.when_full not in ("error", "keep"):
            raise InputError(f"offload.when_full: {self.when_full!r}, expected 'error' or 'keep'")
        if self.streams not in (1, 2) or isinstance(self.streams, bool):
            raise InputError(f"offload.streams: {self.streams!r}, expected 1 or 2")
        size = self.host_memory
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not PAGE <= size < MOST_BYTES):
            raise InputError(
                f"offload.host_memory: {shown(size)}, expected whole bytes, at least {PAGE} and less than 8 EiB"
            )

    @property
    def copy_times(self) -> Cost:
        """`copy_time` as costs have it."""
        given = self.copy_time
        return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else given

    def of_layers(self, layers: int) -> tuple[str, ...]:
        """One choice for each layer of the model. Raises InputError for an unknown one, or for too many or too few."""
        given = self.layers
        choices = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,) * layers
        for choice in choices:
            if choice not in LAYER_CHOICES:
                accepted = " or ".join(repr(one) for one in LAYER_CHOICES)
                raise InputError(f"offload.layers: {choice!r}, expected {accepted}, or one of these per layer")
        if len(choices) != layers:
            raise InputError(f"offload.layers: {len(choices)} choices, expected one for each of the {layers} layers")
        return choices

    def engine(self, torch_device: torch.device) -> Activations:
        """What moves activations of a device. Raises InputError for a directory on a GPU."""
        keeps = self.when_full == "keep"
        if torch_device.type == "cuda":
            if self.directory is not None:
                raise InputError(
                    f"offload.directory: {str(self.directory)!r}, expected None on a GPU: it copies to locked memory"
                )
            pool = HostPool(PinnedSlab, self.host_memory, power_of_two)
            return Activations(pool, StreamCopies(pool, torch_device, self.streams), torch_device, keep_when_full=keeps)
        directory = None if self.directory is None else Path(self.directory)
        pool = HostPool(lambda size: FileSlab(size, directory), self.host_memory)
        return Activations(pool, FileCopies(pool, self.streams), torch_device, keep_when_full=keeps)
