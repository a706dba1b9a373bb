"""The progress of a GPU's streams, written by the GPU into host memory.

The thread of the watch asks whether a transfer that a GPU waits for has arrived, and must not call CUDA.
`torch.cuda.Event.query` keeps the interpreter's lock (THCPEvent_query in torch/csrc/cuda/Event.cpp), and the driver may
answer only after a call of the main thread: loading a kernel, for example, which can wait for the GPU, and so for a
peer. Without that lock the thread cannot send heartbeats, and the others would take a healthy process for dead.

So after each wait the stream writes a number, one more than the last time, and the watch reads memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

STREAMS = 256
"""Number of streams with a slot, more than torch has on a device (32 per priority, and the default one)."""


class Arrivals:
    """One per device, by `arrivals_on`. A stream writes its numbers in order; between streams there is no order, so
    each has a slot."""

    def __init__(self, torch_device: torch.device) -> None:
        """Allocate everything now: pinning memory later would wait for the GPU."""
        self._torch_device = torch_device
        host = _pinned(STREAMS)
        device = _mapped(host, torch_device)
        self._numbers = host.numpy()
        self._written = device.unbind()
        # Memory pinned for another GPU is not visible from this one: then use device memory and a copy. Not always,
        # since the engine that copies to the host does one thing at a time, and activations may be on their way there.
        self._copied = None if device.data_ptr() == host.data_ptr() else host.unbind()
        self._places: dict[int, int] = {}
        self._last = [0] * STREAMS
        for index in range(STREAMS):  # load kernels while nobody waits for this process: torch has one per alignment
            self._write(index, 0)

    def mark(self) -> Callable[[], bool]:
        """Mark the work queued on the current stream. Return a function that tells whether the stream has done it,
        callable on any thread and without CUDA. If the GPU fails, it stays False."""
        stream = torch.cuda.current_stream(self._torch_device).cuda_stream
        index = self._places.get(stream, len(self._places))
        if index == STREAMS:  # streams of others: waits on the last ones are not watched
            return lambda: True
        self._places[stream] = index
        number = self._last[index] = self._last[index] + 1
        self._write(index, number)
        return lambda: bool(self._numbers[index] >= number)

    def _write(self, index: int, number: int) -> None:
        """Write in the current stream: one kernel of one thread, some microseconds to start and to run."""
        self._written[index].fill_(number)
        if self._copied is not None:
            self._copied[index].copy_(self._written[index], non_blocking=True)


@functools.cache
def arrivals_on(torch_device: torch.device) -> Arrivals:
    """Return the arrivals of a device, for the lifetime of the process: the GPU may still write after the last
    communicator is gone, and torch, which does not know that, would reuse the memory."""
    return Arrivals(torch_device)


class _AsOnDevice:
    """Pinned host memory in the form in which torch accepts GPU memory of other libraries, under one address for
    both."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i8",
            "data": (host.data_ptr(), False),  # writable
            "version": 2,
        }


def _pinned(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)


def _mapped(host: Tensor, torch_device: torch.device) -> Tensor:
    """Return `host` as a tensor of the GPU, or a device copy if it belongs to another GPU or torch does not accept
    it."""
    try:
        return torch.as_tensor(_AsOnDevice(host), device=torch_device)
    except (RuntimeError, TypeError, ValueError):
        return host.to(torch_device)
