"""The layout of a model on GPUs: the four axes, and the sharding over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evenpipe.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """4D parallelism of arXiv 2411.06465, section 2. GPUs = dp * tp * cp * pp."""

    dp: int = 1
    """Replicas, each with its own part of the batch."""
    tp: int = 1
    """Parts of every matrix, by heads and columns."""
    cp: int = 1
    """Parts of every sequence."""
    pp: int = 1
    """Devices of a pipeline."""
    sequence_parallel: bool = True
    """Split the tensors that tensor parallelism leaves whole (norms, residuals) along the sequence; no effect with tp =
    1."""
    cp_exchange: Literal["ring", "all-to-all"] = "ring"
    """Context parallelism sends keys and values around a ring, or exchanges heads for tokens."""
    zero: Literal[0, 1, 2, 3] = 0
    """Sharded over dp * cp: 1 optimizer state, 2 also gradients, 3 also parameters (FSDP2)."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise InputError(f"{name} is {size!r}, expected a whole number of at least 1")
        if self.cp_exchange not in ("ring", "all-to-all"):
            raise InputError(f"cp_exchange is {self.cp_exchange!r}, expected ring or all-to-all")
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"zero is {self.zero!r}, expected 0, 1, 2 or 3")

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same parameters, over which ZeRO shards: dp * cp."""
        return self.dp * self.cp
