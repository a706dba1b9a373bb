"""How a device reaches the other devices of its pipeline, and the form of hidden states in transit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenpipe.communication.communicator import Communicator
from evenpipe.communication.communicators import Communicators
from evenpipe.schedule import Transfer


@dataclass(frozen=True, slots=True)
class Transport:
    """The communication of a device, for the handlers of its passes and transfers."""

    communicators: Communicators | None
    """None for a single device."""
    ranks: Sequence[int]
    """Global rank of each device's process."""
    hidden_size: int
    hidden_dtype: torch.dtype
    """Of the hidden states between stages."""
    torch_device: torch.device
    tensor_ranks: int = 1
    """Number of processes that share the rows of hidden states between stages; each has its own column of the grid."""

    def communicator(self, item: Transfer) -> Communicator:
        """Return the communicator that carries a transfer."""
        assert self.communicators is not None
        return self.communicators[item.communicator]

    def root(self, item: Transfer) -> int:
        """Return the global rank of a transfer's root."""
        assert item.root is not None
        return self.ranks[item.root]

    def rows(self, count: int) -> Tensor:
        """Return a buffer for hidden states [count, hidden_size]."""
        return torch.empty((count, self.hidden_size), dtype=self.hidden_dtype, device=self.torch_device)
