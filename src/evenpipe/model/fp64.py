"""Makes models compute in fp64 what they always compute in fp32.

Many families cast norms, routers or attention to fp32, whatever their dtype. Two correct programs that add in different
orders then differ by 1e-7, and by 1e-4 where a gradient is a small difference of large numbers. Without these casts
they agree to 1e-12, so that any larger difference is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode


class InFp64(TorchFunctionMode):
    """In this context, on this thread, functions of torch that are asked for fp32 give fp64."""

    _entered = threading.local()

    @classmethod
    def is_entered(cls) -> bool:
        """Return whether this thread is in such a context."""
        return getattr(cls._entered, "times", 0) > 0

    def __enter__(self) -> Self:
        self._entered.times = getattr(self._entered, "times", 0) + 1
        super().__enter__()
        return self

    def __exit__(self, *of_error: Any) -> None:
        super().__exit__(*of_error)
        self._entered.times -= 1

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = [torch.float64 if value is torch.float32 else value for value in args]  # a function would be slower
        if not kwargs:
            return function(*wide)
        return function(
            *wide, **{name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        )
