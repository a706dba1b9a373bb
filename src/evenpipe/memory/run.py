"""Everything that bytes depend on besides the model and the program."""

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
    """Settings of a training run."""

    parallelism: Parallelism
    sequence: int
    microbatch_size: int
    kernels: Kernels
    checkpointing: tuple[str, ...]
    """Checkpointing of each layer."""
    kept_layers: frozenset[int] = frozenset()
    """Layers whose activations are not copied to the host."""
    dtypes: Dtypes
    framework: Framework
    vocabulary: str
    """Vocabulary mode."""
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
        """Machine of the vocabulary layers."""
        return "cpu" if self.on_cpu else "gpu"

    @property
    def tokens_here(self) -> int:
        """Tokens of a microbatch, before sequence parallelism."""
        return self.microbatch_size * self.sequence // self.parallelism.cp

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals are split along the sequence."""
        return self.parallelism.sequence_parallel and self.parallelism.tp > 1

    @property
    def sharded(self) -> bool:
        """Whether every device holds a part of the vocabulary."""
        return BARRIERS[self.vocabulary] > 0
