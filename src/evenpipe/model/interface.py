"""Finds the inputs of a model's forward besides token ids."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.model.structure import (
    PROBE_BATCH,
    PROBE_SEQUENCE,
    Structure,
    call_embedded,
    embedding_of,
    layers_of,
    neutral_token,
)

LARGEST_TABLES = 2**25
"""Largest number of elements in position tables for which `probe_counted_positions` runs."""


def takes(model_class: type[nn.Module], argument: str) -> bool:
    """Return whether a forward has a parameter of that name; `**kwargs` are assumed to go to the parent's forward."""
    for owner in model_class.__mro__:
        forward = vars(owner).get("forward")
        if forward is None:
            continue
        parameters = inspect.signature(forward).parameters
        if argument in parameters:
            return True
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return False


def probe_position_rows(model: nn.Module, structure: Structure) -> int | None:
    """Return the number of position ids for which a model has rows, found by trying positions beyond every table.

    Tables inside layers are not found.

    Args:
        model: as `probe` leaves it: it runs on fp64 hidden states without layers or weights.

    Returns: one more than the largest position id; None if position ids index no table outside the layers.
    """
    embedding = embedding_of(model, structure.embedding_module)
    rows = [tensor.shape[0] for tensor in _tables(model) if tensor.dim() == 2]
    if not rows:
        return None
    hidden = torch.zeros(PROBE_BATCH, PROBE_SEQUENCE, embedding.embedding_dim, dtype=torch.float64)

    def accepts(position: int) -> bool:
        positions = torch.full((PROBE_BATCH, PROBE_SEQUENCE), position)
        try:
            with torch.no_grad():
                call_embedded(model, embedding, structure.wants_token, hidden, position_ids=positions)
        except (IndexError, RuntimeError):
            return False
        return True

    accepted, refused = 0, max(rows)
    if accepts(refused) or not accepts(accepted):
        return None
    while refused - accepted > 1:  # some tables begin with rows that no position id reaches
        middle = (accepted + refused) // 2
        accepted, refused = (middle, refused) if accepts(middle) else (accepted, middle)
    return refused


def counted_positions(token_ids: torch.Tensor, padding_index: int) -> torch.Tensor:
    """Return position ids [batch, sequence] as RoBERTa counts them: padding tokens are not counted and get the row
    `padding_index`, and the other tokens begin after it."""
    counts = token_ids != padding_index
    return (counts.cumsum(dim=1) * counts).long() + padding_index


def probe_counted_positions(model: PreTrainedModel, structure: Structure, padding_index: int) -> bool:
    """Return whether a model without position ids uses `counted_positions`, which requires token ids.

    Args:
        model: as for `probe_position_rows`. All its tables temporarily get distinct rows.
    """
    embedding = embedding_of(model, structure.embedding_module)
    tables = [
        (vars(module), key, value)
        for module in model.modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.dim() == 2
    ]
    if not tables or sum(value.numel() for *_, value in tables) > LARGEST_TABLES:
        return False
    token_ids = torch.full((PROBE_BATCH, PROBE_SEQUENCE), neutral_token(model.config, padding_index))
    padded = token_ids.clone()
    padded[0, 1] = padding_index
    hidden = torch.zeros(*token_ids.shape, embedding.embedding_dim, dtype=torch.float64)
    received: list[torch.Tensor] = []
    hook = layers_of(model, structure.layers_name)[0].register_forward_hook(
        lambda module, args, output: received.append(output[0] if isinstance(output, tuple) else output)
    )
    model.eval()
    generator = torch.Generator().manual_seed(0)
    try:
        for namespace, key, value in tables:
            namespace[key] = torch.randn(value.shape, dtype=torch.float64, generator=generator)
        embedding.__dict__["weight"] = hidden[0, 0].expand(embedding.num_embeddings, -1)
        with torch.no_grad():
            model(input_ids=token_ids, use_cache=False)
            model(input_ids=padded, use_cache=False)
            model(inputs_embeds=hidden, position_ids=counted_positions(padded, padding_index), use_cache=False)
    except Exception:  # families raise many types on token ids without weights: the self-check decides
        return False
    finally:
        hook.remove()
        model.train()
        embedding.__dict__["weight"] = None
        for namespace, key, value in tables:
            namespace[key] = value
    plain, counted, explicit = received
    return not torch.equal(plain, counted) and torch.equal(counted, explicit)


def _tables(model: nn.Module) -> list[torch.Tensor]:
    """Return all tensors left in a model: buffers, and the plain attributes with which `probe` replaced parameters."""
    return [
        value
        for module in model.modules()
        for namespace in (vars(module), module._buffers)
        for value in namespace.values()
        if isinstance(value, torch.Tensor)
    ]
