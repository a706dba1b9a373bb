"""What a model does to its logits, found by feeding it known ones.

The head is replaced by a stub that returns chosen values z; what comes out of the model's own forward is y = cap * tanh(z * scale / cap),
or y = z * scale without a cap. Attribute names are not read: `logits_scaling` multiplies in one family and divides in another.
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

from evenpipe.errors import InputError

SMALL, LARGE = 2.0**-30, 2.0**40
GRID = (-300.0, -40.0, -7.0, -1.0, -0.125, 0.0, 0.01, 0.5, 3.0, 19.0, 111.0, SMALL, LARGE)


def probe_logits(model: PreTrainedModel, run, vocabulary_size: int) -> tuple[float, float | None]:
    """(logit_scale, soft_cap) of a model.

    Args:
        run: runs the model's forward with the given [batch, sequence, vocabulary] logits in place of the head's, and returns its logits.
    """
    architecture = type(model).__name__
    columns = torch.arange(vocabulary_size)
    grid = torch.tensor(GRID, dtype=torch.float64)

    def answer(shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.stack(
            [
                torch.stack([grid[(columns + shift + row + 5 * sample) % len(GRID)] for row in range(3)])
                for sample in range(2)
            ]
        )
        y = run(z.clone())
        if not isinstance(y, torch.Tensor) or y.shape != z.shape:
            raise InputError(
                f"{architecture} cannot be cut into stages: its logits change their shape after the output layer."
            )
        return z, y.double()

    def value(z: float) -> float:
        y = run(torch.full((2, 3, vocabulary_size), z, dtype=torch.float64)).double()
        return float(y[0, 0, 0])

    scale = value(SMALL) / SMALL
    largest = value(LARGE)
    capped = not math.isclose(largest, scale * LARGE, rel_tol=1e-5)
    if not capped:
        scale = value(1.0)
    cap = largest if capped else None
    for shift in (0, 4):
        z, y = answer(shift)
        expected = cap * torch.tanh(z * scale / cap) if cap is not None else z * scale
        if scale <= 0.0 or not torch.allclose(y, expected, rtol=1e-5, atol=1e-9):
            raise InputError(
                f"{architecture} cannot be cut into stages: what it does to its logits is neither a positive scale nor a soft-cap "
                f"(cap * tanh(logits / cap))."
            )
    return scale, cap
