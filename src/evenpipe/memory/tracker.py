"""Count the bytes of live tensors while code runs, for real tensors and tensors without memory alike.

    with without_memory() as tracker:               # or `Tracker() as tracker`, for real tensors
        hidden = torch.empty(...)
        with tracker.span() as forward:
            output = layer(hidden)
    forward.peak - forward.before                   # peak live bytes, above those at the start
    forward.after - forward.before                  # bytes that are kept

Storages are counted once, however many tensors share them, from the operation that returns the first tensor until they
are freed, without waiting for a garbage collector. Operations in backwards are counted too; temporaries inside an
operation are not. The counterpart for steps of a pipeline, with every pass by name, is `evenpipe.runtime.accounting`,
which counts the same bytes.

While operations are watched, autograd sums gradients of a tensor out of place instead of in place
(`can_accumulate_inplace` in torch's input_buffer.cpp): both modules count one tensor of that size that an unwatched run
does not allocate.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenpipe.layers.own_operations import WITHIN

from .lines import Peak

_PLAIN = (Tensor, nn.Parameter)


@dataclass(slots=True)
class Span:
    """Live bytes around a piece of code; `peak` and `after` are known at its end."""

    before: int
    peak: int = 0
    after: int = 0

    @property
    def above(self) -> int:
        """Peak, above the live bytes at the start."""
        return self.peak - self.before

    @property
    def retained(self) -> int:
        """Bytes live at the end but not at the start, minus those live only at the start."""
        return self.after - self.before


class Tracker(TorchDispatchMode):
    """Counts inside the context; tensors made outside are counted once they are passed to `add`.

    Attributes:
        live: bytes that are live now.
        peak: peak of `live` since the tracker was created, or since the innermost span began.
        levels: peak of `live` since this attribute was last replaced, for bytes that are lines.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and torch's check for each operation is slow

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.levels = Peak(0)
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def add(self, *tensors: Tensor) -> int:
        """Count existing tensors. Return the new bytes."""
        initial = self.live
        for tensor in tensors:
            self._see(tensor)
        return self.live - initial

    @contextmanager
    def span(self) -> Iterator[Span]:
        """Measure the code inside; spans may be nested."""
        outer, self.peak = self.peak, self.live
        span = Span(self.live)
        try:
            yield span
        finally:
            span.peak, span.after = self.peak, self.live
            self.peak = max(outer, self.peak)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # made of other tensors, like DTensor: the operations on those are counted
        within = WITHIN.get(operation.name())
        if within is not None:
            with self:
                return within(*args)
        result = self.run(operation, args, kwargs or {})
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def measure(self, size: int) -> int:
        """Return the count of a number of bytes."""
        return size

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation, which is then counted."""
        return operation(*args, **kwargs)

    def _see(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, self.measure(storage.nbytes())
        known = self._living.get(address)
        if known is not None and known[0] == size:
            return
        living = self._living

        def on_freed(_: object) -> None:
            self.live -= living.pop(address)[0]

        # A resized storage is counted again; its first reference and callback are dropped.
        self.live += size - (0 if known is None else known[0])
        living[address] = (size, weakref.ref(storage, on_freed))
        self.peak = max(self.peak, self.live)
        self.levels.see(self.live)
