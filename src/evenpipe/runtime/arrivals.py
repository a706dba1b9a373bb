"""How far the streams of a GPU have come, written by the GPU into host memory.

The thread of the watch asks whether what a GPU waits for has come, and must not ask CUDA. `torch.cuda.Event.query`
keeps the interpreter's lock (THCPEvent_query in torch/csrc/cuda/Event.cpp), and the driver may answer it only after
what the main thread has asked for: loading a kernel, say, which can wait for the GPU, and so for a peer. Without that
lock the thread cannot beat, and the others would give up a healthy process.

So after each wait the stream that waited writes a number, one more than the last time, and the watch reads memory.
Written without a GPU at hand; not yet run on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

STREAMS = 256
"""So many have a place each, more than torch has of its own on a device (32 per priority, and the default one)."""


class Arrivals:
    """One per device, by `arrivals_on`. In a stream numbers are written in their order; between streams there is none,
    so each has a place of its own."""

    def __init__(self, torch_device: torch.device) -> None:
        """All that is ever needed is made here: pinned memory is not to be had without waiting for the GPU."""
        self._torch_device = torch_device
        host = _pinned(STREAMS)
        device = _mapped(host, torch_device)
        self._numbers = host.numpy()
        self._written = device.unbind()
        # Memory that was pinned for another GPU is not seen from this one: then through memory of its own. Not always,
        # since the engine that copies to the host does one thing at a time, and activations may be on their way there.
        self._copied = None if device.data_ptr() == host.data_ptr() else host.unbind()
        self._places: dict[int, int] = {}
        self._last = [0] * STREAMS
        self._write(0, 0)  # loads the kernel while nobody waits for this process

    def mark(self) -> Callable[[], bool]:
        """Behind all that the current stream has been given. Returns what tells whether the stream has come so far,
        asked on any thread and without CUDA. If the GPU fails it never has."""
        stream = torch.cuda.current_stream(self._torch_device).cuda_stream
        place = self._places.get(stream, len(self._places))
        if place == STREAMS:  # streams that others have made: nobody watches what the last ones wait for
            return lambda: True
        self._places[stream] = place
        number = self._last[place] = self._last[place] + 1
        self._write(place, number)
        return lambda: bool(self._numbers[place] >= number)

    def _write(self, place: int, number: int) -> None:
        """In the current stream: one kernel of one thread, some microseconds to start and to run."""
        self._written[place].fill_(number)
        if self._copied is not None:
            self._copied[place].copy_(self._written[place], non_blocking=True)


@functools.cache
def arrivals_on(torch_device: torch.device) -> Arrivals:
    """Those of a device, as long as the process lives: the GPU may still write when the last communicator is gone, and
    torch, which does not know of that, would give the memory to somebody else."""
    return Arrivals(torch_device)


class _AsOnDevice:
    """Pinned host memory as torch takes memory of a GPU from other libraries. Both see it under one address."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i8",
            "data": (host.data_ptr(), False),  # not only to be read
            "version": 2,
        }


def _pinned(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)


def _mapped(host: Tensor, torch_device: torch.device) -> Tensor:
    """`host` as a tensor of the GPU; a copy of it where that is another one's, or where torch does not take it."""
    try:
        return torch.as_tensor(_AsOnDevice(host), device=torch_device)
    except (RuntimeError, TypeError, ValueError):
        return host.to(torch_device)
