"""Counts the arithmetic of layers and head from their parameters' shapes: enough to split layers by cost."""

from __future__ import annotations

from typing import Any

from evenpipe.model.description import Description

LOCAL = ("sliding_attention", "chunked_attention")
WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "mamba2", "moe", "mlp", "recurrent")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def layer_flops(description: Description, sequence: int) -> list[float]:
    """Return the forward floating-point operations per token of every layer.

    Two per parameter of every matrix (with experts: only the chosen ones), and for attention, per token and layer,
    2 * context * heads * (query size + value size), where context is `sequence` or the window if that is smaller.
    Masked products are counted.
    """
    return [
        _matrices(description, index) + _attention(description, index, sequence) for index in range(description.layers)
    ]


def head_flops(description: Description) -> float:
    """Return the forward floating-point operations per token of the output layer: 2 * vocabulary_size * hidden_size."""
    return 2.0 * description.vocabulary_size * description.hidden_size


ARRANGING_SEQUENCE = 2048
"""Assumed tokens per sequence for the cost of attention if the length is unknown, unless the model allows fewer."""


def arranging_flops(description: Description, sequence: int | None = None) -> tuple[tuple[float, ...], float]:
    """Return the forward FLOPs per token of every layer and of the output layer, by which orders are arranged and
    layers are split if no times are known. `sequence` is in tokens."""
    return tuple(layer_flops(description, sequence or usual_length(description))), head_flops(description)


def usual_length(description: Description) -> int:
    """Return the tokens of a sequence where no number is given."""
    return min(ARRANGING_SEQUENCE, description.maximum_length or ARRANGING_SEQUENCE)


def _matrices(description: Description, index: int) -> float:
    """Count the matrices. Experts are stored as [experts, ..., ...]; their biases [experts, ...] are not matrices."""
    config = description.layer_config(index)
    experts = first_number(config, EXPERTS)
    share = (first_number(config, EXPERTS_PER_TOKEN) or experts or 1) / (experts or 1)
    total = 0.0
    for module in description.layer(index).modules():
        matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1]
        of_experts = [one for one in matrices if experts and one.ndim == 3 and one.shape[0] == experts]
        if of_experts:
            total += sum(2.0 * one.numel() for one in of_experts) * share
        else:
            total += sum(2.0 * one.numel() for one in matrices)
    return total


def _attention(description: Description, index: int, sequence: int) -> float:
    config = description.layer_config(index)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types else None
    heads = getattr(config, "num_attention_heads", None)
    if kind in WITHOUT_ATTENTION or not isinstance(heads, int):
        return 0.0
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    windowed = kind in LOCAL or (types is None and getattr(config, "use_sliding_window", True))
    context = min(sequence, window) if windowed and isinstance(window, int) else sequence
    size = getattr(config, "head_dim", None) or description.hidden_size // heads
    query = getattr(config, "qk_head_dim", None) or size
    value = getattr(config, "v_head_dim", None) or size
    return 2.0 * context * heads * (query + value)


def first_number(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that exists and is a whole number."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
