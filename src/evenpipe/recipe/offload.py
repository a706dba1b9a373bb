"""Options for moving activations to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from evenpipe.declaration import Accepts, Declared, Names, NonNegative, Positive, declare
from evenpipe.schedule.costs import ASSUMED_COPY
from evenpipe.schedule.links import OneOrTwo
from evenpipe.schedule.planning import OFFLOAD
from evenpipe.sizes import MAX_BYTES, parse_size
from evenpipe.words import count, refused

LayerChoice = Literal["offload", "keep"]
Activations = Annotated[str, Names(OFFLOAD)] | Positive

PAGE = 4096
"""Bytes; host memory is allocated in whole pages."""


def _bytes(value: Any, where: str) -> Any:
    return parse_size(value, where) if isinstance(value, str) else value


Bytes = Annotated[
    int,
    Ge(PAGE),
    Lt(MAX_BYTES),
    Accepts(f'number of bytes, at least {PAGE} and below 8 EiB, or a size such as "24GiB"', _bytes),
]


@declare("offload")
class OffloadOptions(Declared):
    """Which activations go to the host, and the memory that they use there.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    activations: Activations = "scheduled"
    """"scheduled": the activations that the order moves, as in po-h and po-f. "none": no activations. "free": all that
    lower the peak of a device without costing time, by pipeline.costs. "all": enough to reach the lowest possible
    peak. A number: enough to stay below that many bytes, with the sizes of pipeline.costs."""
    copy_time: NonNegative | tuple[NonNegative, ...] = ASSUMED_COPY
    """Time of one copy, to the host or back, of the activations of a stage and microbatch, relative to its forward and
    backward together; one number, or one per stage. Arranges copies if pipeline.costs does not give their time.
    `evenpipe plan --offload` computes it."""
    layers: LayerChoice | tuple[LayerChoice, ...] = "offload"
    """"offload" moves the activations that a layer keeps for its backward, "keep" leaves them on the device; one choice
    for all layers of the model, or one per layer. With checkpointing a layer keeps less: with "full" only its input is
    moved."""
    host_memory: Bytes | None = None
    """Maximum host memory per device, such as "24GiB". A GPU allocates it in powers of two, each at least as large as
    its content. Default: no limit."""
    when_full: Literal["error", "keep"] = "error"
    """If host memory is full: end the run, or keep the rest on the device."""
    directory: str | Path | None = None
    """On the CPU: directory of the file for activations, which has no name and disappears with the process. Default:
    the system's directory for temporary files."""
    streams: OneOrTwo = 1
    """1: copies to the host and back take turns. 2: each direction has its own stream."""

    def check(self) -> None:
        exists = self.directory is None or Path(self.directory).is_dir()
        self.require("directory", exists, "an existing directory or none")
        self.require("copy_time", self.copy_time != (), "one number or one per stage")
        self.require("layers", self.layers != (), "one choice or one per layer")

    def of_layers(self, layers: int) -> tuple[str, ...]:
        """One choice for each layer of the model. Raises InputError for a wrong number of choices."""
        choices = self.layers if isinstance(self.layers, tuple) else (self.layers,) * layers
        if len(choices) != layers:
            accepted = f"one choice, or one for each of the {count(layers, 'layer')}"
            raise refused("offload.layers", self.layers, accepted)
        return choices

    def kept_layers(self, layers: int) -> frozenset[int]:
        """The layers whose activations stay on the device. Raises InputError as `of_layers` does."""
        return frozenset(layer for layer, choice in enumerate(self.of_layers(layers)) if choice == "keep")
