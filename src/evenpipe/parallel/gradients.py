"""Sums of gradients over processes that hold the same parameters, or different parts of them.

    replicas, context ranks    for a stage or a vocabulary matrix, as soon as its last gradient of the step is added,
                               while other passes go on; all processes get the same sums
    tensor ranks               once per step, for parameters that several ranks hold
    two devices                once per step, for tied weights of which both have a copy
    shards over replicas       each process gets the sums of its own rows (`fsdp.py`)

Token weights are normalised over all replicas beforehand, so gradients need sums, not means. A parameter for which no
process has a gradient gets none, as in a single process.

Gradients may accumulate over several steps. Those of earlier steps are already sums: the first copy keeps them and the
others start each step without a gradient, so that they enter the next sum once, without additional memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from evenpipe.communication.communicator import Communicator, Handle
from evenpipe.model.placement import Held
from evenpipe.model.products import SUMMED

IN_PLACE_ELEMENTS = 1 << 18
"""Gradients with at least this many elements are summed in place; smaller ones are copied into one bucket."""


class Summand(Protocol):
    """A gradient in a bucket."""

    @property
    def size(self) -> int:
        """Number of elements in each row of the bucket."""
        ...

    def moves(self, rows: Tensor) -> Sequence[tuple[Tensor, Tensor]] | None:
        """Return the copies (to, from) that write the gradient into its part [rows, size] of a zeroed bucket; None if
        this process has no gradient."""
        ...

    def take(self, summed: Tensor) -> None:
        """Use the sum [size], a part of the bucket."""
        ...


class Bucket:
    """A sum in progress, of several gradients that follow one another in one tensor.

    After them come counts: how many processes have each gradient. Only a process that lacks a gradient reads its count,
    so usually no process waits for the device.
    """

    def __init__(
        self,
        summands: Sequence[Summand],
        like: Tensor,
        communicator: Communicator,
        label: str,
        *,
        scatter: bool = False,
    ) -> None:
        """Begin the sum.

        Args:
            summands: the same on all processes of the communicator, in the same order.
            like: a tensor with the dtype and the device of the bucket.
            label: names the sum in messages.
            scatter: give the bucket a row for every process, which gets the sums of its own row; otherwise it has one
                row, and all processes get all sums.
        """
        self._summands = summands
        self._sizes = [*(summand.size for summand in summands), len(summands)]
        rows = like.new_zeros((len(communicator.members) if scatter else 1, sum(self._sizes)))
        *parts, counts = rows.split(self._sizes, dim=1)
        counts.fill_(1)
        moves = [summand.moves(chunk) for summand, chunk in zip(summands, parts, strict=True)]
        self._missing = {index for index, move in enumerate(moves) if move is None}
        for index in self._missing:
            counts[:, index] = 0
        pairs = [pair for move in moves if move for pair in move]
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
        moves.clear()
        pairs.clear()  # frees the gradients that were taken
        self._sums = rows.new_empty(rows.shape[1]) if scatter else rows[0]
        self._handle = (
            communicator.reduce_scatter(self._sums, rows, label) if scatter else communicator.all_reduce(rows[0], label)
        )

    def finish(self) -> None:
        """Wait, and give each summand its sum."""
        self._handle.wait("the optimizer")
        *sums, counts = self._sums.split(self._sizes)
        for index, (summand, summed) in enumerate(zip(self._summands, sums, strict=True)):
            if index not in self._missing or counts[index]:
                summand.take(summed)


@dataclass(frozen=True, slots=True)
class _Gradient:
    """The gradient of a parameter of which processes hold copies, or several different parts."""

    parameter: nn.Parameter
    index: int
    """Index of the part that this process has."""
    parts: int
    in_place: Tensor | None
    """The gradient to sum in place, in which case its part of the bucket is empty; None to sum it in the bucket."""

    @property
    def size(self) -> int:
        return self.parts * self.parameter.numel() if self.in_place is None else 0

    def moves(self, rows: Tensor) -> Sequence[tuple[Tensor, Tensor]] | None:
        gradient = self.parameter.grad
        if gradient is None:
            return None
        return [(self._slot(rows), gradient)] if self.in_place is None else []

    def take(self, summed: Tensor) -> None:
        local, gradient = self._slot(summed) if self.in_place is None else self.in_place, self.parameter.grad
        if gradient is None:
            self.parameter.grad = local.clone() if self.in_place is None else local
        elif gradient is not local:
            gradient.copy_(local)

    def _slot(self, row: Tensor) -> Tensor:
        return row.view(self.parts, *self.parameter.shape)[self.index]


class GradientReducer:
    """Sums gradients over processes that hold the same parameters.

    Args:
        held: these parameters, in the same order on all processes of the communicator.
        communicator: its processes contribute to every sum and receive it.
        axes: those along which its processes differ. If a parameter is cut along exactly these axes, the processes hold
            several parts, which are summed separately.
        label: names the sums in messages.
        in_place: number of elements from which on a gradient is summed in place, by its own collective.
        set_aside: set gradients of earlier steps aside and add the sums to them afterwards, instead of leaving them
            with the first copy. This takes the memory of a second gradient.
    """

    def __init__(
        self,
        held: Iterable[Held[nn.Parameter]],
        communicator: Communicator,
        axes: Sequence[str],
        label: str,
        *,
        in_place: float = IN_PLACE_ELEMENTS,
        set_aside: bool = False,
    ) -> None:
        self._held, self._communicator, self._axes, self._label = list(held), communicator, tuple(axes), label
        self._in_place, self._set_aside = in_place, set_aside
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []
        self._buckets: list[Bucket] = []
        self._handles: list[Handle] = []
        """Handles of the sums in place."""

    def _trained(self) -> Iterator[Held[nn.Parameter]]:
        return (held for held in self._held if held.tensor.requires_grad)

    def begin(self) -> None:
        """Prepare for the first backward of a step. Gradients of frozen parameters are unchanged."""
        self._release()
        for held in self._trained():
            parameter = held.tensor
            if self._set_aside and parameter.grad is not None:
                self._earlier.append((parameter, parameter.grad))
            if self._set_aside or not held.placement.is_first_copy(*self._axes):
                parameter.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Issue the sums after the last gradient of a step, in the same order on all processes."""
        by_dtype: dict[torch.dtype, list[_Gradient]] = {}
        for held in self._trained():
            by_dtype.setdefault(held.tensor.dtype, []).append(self._gradient(held))
        for gradients in by_dtype.values():
            self._buckets.append(Bucket(gradients, gradients[0].parameter, self._communicator, self._label))
            in_place = [gradient.in_place for gradient in gradients if gradient.in_place is not None]
            self._handles += [self._communicator.all_reduce(gradient, self._label) for gradient in in_place]

    def _gradient(self, held: Held[nn.Parameter]) -> _Gradient:
        parameter, in_place = held.tensor, None
        if parameter.numel() >= self._in_place:
            in_place = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        cut = next((cut for cut in held.placement.cuts if cut.axes == self._axes), None)
        return _Gradient(parameter, *((0, 1) if cut is None else (cut.part, cut.parts)), in_place)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all sums, and store them as gradients."""
        for handle in self._handles:
            handle.wait("the optimizer")
        for bucket in self._buckets:
            bucket.finish()
        for parameter, earlier in self._earlier:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._release()

    def _release(self) -> None:
        self._earlier.clear()
        self._buckets.clear()
        self._handles.clear()


class AddTo:
    """A hook that adds a gradient, as soon as autograd has finished it, to that of a target, in the target's dtype.

    It has no reference to the parameter on which it is registered: torch keeps hooks where Python's garbage collector
    does not see them, so a cycle would never be freed.
    """

    def __init__(self, target: Accumulated) -> None:
        self._target = target

    def register(self, parameter: Tensor) -> None:
        """Register the hook on a parameter, and tell products that can add directly where to add."""
        parameter.register_post_accumulate_grad_hook(self)
        if self._target.dtype == torch.float32:
            setattr(parameter, SUMMED, self._target)

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:  # a kernel has already added to the target
            return
        if self._target.grad is None:
            self._target.grad = gradient.to(self._target.dtype)
        else:
            self._target.grad.add_(gradient)
        parameter.grad = None


class Accumulated(Protocol):
    """A master, or anything else that has a gradient."""

    grad: Tensor | None

    @property
    def dtype(self) -> torch.dtype: ...
