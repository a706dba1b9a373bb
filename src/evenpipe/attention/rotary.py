"""Rotary tables that depend on the length of the row: a piece uses the tables of the whole row.

With dynamic NTK scaling and LongRoPE (Phi-3), transformers chooses frequencies by the highest position id of the call.
So each row gets one more column with its last position, and that column is removed from the tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.attention.row_context import current


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module makes rotary tables that depend on the length of the row."""
    kinds = getattr(module, "rope_type", None)
    named = kinds.values() if isinstance(kinds, dict) else [kinds]  # one per kind of layer, or a single one
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in named)


def of_whole_rows(module: nn.Module) -> None:
    """Make such a module use the length of whole rows inside `activated`."""
    module.register_forward_pre_hook(_with_last, with_kwargs=True)
    module.register_forward_hook(_without_last)


def _with_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    row_context = current()
    if row_context is None:
        return None
    ids = args[1] if len(args) > 1 else kwargs["position_ids"]
    longer = torch.cat([ids, row_context.last_positions(len(ids), ids.device)], -1)
    if len(args) > 1:
        return (args[0], longer, *args[2:]), kwargs
    return args, {**kwargs, "position_ids": longer}


def _without_last(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> Any:
    return None if current() is None else tuple(table[:, :-1] for table in output)
