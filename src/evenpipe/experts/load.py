"""How many tokens choose each expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from evenpipe.experts.routing import Running


class Load:
    """Counts the choices of the tokens of a training step; those of repeated forwards are not counted again."""

    def __init__(
        self,
        layers: Sequence[str],
        experts: int,
        running: Running,
        torch_device: torch.device,
        *,
        counts: bool = True,
    ) -> None:
        """
        Args:
            layers: names of all experts modules of the model, in order.
            experts: largest number of experts of a layer.
            counts: False: another process counts the same tokens.
        """
        self.layers = tuple(layers)
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._running, self._is_on, self._step = running, counts, 0
        self._seen: set[tuple[tuple[int, int], str]] = set()
        self._counts = torch.zeros((len(layers), experts + 1), dtype=torch.int64, device=torch_device)
        self._one = torch.ones((), dtype=torch.int64, device=torch_device)

    def add(self, layer: str, index: Tensor) -> None:
        """Count the choices [tokens, choices] of a layer's router in the current pass."""
        if self._running.step != self._step:
            self._step = self._running.step
            if self._seen:  # remains of a failed step
                with _disable_current_modes():  # the counts are not a tensor of this pass
                    self._forget()
        stage_and_unit = self._running.stage_unit
        if not self._is_on or stage_and_unit is None or (stage_and_unit, layer) in self._seen:
            return
        self._seen.add((stage_and_unit, layer))
        with _disable_current_modes():  # selective checkpointing would expect these operations in the recomputation
            chosen = index.detach().reshape(-1)
            self._counts[self._row[layer]].scatter_add_(0, chosen, self._one.expand(len(chosen)))

    def take(self) -> Tensor:
        """Return the counts [layers, experts] of this process since the last call, without choices of no expert."""
        counts = self._counts[:, :-1].clone(memory_format=torch.contiguous_format)  # with one layer, it would be a view
        self._forget()
        return counts

    def _forget(self) -> None:
        self._counts.zero_()
        self._seen.clear()
