"""The state of torch's random numbers, for a recomputation that must draw the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of the host's generator, and of the GPU's if it computes on one."""

    host: Tensor
    gpu: Tensor | None
    torch_device: torch.device

    @classmethod
    def of(cls, torch_device: torch.device) -> RandomState:
        gpu = torch.cuda.get_rng_state(torch_device) if torch_device.type == "cuda" else None
        return cls(torch.get_rng_state(), gpu, torch_device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw numbers inside from this state; outside nothing changes."""
        with torch.random.fork_rng([] if self.gpu is None else [self.torch_device]):
            torch.set_rng_state(self.host)
            if self.gpu is not None:
                torch.cuda.set_rng_state(self.gpu, self.torch_device)
            yield
