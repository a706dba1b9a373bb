"""Everything that bytes depend on beside the model and the program."""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.schedule.planning import BARRIERS

from .framework import Framework
from .kernels import Kernels
from .parallelism import Parallelism
from .reserved import Overheads
from .states import ELEMENT_BYTES, Dtypes
from .vocabulary import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of training."""

    parallelism: Parallelism
    sequence: int
    microbatch_size: int
    kernels: Kernels
    checkpointing: tuple[str, ...]
    """Of each layer."""
    kept_layers: frozenset[int] = frozenset()
    """Those that copies of activations to the host leave alone."""
    dtypes: Dtypes
    framework: Framework
    vocabulary: str
    """Mode."""
    on_cpu: bool
    overheads: Overheads
    optimizer: str
    offloaded: float
    foreach: bool
    traced: bool

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return ELEMENT_BYTES[self.dtypes.compute]

    @property
    def machine(self) -> Machine:
        """For the vocabulary layers."""
        return "cpu" if self.on_cpu else "gpu"

    @property
    def tokens_here(self) -> int:
        """Of a microbatch, before sequence parallelism."""
        return self.microbatch_size * self.sequence // self.parallelism.cp

    @property
    def sequence_parallel(self) -> bool:
        """Norms and residuals are cut along the sequence."""
        return self.parallelism.sequence_parallel and self.parallelism.tp > 1

    @property
    def sharded(self) -> bool:
        """Every device holds a part of the vocabulary."""
        return BARRIERS[self.vocabulary] > 0
