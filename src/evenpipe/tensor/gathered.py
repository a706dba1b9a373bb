"""The input of a block, of which a rank keeps only its own rows from F to the weight gradients.

The layers that multiply it save the own rows, and the rows of all ranks are gathered again for their weight gradients:
in W once for all of them; in a backward that is not split while input gradients are made, and the weight gradients are
made while the input's gradient is summed:

    B   [gather x again ........]                [sum of dx .........]
        dy Wq   dy Wk   dy Wv -> dx, to be summed   dy^T x of q, k, v

Korthikanti et al., arXiv 2205.05198, section 4.2.2, keep the rows likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from evenpipe.tensor.exchange import Exchange, Pending, all_rows, formed


class Gathered:
    """The input of one call of a block. Layers find it as `_source` meanwhile."""

    def __init__(self, rows: Tensor, exchange: Exchange, *, keeps: bool) -> None:
        """keeps: whether layers save all rows: what they save is freed before the backward, which repeats this forward,
        or this is the repeated forward."""
        self._exchange = exchange
        self._keeps = keeps
        self._saved: ReferenceType[Tensor] | None = ref(rows)
        """What layers save, during the call. The call owns it: nothing ends a repeated forward that has saved all."""
        self._address, self._elements = 0, rows.numel() * exchange.size
        self._uses = 0
        self._started: Pending | None = None
        self._whole: Tensor | None = None
        self._waiting: list[Callable[[], None]] = []

    def opened(self, whole: Tensor) -> None:
        """Begin the call: `whole` is what the block gets."""
        self._address = whole.untyped_storage()._cdata
        if self._keeps:
            self._saved = ref(whole)

    def close(self) -> None:
        """End the call."""
        self._saved = None

    def gave(self, hidden: Tensor) -> bool:
        """Return whether a layer's input is all of what was gathered."""
        is_all = hidden.numel() == self._elements
        return self._saved is not None and is_all and hidden.untyped_storage()._cdata == self._address

    def save(self) -> Tensor:
        """Return what a layer saves for its weight gradient."""
        saved = None if self._saved is None else self._saved()
        assert saved is not None
        self._uses += 1
        return saved.detach()

    def start(self, saved: Tensor) -> None:
        """Begin to gather again, in a backward that needs it soon."""
        if not self._is_whole(saved) and self._started is None and self._whole is None:
            self._started = self._exchange.start_gather(saved.reshape(-1, saved.shape[-1]).contiguous())

    def whole(self, saved: Tensor) -> Tensor:
        """Return all rows [n, h], from what a layer has saved. Called once by each layer that has."""
        if self._is_whole(saved):
            return saved.reshape(-1, saved.shape[-1])
        if self._whole is None:
            self.start(saved)
            assert self._started is not None
            self._whole, self._started = self._started.wait(), None
        whole = self._whole
        self._uses -= 1
        if not self._uses:
            self._whole = None
        return whole

    def _is_whole(self, saved: Tensor) -> bool:
        """Return whether a layer has saved all rows."""
        return saved.numel() == self._elements

    def later(self, work: Callable[[], None]) -> None:
        """Do this while the input's gradient is summed."""
        self._waiting.append(work)

    def run(self) -> None:
        """Do what was left for later."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()


class GatherInput(torch.autograd.Function):
    """Own rows -> all rows, as `exchange.Gather`; weight gradients are made while the backward sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathered: Gathered, exchange: Exchange) -> Tensor:
        ctx.gathered, ctx.exchange = gathered, exchange
        whole = all_rows(rows, exchange)
        gathered.opened(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        *outer, length, width = gradient.shape
        summed = ctx.exchange.start_scatter(gradient.reshape(-1, width).contiguous())
        ctx.gathered.run()
        return formed(summed.wait(), (*outer, length // ctx.exchange.size, width)), None, None


def set_source(layers: Iterable[nn.Module], gathered: Gathered | None) -> None:
    """Tell layers what their input may be."""
    for layer in layers:
        layer.__dict__["_source"] = gathered
