"""Forward FLOPs per token, from the shapes of the parameters."""

from __future__ import annotations

from evenpipe.model.description import Description


def layer_flops(description: Description, sequence: int) -> list[float]:
    """Of each layer: two per entry of every matrix, and attention over half of `sequence` tokens."""
    prefix = description.structure.layers_name + "."
    products = [0.0] * description.layers
    for name, shape in description.shapes.items():
        if name.startswith(prefix) and len(shape) == 2:
            products[int(name[len(prefix) :].split(".")[0])] += 2.0 * shape.numel()
    return [product + 2.0 * sequence * description.hidden_size for product in products]


def head_flops(description: Description) -> float:
    """Of the output layer."""
    return 2.0 * description.vocabulary_size * description.hidden_size
