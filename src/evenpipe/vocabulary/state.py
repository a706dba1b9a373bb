"""The tensors that S leaves for C and T of the same microbatch on the same shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from evenpipe.vocabulary.buffers import Buffers
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.shards import Shard
from evenpipe.vocabulary.targets import Targets

if TYPE_CHECKING:
    from evenpipe.vocabulary.kernels import Kernels


@dataclass(slots=True)
class OutputState:
    """All tensors are for valid tokens only. C takes the products out, T the rest: each runs once, and memory is freed
    as early as possible.
    """

    options: LossOptions
    shard: Shard
    targets: Targets
    one_barrier: bool
    buffers: Buffers
    kernels: Kernels
    hidden: Tensor | None
    """X."""
    bias: Tensor | None
    maximum: Tensor | None = None
    """[tokens], this shard's maximum without the target, 0 if there is none. None: this shard has no work."""
    exponentials: Tensor | None = None
    """E, unless nothing is kept."""
    derivative: Tensor | None = None
    """D, only with both soft-cap and label smoothing, unless nothing is kept."""
    product: Tensor | None = None
    """A = E W, one barrier only."""
    derivative_product: Tensor | None = None
    """D W, one barrier with both soft-cap and label smoothing only."""
