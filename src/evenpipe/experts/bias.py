"""Router biases that balance experts without a loss (arXiv 2408.15664)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from evenpipe.model.placement import Held

NAMES = ("e_score_correction_bias", "expert_bias")
"""Names of biases that a router adds to its scores only to choose experts."""


def is_router_bias(name: str) -> bool:
    """Return whether a parameter or buffer of this name is such a bias."""
    return name.rpartition(".")[2] in NAMES


@torch.no_grad()
def move_biases(held: Mapping[str, Held[nn.Parameter]], load: Tensor, layers: Sequence[str], rate: float) -> None:
    """Raise the biases of experts that fewer tokens than average have chosen by `rate`, and lower those of the others.
    The mean of a layer's biases does not change.

    Args:
        held: this process's parameters and buffers, by name.
        load: number of tokens that have chosen each expert, [layers with experts, experts].
        layers: names of the experts of these layers: `model.layers.3.mlp.experts`.
    """
    for name, bias in held.items():
        if not is_router_bias(name):
            continue
        row = max(range(len(layers)), key=lambda row: _alike(name, layers[row]))
        counts = load[row, : bias.placement.shape[-1]].double()
        update = (counts.mean() - counts).sign()
        update = rate * (update - update.mean())
        bias.tensor.add_(bias.placement.of(update.view(bias.placement.shape)).to(bias.tensor))


def _alike(first: str, second: str) -> int:
    """Return the number of leading components that two names have in common."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return next((count for count, (left, right) in enumerate(pairs) if left != right), 0)
