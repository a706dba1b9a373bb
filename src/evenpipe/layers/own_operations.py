"""Computations of ours as single operations of torch.

A dispatch mode sees each of them as a whole, so that "selective" checkpointing keeps its result like those of other
products, and repeats neither the products inside of it nor their transfers.
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
"""What each operation runs, by its full name, for those who count what is allocated inside of it."""


def own_operation(signature: str, computed: Callable[..., Any], *, is_product: bool = True) -> Any:
    """Define an operation `torch.ops.evenpipe.<name>` and return it.

    Args:
        signature: "name(Tensor x, ...) -> Tensor": results share no memory with arguments.
        computed: what it runs.
        is_product: "selective" checkpointing keeps its result.
    """

    def run(*arguments: Any) -> Any:
        with InFp64() if InFp64.is_entered() else nullcontext():  # torch leaves function modes outside of operations
            return computed(*arguments)

    name = signature.partition("(")[0]
    _library.define(signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    operation = getattr(torch.ops.evenpipe, name).default
    WITHIN[operation.name()] = computed
    if is_product:
        PRODUCTS.append(operation)
    return operation
