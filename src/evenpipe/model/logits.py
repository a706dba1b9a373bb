"""Finds out how a model changes its logits by feeding it known ones.

A stub in the head's place returns chosen values z, and the model's own forward returns y = cap * tanh(z * scale / cap),
or y = z * scale without a cap. Attribute names are not read: `logits_scaling` multiplies in one family and divides in
another.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from evenpipe.model.structure import (
    PROBE_BATCH,
    PROBE_SEQUENCE,
    Structure,
    call_embedded,
    embedding_of,
    replace_head,
    uncuttable,
)

SMALL, LARGE = 2.0**-30, 2.0**40
GRID = (-300.0, -40.0, -7.0, -1.0, -0.125, 0.0, 0.01, 0.5, 3.0, 19.0, 111.0, SMALL, LARGE)


def forward_of_logits(model: nn.Module, structure: Structure) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the `run` of `probe_logits` for a model as `probe` leaves it. Its head is replaced."""
    embedding = embedding_of(model, structure.embedding_module)

    def run(z: torch.Tensor) -> torch.Tensor:
        replace_head(model, structure.head_module, lambda hidden: z)
        hidden = torch.ones(*z.shape[:2], embedding.embedding_dim, dtype=torch.float64)
        with torch.no_grad():
            return call_embedded(model, embedding, structure.wants_token, hidden, return_dict=True).logits

    return run


def probe_logits(
    architecture: str, run: Callable[[torch.Tensor], torch.Tensor], vocabulary_size: int
) -> tuple[float, float | None]:
    """Return (logit_scale, soft_cap) of a model.

    Args:
        run: runs the model's forward with the given fp64 logits [2, 3, vocabulary_size] in place of the head's output
            and returns the model's logits.

    Raises:
        InputError: the model changes them in another way.
    """

    shape = (PROBE_BATCH, PROBE_SEQUENCE, vocabulary_size)

    def at(value: float) -> float:
        return float(run(torch.full(shape, value, dtype=torch.float64))[0, 0, 0])

    scale, largest = at(SMALL) / SMALL, at(LARGE)
    capped = not math.isclose(largest, scale * LARGE, rel_tol=1e-5)
    if not capped:
        scale = at(1.0)
    cap = largest if capped else None

    positions = torch.arange(math.prod(shape)).view(shape)
    # Every value is in many columns: the result must not depend on the column.
    z = torch.tensor(GRID, dtype=torch.float64)[positions % len(GRID)]
    y = run(z.clone())
    if y.shape != z.shape:
        raise uncuttable(architecture, "its logits change their shape after the output layer")
    expected = z * scale if cap is None else cap * torch.tanh(z * scale / cap)
    if not (scale > 0.0 and torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-9)):
        reason = "what it does to its logits is neither a positive scale nor a soft-cap, cap * tanh(logits / cap)"
        raise uncuttable(architecture, reason)
    return scale, cap
