"""Counts the arithmetic of layers and head from their parameters' shapes: enough to split layers by cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evenpipe.model.description import Description

LOCAL = ("sliding_attention", "chunked_attention")
WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "mamba2", "moe", "mlp", "recurrent")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a layer over its context."""

    heads: int
    """0 if the layer has no attention."""
    query_size: int
    value_size: int
    key_value_size: int
    """Size of a token's keys and values, over all heads."""
    window: int | None
    """Tokens that attention looks back on; None: all."""

    def context(self, sequence: int) -> int:
        """Return the largest number of keys that a token attends to."""
        return sequence if self.window is None else min(self.window, sequence)

    def pairs(self, sequence: int) -> float:
        """Return the number of keys that a token attends to, on average over a causal sequence."""
        window = self.context(sequence)
        return window - window * (window - 1) / (2 * sequence)

    def flops(self, keys: float) -> float:
        """Return the forward FLOPs of a token that attends to this number of keys."""
        return 2.0 * keys * self.heads * (self.query_size + self.value_size)


def layer_flops(description: Description, sequence: int) -> list[float]:
    """Return the forward floating-point operations per token of every layer.

    Two per parameter of every matrix (with experts: only the chosen ones), and for attention, per token and layer,
    2 * context * heads * (query size + value size), where context is `sequence` or the window if that is smaller.
    Masked products are counted.
    """
    flops = []
    for index in range(description.layers):
        attention = attention_of(description, index)
        flops.append(matrix_flops(description, index) + attention.flops(attention.context(sequence)))
    return flops


def head_flops(description: Description) -> float:
    """Return the forward floating-point operations per token of the output layer: 2 * head_rows * hidden_size."""
    return 2.0 * description.head_rows * description.hidden_size


def training_flops(description: Description, sequence: int) -> float:
    """Return the model's FLOPs per token of a training step, as MFU is defined:

        3 * (layers + head), the forward and a backward of twice its work

    with `matrix_flops` and `Attention.flops` of each layer, and `head_flops`. Recomputation, the optimizer, and
    masked pairs of a causal sequence do not count; documents in a row, frozen parameters and ignored labels make no
    difference.
    """
    layers = 0.0
    for index in range(description.layers):
        attention = attention_of(description, index)
        layers += matrix_flops(description, index) + attention.flops(attention.pairs(sequence))
    return 3.0 * (layers + head_flops(description))


ARRANGING_SEQUENCE = 2048
"""Assumed tokens per sequence for the cost of attention if the length is unknown, unless the model allows fewer."""


def arranging_flops(description: Description, sequence: int | None = None) -> tuple[tuple[float, ...], float]:
    """Return the forward FLOPs per token of every layer and of the output layer, which are used to arrange orders and
    split layers if no times are known. `sequence` is in tokens."""
    return tuple(layer_flops(description, sequence or usual_length(description))), head_flops(description)


def usual_length(description: Description) -> int:
    """Return the assumed number of tokens per sequence if none is given."""
    return min(ARRANGING_SEQUENCE, description.maximum_length or ARRANGING_SEQUENCE)


def matrix_flops(description: Description, index: int) -> float:
    """Return the FLOPs per token in the matrices of a layer. Experts are stored as [experts, ..., ...]; their biases
    [experts, ...] are not matrices."""
    experts, share = experts_of(description.layer_config(index))
    total = 0.0
    for module in description.layer(index).modules():
        matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1]
        of_experts = [matrix for matrix in matrices if experts and matrix.ndim == 3 and matrix.shape[0] == experts]
        if of_experts:
            total += sum(2.0 * matrix.numel() for matrix in of_experts) * share
        else:
            total += sum(2.0 * matrix.numel() for matrix in matrices)
    return total


def attention_of(description: Description, index: int) -> Attention:
    """Read the attention of a layer from its config."""
    config = description.layer_config(index)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types else None
    heads = getattr(config, "num_attention_heads", None)
    if kind in WITHOUT_ATTENTION or not isinstance(heads, int):
        heads = 0
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    windowed = heads and (kind in LOCAL or (types is None and getattr(config, "use_sliding_window", True)))
    size = getattr(config, "head_dim", None) or (description.hidden_size // heads if heads else 0)
    query = getattr(config, "qk_head_dim", None) or size
    value = getattr(config, "v_head_dim", None) or size
    return Attention(
        heads=heads,
        query_size=query,
        value_size=value,
        key_value_size=(getattr(config, "num_key_value_heads", None) or heads) * (query + value),
        window=window if windowed and isinstance(window, int) else None,
    )


def experts_of(config: Any) -> tuple[int | None, float]:
    """Return the number of experts (None if there are none), and the share of them that a token uses."""
    experts = _first_number(config, EXPERTS)
    return experts, (_first_number(config, EXPERTS_PER_TOKEN) or experts or 1) / (experts or 1)


def chosen_experts(config: Any) -> int:
    """Return the number of experts that a token uses."""
    return _first_number(config, EXPERTS_PER_TOKEN) or 1


def _first_number(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that exists and is a whole number."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
