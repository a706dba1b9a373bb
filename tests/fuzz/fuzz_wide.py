"""Models in fp64 throughout.

transformers computes norms, softmax, routers and more in fp32, whatever the dtype of the model. Pieces of a sequence
and tensor ranks add these numbers in another order, and gradients that are small differences of large terms, such as
those of the bias of keys, then differ in the sixth digit. In fp64 they agree to the tenth.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextlib.contextmanager
def all_in_fp64() -> Iterator[None]:
    """Within it, what transformers asks of an fp64 tensor to be fp32 remains fp64."""
    with contextlib.ExitStack() as stack:
        for holder, name in (
            (Tensor, "to"),
            (Tensor, "type"),
            (Tensor, "softmax"),
            (torch, "softmax"),
            (torch.nn.functional, "softmax"),
        ):
            stack.enter_context(mock.patch.object(holder, name, _without_fp32(getattr(holder, name))))
        stack.enter_context(mock.patch.object(Tensor, "float", _unless_fp64(Tensor.float)))
        yield


def _without_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wide(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        if tensor.dtype == torch.float64 and _is_asked_by_transformers():
            arguments = tuple(torch.float64 if one is torch.float32 else one for one in arguments)
            named = {name: torch.float64 if one is torch.float32 else one for name, one in named.items()}
        return function(tensor, *arguments, **named)

    return wide


def _unless_fp64(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @wraps(function)
    def wide(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 and _is_asked_by_transformers() else function(tensor)

    return wide


def _is_asked_by_transformers() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("transformers.")
