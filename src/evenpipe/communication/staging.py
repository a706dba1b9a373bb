"""Copies between a GPU and pinned host memory, for processes that share a GPU, where gloo replaces NCCL."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Staging:
    """Copies tensors of a GPU to and from host memory."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]

    def to_host(
        self, reads: Tensor | None, writes: Tensor | None, both: Tensor | None
    ) -> tuple[list[Tensor], Callable[[], None] | None]:
        """Return host copies of these tensors, in this order, filled if they are read; and the function to call after
        the wait.

        Returns when the copies are complete, because gloo may read them at once. The host tensors live as long as the
        handle.
        """
        tensors = [tensor for tensor in (reads, writes, both) if tensor is not None]
        hosts = [self._host_memory(tensor) for tensor in tensors]
        out = [(tensor, host) for tensor, host in zip(tensors, hosts, strict=True) if tensor is not writes]
        if out:  # a plain receive does not wait for the GPU's computation
            self._copy_out(out)
        back = [(tensor, host) for tensor, host in zip(tensors, hosts, strict=True) if tensor is not reads]

        def finish() -> None:
            for tensor, host in back:
                tensor.copy_(host, non_blocking=True)  # pinned memory is not reused before this copy is done

        return hosts, finish if back else None

    def _host_memory(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def _copy_out(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy on a separate stream, after the work queued on the current one; complete on return."""
        self._stream.wait_stream(torch.cuda.current_stream(self._torch_device))
        with torch.cuda.stream(self._stream):
            for tensor, host in pairs:
                host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
