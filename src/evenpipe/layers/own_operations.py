"""Defines computations of evenpipe as single torch operations.

A dispatch mode sees each of them as one operation, so that "selective" checkpointing keeps its result like those of
other products, and repeats neither the products inside it nor their transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from evenpipe.layers.checkpointing import PRODUCTS
from evenpipe.model.fp64 import InFp64

_library = torch.library.Library("evenpipe", "DEF")

WITHIN: dict[str, Callable[..., Any]] = {}
"""The function that each operation runs, by its full name, to count allocations inside it."""


def own_operation(signature: str, computed: Callable[..., Any], *, is_product: bool = True) -> Any:
    """Define an operation `torch.ops.evenpipe.<name>` and return it.

    Args:
        signature: "name(Tensor x, ...) -> Tensor": results share no memory with arguments.
        computed: the function that it runs.
        is_product: "selective" checkpointing keeps its result.
    """

    def run(*arguments: Any) -> Any:
        with InFp64() if InFp64.is_entered() else nullcontext():  # torch disables function modes inside operations
            return computed(*arguments)

    name = signature.partition("(")[0]
    _library.define(signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    operation = getattr(torch.ops.evenpipe, name).default
    WITHIN[operation.name()] = computed
    if is_product:
        PRODUCTS.append(operation)
    return operation
