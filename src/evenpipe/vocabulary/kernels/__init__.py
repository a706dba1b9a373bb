"""Implementations for rows of logits and of hidden states, between the matrix products of S, C and T.

Two versions: operations of torch (plain.py), which run anywhere, and Triton's kernels (rows.py, triton_kernels.py),
which read every logit once from the product and write every exponential once. Their results agree to rounding; each
gives the same bits every time, except `add_label_rows` of torch on a GPU, where `index_add_` adds in any order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.vocabulary.combination import Combined
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.state import OutputState, Products


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


class Kernels(Protocol):
    """Letters as in output.py. Tokens are valid ones; tensors with [tokens] in `Combined` count all."""

    by_column: bool
    """Whether it needs targets by column (see `Targets`)."""

    def tokens_at_once(self, tokens: int, columns: int, like: Tensor) -> int:
        """Return how many of a block's tokens `exponentials` processes at a time."""

    def exponentials(
        self, rooms: Rooms, first: int, statistics: Tensor, state: OutputState, *, gradients: bool
    ) -> None:
        """Convert a block of logits, of tokens from `first` on, to statistics [tokens, k] and, for gradients,
        exponentials."""

    def exponentials_again(self, rooms: Rooms, first_column: int, maximum: Tensor, state: OutputState) -> None:
        """Convert logits of all tokens and the shard's columns from `first_column` on to the same exponentials again.

        maximum: [tokens], of the whole shard.
        """

    def combine(
        self, statistics: Tensor, token_weights: Tensor, labels: Tensor, options: LossOptions, vocabulary: int
    ) -> Combined:
        """As `evenpipe.vocabulary.combine`, which has checked the shapes."""

    def hidden_gradient(self, state: OutputState, combined: Combined, weight: Tensor, products: Products) -> Tensor:
        """Compute dX = r A + u (D W) + c W[target], [all tokens, hidden_size], zero at ignored ones; may overwrite
        A."""

    def scaled_hidden(
        self, state: OutputState, combined: Combined, hidden: Tensor, dtype: torch.dtype, *, of_derivative: bool
    ) -> tuple[Tensor, Tensor]:
        """Return r X (or u X) in the dtype of exponentials, and r (or u), [tokens]."""

    def add_label_rows(
        self,
        state: OutputState,
        combined: Combined,
        hidden: Tensor,
        weight_gradient: Tensor | None,
        bias_gradient: Tensor | None,
    ) -> None:
        """Add c X to the rows of the targets in the gradient of the weight, and c to that of the bias."""


def interpreted() -> bool:
    """Return whether Triton runs its kernels on the CPU, one operation at a time ("TRITON_INTERPRET=1")."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def choose(options: LossOptions, like: Tensor) -> Kernels:
    """Return the version that `options.kernels` selects, for tensors on the device of `like`.

    Raises InputError if Triton is selected and cannot run.
    """
    from evenpipe.vocabulary.kernels.plain import PlainKernels

    wanted = options.kernels
    if wanted == "auto":
        wanted = "triton" if like.is_cuda and _has_triton() else "torch"
    if wanted == "torch":
        return PlainKernels()
    if not _has_triton():
        raise InputError('kernels is "triton", which is not installed; "auto" and "torch" work without it.')
    if not (like.is_cuda or interpreted()):
        raise InputError(
            f'kernels is "triton", but the tensors are on {like.device.type!r}, not on a GPU; "auto" or "torch" run'
            " there (and TRITON_INTERPRET=1 lets Triton interpret its kernels, for tests)."
        )
    from evenpipe.vocabulary.kernels.triton_kernels import TritonKernels

    return TritonKernels()
