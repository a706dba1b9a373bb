"""What a model's forward takes beside token ids, and what each of its parts has to return."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model.structure import PROBE_BATCH, PROBE_SEQUENCE, Structure, call_embedded, embedding_of


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
