"""Bytes of tensors that live while code runs, of tensors without memory (`FakeTensorMode`) and of real ones alike.

    with FakeTensorMode(), Tracker() as tracker:    # in this order: the tracker sees what the fake mode returns
        hidden = torch.empty(...)
        with tracker.span() as forward:
            output = layer(hidden)
    forward.peak - forward.before                   # the most that lived at one moment, above what was there
    forward.after - forward.before                  # what is kept

Counted are storages, each once, however many tensors share it, from the operation that returns its first tensor to the
moment that it is given back: no collector is waited for. Operations in backwards are seen like all others. Not seen is
what an operation allocates and frees within itself. The counterpart for steps of a pipeline, with every pass by name,
is `evenpipe.runtime.accounting`: what both count is the same.

While anything watches operations, autograd sums gradients of one tensor out of place instead of in place
(`can_accumulate_inplace` of torch's input_buffer.cpp): both count one tensor of the size of such a gradient that an
unwatched run does not make.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = (Tensor, nn.Parameter, FakeTensor)


@dataclass(slots=True)
class Span:
    """Live bytes around a piece of code; `peak` and `after` are known when it is over."""

    before: int
    peak: int = 0
    after: int = 0

    @property
    def above(self) -> int:
        """The most that lived at one moment, above what lived at the beginning."""
        return self.peak - self.before

    @property
    def kept(self) -> int:
        """What lives at the end and did not at the beginning, less what lived at the beginning only."""
        return self.after - self.before


class Tracker(TorchDispatchMode):
    """Counts while it is entered; what is made outside is counted from `add` on.

    Attributes:
        live: bytes that live now.
        peak: the most that lived at one moment since the tracker was made, or the innermost span began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._living: dict[int, tuple[int, str, weakref.ref[Any]]] = {}

    def add(self, *tensors: Tensor) -> int:
        """Counts tensors that are there already. Returns the bytes that are new."""
        before = self.live
        for tensor in tensors:
            self._see(tensor, "")
        return self.live - before

    @contextmanager
    def span(self) -> Iterator[Span]:
        """What happens inside; spans may contain spans."""
        outer, self.peak = self.peak, self.live
        span = Span(self.live)
        try:
            yield span
        finally:
            span.peak, span.after = self.peak, self.live
            self.peak = max(outer, self.peak)

    def living(self) -> list[tuple[int, str]]:
        """(bytes, operation that made it) of all that lives now, largest first; no name for what was added."""
        return sorted(((size, name) for size, name, _ in list(self._living.values())), reverse=True)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # made of other tensors, as DTensor is: what it does with those comes here by itself
        result = operation(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, str(operation))
        return result

    def _see(self, tensor: Tensor, name: str) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        known = self._living.get(address)
        if known is not None and known[0] == size:
            return
        living = self._living

        def gone(_: object) -> None:
            self.live -= living.pop(address)[0]

        # A storage that an operation has given another size is counted anew; the first reference goes, and its call.
        self.live += size - (0 if known is None else known[0])
        living[address] = (size, name, weakref.ref(storage, gone))
        self.peak = max(self.peak, self.live)
