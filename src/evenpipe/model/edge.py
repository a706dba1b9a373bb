"""What an edge between two stages carries for a microbatch: named tensors, and back the gradients of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.words import count, refused

SEQUENCES, TOKENS = "sequences", "tokens"
"""Sizes in shapes that are those of a microbatch. A tensor rank has its share of the tokens."""


@dataclass(frozen=True, slots=True)
class EdgeTensor:
    """The form of a tensor that layers hand on.

        EdgeTensor("memory", ("sequences", "tokens", 16), torch.float64)
        EdgeTensor("choices", ("sequences", "tokens"), torch.int64)

    Raises InputError for a shape or dtype that cannot travel.
    """

    name: str
    """For messages."""
    shape: tuple[int | str, ...]
    """Sizes; "sequences" and "tokens" are those of a microbatch."""
    dtype: torch.dtype
    has_gradient: bool | None = None
    """Whether its gradient travels back; default: that of a floating-point tensor does. Layers must return a tensor
    that has none detached."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise refused(f"dtype of {self.name}", self.dtype, "a torch.dtype")
        for size in self.shape:
            if size not in (SEQUENCES, TOKENS) and (not isinstance(size, int) or size < 1):
                raise refused(f"shape of {self.name}", self.shape, f'sizes of at least 1, "{SEQUENCES}" and "{TOKENS}"')
        is_float = self.dtype.is_floating_point
        if self.has_gradient and not is_float:
            raise refused(f"has_gradient of {self.name}", True, f"False for {self.dtype}")
        if self.has_gradient is None:
            object.__setattr__(self, "has_gradient", is_float)

    def __str__(self) -> str:
        without = "" if self.has_gradient == self.dtype.is_floating_point else " without gradient"
        return f"{self.name} [{', '.join(map(str, self.shape))}] {self.dtype}{without}"

    def sizes(self, sequences: int, tokens: int) -> list[int]:
        """Return its shape for a microbatch of [sequences, tokens]."""
        own = {SEQUENCES: sequences, TOKENS: tokens}
        return [size if isinstance(size, int) else own[size] for size in self.shape]

    def fault(self, returned: Any, sequences: int, tokens: int) -> str | None:
        """Return what is wrong with a tensor as it was returned for a microbatch, None if nothing is."""
        if not isinstance(returned, Tensor):
            return f"a {type(returned).__name__}"
        if list(returned.shape) != self.sizes(sequences, tokens) or returned.dtype != self.dtype:
            return f"{list(returned.shape)} {returned.dtype}"
        if returned.requires_grad and not self.has_gradient:
            return "a tensor with a gradient"
        return None


@dataclass(frozen=True, slots=True)
class EdgeSpec:
    """The tensors that an edge carries, in order. The hidden states come first."""

    tensors: tuple[EdgeTensor, ...]

    @property
    def gradients(self) -> tuple[EdgeTensor, ...]:
        """Those whose gradients travel back."""
        return tuple(tensor for tensor in self.tensors if tensor.has_gradient)

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors))

    def check(self, what: str, returned: Sequence[Any], sequences: int, tokens: int) -> None:
        """Raise InputError if what a part of the model returned for a microbatch is not of this form."""
        if len(returned) != len(self.tensors):
            raise InputError(f"{what} returned {count(len(returned), 'tensor')}, expected {self}.")
        for tensor, value in zip(self.tensors, returned, strict=True):
            if found := tensor.fault(value, sequences, tokens):
                raise InputError(f"{what} returned {found}, expected {tensor}.")
