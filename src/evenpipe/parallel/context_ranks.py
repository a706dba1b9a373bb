"""The processes that share every sequence: attention layers gather keys and values, or exchange heads for tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from evenpipe.attention.row_context import Keys
from evenpipe.communication.communicator import Handle
from evenpipe.parallel.running import Ranks


class ContextRanks(Ranks):
    """An `Exchange` of `attention.row_context` between processes, each with a piece of every sequence.

    Only this rank's keys and values are kept from the forward to the backward, which gathers again and sums the
    gradients. This is correct for every mask and every order of tokens. Per layer and microbatch, a step moves three
    times (ranks - 1) / ranks of all keys and values: two gathers and a sum.
    """

    keeps_keys = True

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        """Return the keys and values of all ranks, rank after rank."""
        # Tokens are the first dimension of the messages, so that the gathered table is all keys without another copy.
        started = [
            self.communicator.all_gather(tensor.permute(2, 0, 1, 3).contiguous(), f"{label} of {self.running.text}")
            for tensor, label in ((key, "keys"), (value, "values"))
        ]
        keys, values = (handle.wait(self.running.text).flatten(0, 1).permute(1, 2, 0, 3) for handle in started)
        return keys, values

    def keys_again(self, layer: int, *key_and_value: Tensor) -> Keys:
        """Gather the same keys and values again, in the backward."""
        key, value = key_and_value
        return self.keys(layer, key, value)

    def gradients(self, layer: int, key: Tensor, value: Tensor, dtype: torch.dtype) -> Keys:
        """Return the gradients of this rank's keys and values, summed over ranks. May overwrite its arguments."""
        started = [self._start_sum(gradient.to(dtype), label) for gradient, label in ((key, "keys"), (value, "values"))]
        keys, values = (handle.wait(self.running.text).permute(1, 2, 0, 3) for handle in started)
        return keys, values

    def _start_sum(self, gradient: Tensor, label: str) -> Handle:
        parts = gradient.permute(2, 0, 1, 3).unflatten(0, (self.size, -1)).contiguous()
        local_sum = torch.empty_like(parts[0])
        return self.communicator.reduce_scatter(local_sum, parts, f"gradients of {label} of {self.running.text}")


class HeadRanks(Ranks):
    """A `HeadExchange` of `attention.row_context` between these processes."""

    @torch.no_grad()
    def exchange(self, tensor: Tensor, *, cut: int, join: int) -> Tensor:
        """Return this rank's part along dimension `cut` from all ranks, concatenated by rank along `join`."""
        parts = torch.stack(tensor.chunk(self.size, cut))
        received = torch.empty_like(parts)
        self.communicator.all_to_all(received, parts, f"heads of {self.running.text}").wait(self.running.text)
        return torch.cat(list(received), join)
