"""What an edge between two stages carries for a microbatch: named tensors, and the gradients of some of them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.words import count, refused

SEQUENCES, TOKENS = "sequences", "tokens"
"""Sizes in shapes that come from the microbatch. A tensor rank has its share of the tokens."""


@dataclass(frozen=True, slots=True)
class EdgeTensor:
    """The form of a tensor that layers pass on.

        EdgeTensor("memory", ("sequences", "tokens", 16), torch.float64)
        EdgeTensor("choices", ("sequences", "tokens"), torch.int64)

    Raises InputError for a shape or dtype that cannot travel.
    """

    name: str
    """For messages."""
    shape: tuple[int | str, ...]
    """Sizes; "sequences" and "tokens" are those of a microbatch."""
    dtype: torch.dtype | None = None
    """None: that of the computation."""
    has_gradient: bool | None = None
    """Whether its gradient travels back; default: True for floating-point tensors. Layers must detach a tensor without
    gradient before they return it."""
    widens: bool = False
    """Whether it has the dtype of the computation if that is wider than `dtype`."""

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise refused(f"dtype of {self.name}", self.dtype, "a torch.dtype or None")
        for size in self.shape:
            if size not in (SEQUENCES, TOKENS) and (not isinstance(size, int) or size < 1):
                raise refused(f"shape of {self.name}", self.shape, f'sizes of at least 1, "{SEQUENCES}" and "{TOKENS}"')
        if self.has_gradient and not self._is_float:
            raise refused(f"has_gradient of {self.name}", True, f"False for {self.dtype}")
        if self.has_gradient is None:
            object.__setattr__(self, "has_gradient", self._is_float)

    @property
    def _is_float(self) -> bool:
        return self.dtype is None or self.dtype.is_floating_point

    def __str__(self) -> str:
        without = "" if self.has_gradient == self._is_float else " without gradient"
        dtype = "" if self.dtype is None else f" {self.dtype}"
        return f"{self.name} [{', '.join(map(str, self.shape))}]{dtype}{without}"

    def computed_in(self, dtype: torch.dtype) -> EdgeTensor:
        """Return the form of the tensor in a computation in that dtype."""
        if self.dtype is None:
            return replace(self, dtype=dtype)
        return replace(self, dtype=torch.promote_types(self.dtype, dtype), widens=False) if self.widens else self

    def sizes(self, sequences: int, tokens: int) -> list[int]:
        """Return the shape of the tensor for a microbatch of [sequences, tokens]."""
        return [sequences if size == SEQUENCES else tokens if size == TOKENS else int(size) for size in self.shape]

    def microbatch(self, tensor: Tensor) -> tuple[int, int]:
        """Return the sequences and tokens of a microbatch, from a tensor of this form that has both sizes."""
        return tensor.shape[self.shape.index(SEQUENCES)], tensor.shape[self.shape.index(TOKENS)]

    def fault(self, returned: Any, sequences: int, tokens: int) -> str | None:
        """Return a text about what is wrong with a tensor returned for a microbatch; None if it is correct."""
        if not isinstance(returned, Tensor):
            return f"a {type(returned).__name__}"
        if list(returned.shape) != self.sizes(sequences, tokens) or returned.dtype != self.dtype:
            return f"{list(returned.shape)} {returned.dtype}"
        if returned.requires_grad and not self.has_gradient:
            return "a tensor with a gradient"
        return None


def hidden_of_width(width: int) -> EdgeTensor:
    """Return the form of the hidden states of most layers."""
    return EdgeTensor("hidden", (SEQUENCES, TOKENS, width))


@dataclass(frozen=True, slots=True)
class EdgeSpec:
    """The tensors that an edge carries, in order. The hidden states come first."""

    tensors: tuple[EdgeTensor, ...]

    @property
    def gradients(self) -> tuple[EdgeTensor, ...]:
        """The tensors whose gradients travel back."""
        return tuple(tensor for tensor in self.tensors if tensor.has_gradient)

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors))

    def check(self, producer: str, returned: Sequence[Any], sequences: int, tokens: int) -> None:
        """Raise InputError if the tensors that a part of the model returned for a microbatch do not have this form."""
        if len(returned) != len(self.tensors):
            raise InputError(f"{producer} returned {count(len(returned), 'tensor')}; expected {self}.")
        for tensor, value in zip(self.tensors, returned, strict=True):
            if fault := tensor.fault(value, sequences, tokens):
                raise InputError(f"{producer} returned {fault}; expected {tensor}.")
