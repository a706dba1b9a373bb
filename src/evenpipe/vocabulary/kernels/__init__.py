"""Implementations for rows of logits and of hidden states, between the matrix products of S, C and T.

Two versions: operations of torch (plain.py), which run anywhere, and Triton's kernels (rows.py, triton_kernels.py),
which read every logit once from the product and write every exponential once. Their results agree to rounding; each
gives the same bits every time, except `add_label_rows` of torch on a GPU, where `index_add_` adds in any order.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.vocabulary.kernels.plain import Kernels
from evenpipe.vocabulary.options import LossOptions


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
    version = options.kernels
    if version == "auto":
        version = "triton" if like.is_cuda and _has_triton() else "torch"
    if version == "torch":
        return Kernels()
    if not _has_triton():
        raise InputError('kernels is "triton", which is not installed; "auto" and "torch" work without it.')
    if not (like.is_cuda or interpreted()):
        raise InputError(
            f'kernels is "triton", but the tensors are on {like.device.type!r}, not on a GPU; "auto" or "torch" run'
            " there (and TRITON_INTERPRET=1 lets Triton interpret its kernels, for tests)."
        )
    from evenpipe.vocabulary.kernels.triton_kernels import TritonKernels

    return TritonKernels()
