"""Output layers with their loss that others have written, each as a function of hidden states, weight and labels.

What is not installed, or does not run on this device, says so when it is made or called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import evenpipe

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [tokens, hidden_size], weight [vocabulary, hidden_size], labels [tokens] -> mean loss, for autograd."""

CHUNK = 4096
"""Tokens, for those that are given a size."""


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits in fp32, as transformers computes its loss."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def _compiled() -> Loss:
    """For one shape: what was compiled for others before would make this one dynamic, and later ones not compiled."""
    torch.compiler.reset()
    return torch.compile(eager, dynamic=False)


def _ours(kernels: str) -> Loss:
    linear_cross_entropy = evenpipe.linear_cross_entropy
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, kernels=kernels)


def _torch(**options: Any) -> Loss:
    """torch.nn.functional.linear_cross_entropy in chunks, from torch 2.13 on."""
    chunked = torch.nn.LinearCrossEntropyOptions(**options)
    return lambda hidden, weight, labels: functional.linear_cross_entropy(hidden, weight, labels, options=chunked)


def _liger(**options: Any) -> Loss:
    """github.com/linkedin/Liger-Kernel: an autograd function, whose arguments have no names when it is applied."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    known = list(inspect.signature(Function.forward).parameters.values())[1:]
    unknown = options.keys() - {one.name for one in known}
    if unknown:
        raise TypeError(f"this version has no {', '.join(unknown)}")
    rest = [options.get(one.name, one.default) for one in known[3:]]
    return lambda hidden, weight, labels: Function.apply(hidden, weight, labels, *rest)[0]


def _cce(**options: Any) -> Loss:
    """github.com/apple/ml-cross-entropy, whose release on PyPI (25.1.1) has no other names for its presets."""
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, impl="cce", **options)


def _quack(scaled: bool) -> Loss:
    """github.com/Dao-AILab/quack."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=CHUNK, use_scaled_exp=scaled)

    return loss


LOSSES: dict[str, Callable[[], Loss]] = {
    "evenpipe.linear_cross_entropy": lambda: _ours("auto"),
    "the same, kernels='torch'": lambda: _ours("torch"),
    "F.cross_entropy": lambda: eager,
    "F.cross_entropy, compiled": _compiled,
    "F.linear_cross_entropy": _torch,
    f"the same, {CHUNK} tokens": lambda: _torch(batch_chunk_size=CHUNK),
    "Liger": _liger,
    "Liger, chunk_mem_const=16": lambda: _liger(chunk_mem_const=16),
    "Liger, fp32 sums": lambda: _liger(chunk_mem_const=16, accum_dtype=torch.float32),
    "CCE": _cce,
    "CCE, exact": lambda: _cce(filter_eps=None),
    "QuACK": lambda: _quack(scaled=False),
    "QuACK, scaled exponentials": lambda: _quack(scaled=True),
}
"""What each name stands for is made when it is called."""
