"""The progress of CUDA streams, written by the GPU into host memory.

The thread of the watch asks whether a transfer that a GPU waits for has arrived, and must not call CUDA:
`torch.cuda.Event.query` holds the GIL (THCPEvent_query in torch/csrc/cuda/Event.cpp), and the driver may answer only
after a call of the main thread, such as loading a kernel, which can wait for the GPU, and so for a peer. Meanwhile the
thread could not send heartbeats, and the others would take a healthy process for dead.

So after each wait the stream writes the next number into memory, which the watch reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

STREAMS = 256
"""Number of streams with a slot, more than torch has on a device (32 per priority, and the default one)."""


class Arrivals:
    """One per device, by `arrivals_on`. A stream writes its numbers in order; streams are not ordered among each other,
    so each has a slot."""

    def __init__(self, torch_device: torch.device) -> None:
        """Allocate everything now: pinning memory later would wait for the GPU."""
        self._torch_device = torch_device
        host = _pinned(STREAMS)
        device = _mapped(host, torch_device)
        self._numbers = host.numpy()
        self._written = device.unbind()
        # Memory pinned for another GPU is not visible from this one: then use device memory and a copy. Avoid the copy
        # otherwise: the engine for copies to the host does one at a time, and may be copying activations.
        self._copied = None if device.data_ptr() == host.data_ptr() else host.unbind()
        self._slots: dict[int, int] = {}
        self._last = [0] * STREAMS
        for index in range(STREAMS):  # load kernels (one per alignment) while nobody waits for this process
            self._write(index, 0)

    def mark(self) -> Callable[[], bool]:
        """Mark the work queued on the current stream. Return a function that returns whether the stream has done it,
        callable on any thread and without CUDA. If the GPU fails, it stays False."""
        stream = torch.cuda.current_stream(self._torch_device).cuda_stream
        index = self._slots.get(stream, len(self._slots))
        if index == STREAMS:  # more streams than slots: waits on this one are not watched
            return lambda: True
        self._slots[stream] = index
        number = self._last[index] = self._last[index] + 1
        self._write(index, number)
        return lambda: bool(self._numbers[index] >= number)

    def _write(self, index: int, number: int) -> None:
        """Write on the current stream: a kernel with a single thread, some microseconds to start and to run."""
        self._written[index].fill_(number)
        if self._copied is not None:
            self._copied[index].copy_(self._written[index], non_blocking=True)


@functools.cache
def arrivals_on(torch_device: torch.device) -> Arrivals:
    """Return the arrivals of a device. They live as long as the process: the GPU may still write after the last
    communicator is closed, and torch, which does not know that, would reuse the memory."""
    return Arrivals(torch_device)


class _AsOnDevice:
    """Pinned host memory, presented to torch as GPU memory of another library, with the same address on both."""

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
