"""The tensor ranks of a device: they exchange rows within passes, and sum the gradients of what all of them hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.communication.communicator import Communicator, Handle
from evenpipe.model.placement import Held, TensorPlacement
from evenpipe.parallel.running import Running


class TensorRanks:
    """An `Exchange` of `tensor.exchange` between processes."""

    def __init__(self, communicator: Communicator, running: Running) -> None:
        """communicator: of the tensor ranks of this device, in their order."""
        self.communicator = communicator
        self.size, self.rank = len(communicator.members), communicator.position
        self.running = running
        self.overlap: Any = None
        """The `Overlap` of transfers and products; None: one after the other."""
        self.arrived: Tensor | None = None
        """All rows of the last gather that products ran beside."""

    @property
    def repeats(self) -> bool:
        """The backward of this pass follows at once (R)."""
        return self.running.repeats

    def gather(self, rows: Tensor) -> Tensor:
        """Return [n, ...]: the rows [n/t, ...] of all ranks, one rank after the other."""
        gathered: Tensor = self.start_gather(rows).wait()
        return gathered

    def start_gather(self, rows: Tensor) -> Handle:
        """Begin `gather`."""
        table = rows.new_empty((self.size, *rows.shape))
        handle = self.communicator.all_gather(table, rows, f"rows of {self.running.text}")
        return handle.giving(table.flatten(0, 1))

    def scatter(self, partial: Tensor) -> Tensor:
        """Return the own rows [n/t, ...] of the sum over ranks of [n, ...]."""
        own: Tensor = self.start_scatter(partial).wait()
        return own

    def start_scatter(self, partial: Tensor) -> Handle:
        """Begin `scatter`."""
        parts = partial.view(self.size, -1, *partial.shape[1:]).clone()  # may still be used, and is destroyed
        own = torch.empty_like(parts[0])
        handle = self.communicator.reduce_scatter(own, parts, f"sum of {self.running.text}")
        return handle.giving(own)

    def pass_on(self, rows: Tensor, buffer: Tensor, what: str) -> Handle:
        """Begin to send rows to the next rank, and to fill the buffer with those of the previous one."""
        return self.communicator.pass_on(rows, buffer, f"{what} of {self.running.text}").giving(buffer)

    def started(self, what: str) -> None:
        """Let the watch know of an exchange that torch has started by itself."""
        self.communicator.started(f"{what} of {self.running.text}").wait()

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks, a new tensor."""
        total = partial.clone(memory_format=torch.contiguous_format)
        self.communicator.all_reduce(total, f"sum of {self.running.text}").wait()
        return total

    def table(self, own: Tensor) -> Tensor:
        """Return [t, ...]: what each rank has."""
        table = own.new_empty((self.size, *own.shape))
        self.communicator.all_gather(table, own, f"statistics of {self.running.text}").wait()
        return table


class SharedGradients:
    """Sums, once a step, the gradients of parameters that all tensor ranks of a device hold whole, or several of them.

    Between blocks each rank has its own rows, and inside it has its own heads or columns, so every gradient of such a
    parameter is partial. As for replicas, gradients of earlier steps are sums already: the first rank keeps them, the
    others start each step without.
    """

    def __init__(self, shared: Sequence[Held[nn.Parameter]], communicator: Communicator) -> None:
        """shared: these parameters, in the same order on all ranks."""
        self._communicator = communicator
        self._shared = shared

    def begin(self) -> None:
        """Prepare for the first backward of a step. Gradients of frozen parameters stay as they are, on all ranks."""
        for one in self._shared:
            if "tp" in one.placement.copied_along and one.tensor.requires_grad:
                one.tensor.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward of a step, and the sums over replicas: all ranks get the same sums.

        A parameter that no rank has a gradient for stays without one.
        """
        trained = [one for one in self._shared if one.tensor.requires_grad]
        alike: dict[torch.dtype, list[Held[nn.Parameter]]] = {}
        for one in trained:
            alike.setdefault(one.tensor.dtype, []).append(one)
        for together in alike.values():
            self._sum(together)

    def _sum(self, together: Sequence[Held[nn.Parameter]]) -> None:
        parts, counts = [], []
        for one in together:
            gradient, (place, places) = one.tensor.grad, _places(one.placement)
            counts.append(0.0 if gradient is None else 1.0)
            wide = one.tensor.new_zeros((places, *one.tensor.shape))
            if gradient is not None:
                wide[place] = gradient
            parts.append(wide.flatten())
        first = together[0].tensor
        bucket = torch.cat([*parts, torch.tensor(counts, dtype=first.dtype, device=first.device)])
        self._communicator.all_reduce(bucket, "gradients that tensor ranks share").wait("the optimizer")
        present = bucket[-len(together) :]
        start = 0
        for one, part, count in zip(together, parts, present.tolist(), strict=True):
            place, places = _places(one.placement)
            summed = bucket[start : start + part.numel()].view(places, *one.tensor.shape)[place]
            start += part.numel()
            if not count:
                continue
            if one.tensor.grad is None:
                one.tensor.grad = summed.clone()
            else:
                one.tensor.grad.copy_(summed)


def _places(placement: TensorPlacement) -> tuple[int, int]:
    """Return which of several different parts a rank holds, and their number: heads that some ranks share."""
    cut = next((one for one in placement.cuts if one.axes == ("tp",)), None)
    return (0, 1) if cut is None else (cut.part, cut.parts)
