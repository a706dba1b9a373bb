"""The tensors that S leaves for C and T of the same microbatch on the same shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evenpipe.vocabulary.buffers import Buffers
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.products import hidden_product
from evenpipe.vocabulary.shards import Shard
from evenpipe.vocabulary.targets import Targets

if TYPE_CHECKING:
    from evenpipe.vocabulary.kernels.plain import Kernels


@dataclass(frozen=True, slots=True)
class Rooms:
    """Memory for the exponentials of some tokens and columns: all [tokens, columns]."""

    logits: Tensor
    """The product X W^T, which is overwritten."""
    exponentials: Tensor
    """May be the same memory as `logits`. With a soft-cap the exponentials are stored times its derivative D."""
    derivative: Tensor | None
    """Memory for D, if it is needed separately."""
    bias: Tensor | None
    """[columns]."""


@dataclass(frozen=True, slots=True)
class Products:
    """Sums over the columns of a shard, [tokens, hidden_size]."""

    exponentials: Tensor
    """A = E W."""
    derivative: Tensor | None
    """D W, only with both soft-cap and label smoothing."""

    @classmethod
    def empty(cls, hidden: Tensor, dtype: torch.dtype, options: LossOptions) -> Products:
        """Return uninitialised products of the shape of `hidden`."""
        product = hidden.new_empty(hidden.shape, dtype=dtype)
        return cls(product, torch.empty_like(product) if options.needs_derivative else None)

    def multiply(
        self, exponentials: Tensor, derivative: Tensor | None, weight: Tensor, span: slice = slice(None), *, add: bool
    ) -> None:
        """Compute, or add to, the products of E and D of some tokens with some rows of the weight."""
        hidden_product(exponentials, weight, self.exponentials[span], add=add)
        if self.derivative is not None:
            assert derivative is not None
            hidden_product(derivative, weight, self.derivative[span], add=add)


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
    products: Products | None = None
    """One barrier only."""
