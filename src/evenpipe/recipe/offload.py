"""Options for moving activations to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpipe.errors import InputError
from evenpipe.given import shown
from evenpipe.schedule.costs import ASSUMED_COPY, Cost
from evenpipe.schedule.planning import check_offload
from evenpipe.words import count

LAYER_CHOICES = ("offload", "keep")

PAGE = 4096
"""Bytes; host memory is allocated in whole pages."""

MOST_BYTES = 2**63
"""8 EiB, the most bytes that a system can count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Which activations go to the host, and the memory that they use there.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    activations: str | float = "scheduled"
    """"scheduled": the activations that the order moves, as in "po-h" and "po-f". "none": no activations. "free": all
    that lower the peak of a device without costing time. "all": enough to reach the lowest possible peak. A number:
    enough to stay below that many bytes, with the sizes of `Pipeline`'s costs."""
    copy_time: Cost = ASSUMED_COPY
    """Time of one copy, to the host or back, of the activations of a stage and microbatch, relative to its forward and
    backward together; one number, or one per stage. Arranges copies if `Pipeline`'s costs do not give their time.
    `evenpipe plan --offload` computes it."""
    layers: str | tuple[str, ...] = "offload"
    """"offload" moves the activations that a layer keeps for its backward, "keep" leaves them on the device; one choice
    for all layers of the model, or one per layer. With checkpointing a layer keeps less: with "full" only its input is
    moved."""
    host_memory: int | None = None
    """Most bytes of host memory per device; None: as many as needed. A GPU allocates them in powers of two, each at
    least as large as its content."""
    when_full: str = "error"
    """If host memory is full: "error", or "keep" the rest on the device."""
    directory: str | Path | None = None
    """On the CPU: the directory of the file for activations, which has no name and disappears with the process. None:
    the system's directory for temporary files."""
    streams: int = 1
    """1: copies to the host and back take turns. 2: each direction has its own stream."""

    def __post_init__(self) -> None:
        for name in ("copy_time", "layers"):
            given = getattr(self, name)
            if isinstance(given, Sequence) and not isinstance(given, str):
                object.__setattr__(self, name, tuple(given))
        check_offload(self.activations)
        for time in self.copy_time if isinstance(self.copy_time, tuple) else (self.copy_time,):
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

    def of_layers(self, layers: int) -> tuple[str, ...]:
        """One choice for each layer of the model. Raises InputError for an unknown choice, or a wrong number of
        them."""
        choices = self.layers if isinstance(self.layers, tuple) else (self.layers,) * layers
        for choice in choices:
            if choice not in LAYER_CHOICES:
                accepted = " or ".join(repr(one) for one in LAYER_CHOICES)
                raise InputError(f"offload.layers: {choice!r}, expected {accepted}, or one of these per layer")
        if len(choices) != layers:
            raise InputError(
                f"offload.layers: {count(len(choices), 'choice')}, expected one for each of the"
                f" {count(layers, 'layer')}"
            )
        return choices

    def kept_layers(self, layers: int) -> frozenset[int]:
        """The layers whose activations stay on the device. Raises InputError as `of_layers` does."""
        return frozenset(layer for layer, choice in enumerate(self.of_layers(layers)) if choice == "keep")
