"""What a model's forward takes beside token ids, and what each of its parts has to return."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError
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
"""Numbers in the tables of positions of a model that is asked how it counts them."""


def takes(model_class: type[nn.Module], argument: str) -> bool:
    """Whether a forward has a parameter of that name; one that hands on all keywords is taken to hand them upwards."""
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
    """How many position ids a model has rows for, found by asking it for positions beyond every table that it holds.

    Tables inside of layers are not seen.

    Args:
        model: what `probe` leaves behind: it runs on fp64 hidden states with no layers and no weights.

    Returns: position ids may be 0 to this minus 1; None where they index no table outside the layers.
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
    """Position ids [batch, sequence] as RoBERTa makes them of token ids: padding is left out of the count and gets the
    row `padding_index`, behind which the other tokens begin."""
    counts = token_ids != padding_index
    return (counts.cumsum(dim=1) * counts).long() + padding_index


def probe_counted_positions(model: PreTrainedModel, structure: Structure, padding_index: int) -> bool:
    """Whether a model that is given no position ids makes those of `counted_positions`, for which it needs token ids.

    Args:
        model: as for `probe_position_rows`. Every table that it holds gets different rows meanwhile.
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
        for place, key, value in tables:
            place[key] = torch.randn(value.shape, dtype=torch.float64, generator=generator)
        embedding.__dict__["weight"] = hidden[0, 0].expand(embedding.num_embeddings, -1)
        with torch.no_grad():
            model(input_ids=token_ids, use_cache=False)
            model(input_ids=padded, use_cache=False)
            model(inputs_embeds=hidden, position_ids=counted_positions(padded, padding_index), use_cache=False)
    except Exception:  # whatever a family raises on token ids without weights: the self-check decides
        return False
    finally:
        hook.remove()
        model.train()
        embedding.__dict__["weight"] = None
        for place, key, value in tables:
            place[key] = value
    plain, counted, given = received
    return not torch.equal(plain, counted) and torch.equal(counted, given)


def _tables(model: nn.Module) -> list[torch.Tensor]:
    """All tensors that a model still holds: buffers, and the plain attributes that `probe` put for parameters."""
    return [
        value
        for module in model.modules()
        for place in (vars(module), module._buffers)
        for value in place.values()
        if isinstance(value, torch.Tensor)
    ]


def check_returned(what: str, returned: Any, received: torch.Tensor) -> None:
    """A part of the model has to return hidden states like those it received, [batch, sequence, hidden_size].

    Raises:
        InputError: another shape or dtype, or no tensor.
    """
    if not isinstance(returned, torch.Tensor):
        found = f"a {type(returned).__name__}"
    elif returned.shape != received.shape or returned.dtype != received.dtype:
        found = f"{list(returned.shape)} {returned.dtype}"
    else:
        return
    raise InputError(
        f"{what} returned {found} for hidden states {list(received.shape)} {received.dtype}: shape and dtype have to "
        f"stay the same."
    )
