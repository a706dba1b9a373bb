"""Gradient clipping by the global norm, over all devices of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def total_norm(
    gradients: Iterable[Tensor], torch_device: torch.device, sum_over_devices: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return the Euclidean norm of all gradients of the model, equal on every process.

    Each process passes the gradients that it counts: a matrix held twice (tied weights without vocabulary parallelism)
    counts on only one process, a sharded matrix on all, each with its rows.

    The squares are added in fp64, so that the norm hardly depends on how parameters are spread over processes.

    Args:
        sum_over_devices: sums an fp64 scalar tensor over the pipeline axis; every process contributes and receives.
            None for a single device.

    Returns:
        A scalar fp64 tensor on `torch_device`.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    square = square.to(torch_device)
    return (square if sum_over_devices is None else sum_over_devices(square)).sqrt()


def clip_gradients(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_.

    The factor is `max_norm / (norm + 1e-6)`, at most 1. Nothing is read back to the host, and all plain gradients of a
    dtype and device are scaled together.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, torch_device), group in by_kind.items():
        scale = factor.to(dtype).to(torch_device)
        plain = [gradient for gradient in group if type(gradient) is Tensor]
        if plain:
            torch._foreach_mul_(plain, scale)
        for gradient in group:
            if type(gradient) is not Tensor:  # DTensors of two meshes cannot be scaled together
                gradient.mul_(scale)
