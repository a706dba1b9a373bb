"""Sums of gradients over replicas: every replica has all parameters of its devices, and all get the same sums.

A device sums in parts (its stages, its rows of the vocabulary), each as soon as its last gradient of the step is added,
while other passes go on:

    replica 0   ... W  [sum of stage 1, under way ........]
    replica 1   ... W  [sum of stage 1, under way ........]   finish: waits, puts the sums in place

Token weights are normalised over all replicas beforehand, so gradients need sums, not means.

Gradients may accumulate over several steps. Those of earlier steps are sums already: the first replica keeps them, the
others start each step without, so that they enter the next sum once. This needs no memory beyond one bucket per part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from evenpipe.communication.communicator import Communicator, Handle

ALONE_ELEMENTS = 1 << 18
"""Larger gradients are summed in place; smaller ones of a part are copied into one bucket."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One sum in progress."""

    handle: Handle
    buffer: Tensor
    parameters: Sequence[nn.Parameter]
    """Parameters whose gradients are in the buffer, one after the other; a single one has its own shape."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The sums of one part in progress."""

    what: str
    buckets: list[_Bucket]
    missing: Mapping[nn.Parameter, int]
    """Parameters without a gradient here, and where the first bucket has the number of replicas with one."""


class ReplicatedGradients:
    """Sums the gradients of this device's parameters over all replicas, part by part."""

    def __init__(self, parts: Mapping[str, Iterable[nn.Parameter]], sums: Communicator, *, is_first: bool) -> None:
        """
        Args:
            parts: parameters by part; each parameter in one part. The same on all replicas, in the same order.
            sums: over replicas: contributes to and receives every sum.
            is_first: whether this is the replica that keeps sums of earlier steps.
        """
        self._all = {name: list(parameters) for name, parameters in parts.items()}
        self._sums = sums
        self._is_first = is_first
        self._under_way: list[_Part] = []
        self.follow_flags()

    def follow_flags(self) -> None:
        """Sum only the gradients of parameters that are trainable now. Between steps, on all replicas."""
        self._parts = {name: [one for one in held if one.requires_grad] for name, held in self._all.items()}

    def begin(self) -> None:
        """Prepare for the first backward of a step."""
        self._under_way.clear()
        if not self._is_first:
            for parameter in chain.from_iterable(self._parts.values()):
                parameter.grad = None

    @torch.no_grad()
    def reduce(self, part: str) -> None:
        """After the last gradient of a part: issue its sums. In the same order on all replicas."""
        parameters = self._parts[part]
        if not parameters:
            return
        what = f"gradients of {part}"
        small = [parameter for parameter in parameters if parameter.numel() < ALONE_ELEMENTS]
        counts = parameters[0].new_ones(len(parameters), requires_grad=False)
        missing = [index for index, parameter in enumerate(parameters) if parameter.grad is None]
        if missing:
            counts[missing] = 0
        first = torch.cat([*(_gradient(parameter).flatten() for parameter in small), counts])
        buckets = [_Bucket(self._sums.all_reduce(first, what), first, small)]
        for parameter in parameters:
            if parameter.numel() >= ALONE_ELEMENTS:
                gradient = _gradient(parameter).contiguous()
                buckets.append(_Bucket(self._sums.all_reduce(gradient, what), gradient, [parameter]))
        start = first.numel() - len(parameters)
        self._under_way.append(_Part(what, buckets, {parameters[index]: start + index for index in missing}))

    @torch.no_grad()
    def finish(self) -> None:
        """At the end of the step: wait for all sums and put them in place.

        A parameter that no replica has a gradient for stays without one, as in one process.
        """
        for part in self._under_way:
            for bucket in part.buckets:
                bucket.handle.wait("the optimizer")
            counts = part.buckets[0].buffer
            nowhere = {one for one, place in part.missing.items() if not counts[place]}
            for bucket in part.buckets:
                _put_in_place(bucket, nowhere)
        self._under_way.clear()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _put_in_place(bucket: _Bucket, nowhere: set[nn.Parameter]) -> None:
    start = 0
    for parameter in bucket.parameters:
        summed = bucket.buffer.flatten()[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
        if parameter in nowhere:
            continue
        if parameter.grad is None:
            parameter.grad = summed.clone()
        elif parameter.grad.data_ptr() != summed.data_ptr():
            parameter.grad.copy_(summed)
