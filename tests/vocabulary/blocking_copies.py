"""Copies between the host and another device, and whether the host waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class BlockingCopies(TorchDispatchMode):
    """Counts copies between the host and another device, and those of them that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.blocking = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_copy = func in {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
        if is_copy:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device != result.device:
                self.copies += 1
                self.blocking += not (kwargs.get("non_blocking") or args[2:] == (True,))
        return result
