"""Sequence slices: keys and values of earlier slices of a sequence, and the gradients that later slices add to them.

A carry belongs to one stage and one sequence. Forwards run from the first slice to the last and write their keys;
backwards run from the last to the first, and each adds gradients to all keys that its queries saw. When the backward
reaches slice j, all later slices are done, so the gradient of the slice's own keys is complete:

    F 0   F 1   F 2 ...   keys [0, end of the slice)
    B 2   B 1   B 0       gradients [0, end): add; [start, end): take

The gradient reaches a slice's keys within that slice's own graph, and nothing is stored twice: later slices read the
same buffer. TeraPipe (arXiv 2102.07988) introduced such slices.

A layer must therefore run on all slices of a sequence or on none. If gradients do not reach it in some slice, they must
not reach it in any later slice either: a slice on which nothing depends cannot pass on the gradients of its keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.attention.row_context import Exchange, Keys
from evenpipe.errors import InputError


class Carry:
    """Keys, values and gradients of a sequence in one stage."""

    def __init__(self, ends: Sequence[int]) -> None:
        """ends: for each slice, the number of tokens of the sequence up to its end."""
        self.ends = tuple(ends)
        self._keys: dict[int, Keys] = {}
        self._gradients: dict[int, Keys] = {}
        self._layers: set[int] = set()
        """Layers that run on slice 0."""
        self._reached: dict[int, int] = {}
        """By layer, the slice whose backward ran last."""

    def slice(self, index: int, within: Exchange) -> CarriedSlice:
        """Return the exchange of a slice. within: the exchange inside the slice, which comes before the carry."""
        return CarriedSlice(self, index, within)

    def end_backward(self, index: int) -> None:
        """End the backward of a slice in the stage. Raises InputError if gradients of its keys were lost."""
        lost = [layer for layer in self._gradients if self._reached[layer] != index]
        if lost:
            raise self._uneven(lost[0], f"gradients do not reach it in slice {index}, and do in a later one")
        if not index:  # without gradients, layers have kept their keys until now
            self._keys.clear()

    def _uneven(self, layer: int, reason: str) -> InputError:
        return InputError(
            f"slices: {len(self.ends)}, but layer {layer} does not treat all slices of a sequence alike: {reason};"
            " expected 1 for layers that are skipped, or stop gradients, by chance or by what they read"
        )

    @property
    def empty(self) -> bool:
        """Whether nothing is stored: all backwards are done, or no forward has run."""
        return not self._keys and not self._gradients


class Carries:
    """The carries of a sequence in all stages of a process."""

    def __init__(self, ends: Sequence[int]) -> None:
        """ends: as for `Carry`."""
        self._ends = ends
        self._by_stage: dict[int, Carry] = {}

    def exchange(self, stage: int, index: int, within: Exchange) -> CarriedSlice:
        """Return the exchange of a slice in a stage. within: gathers the slice from several processes first."""
        return self._by_stage.setdefault(stage, Carry(self._ends)).slice(index, within)

    def end_backward(self, stage: int, index: int) -> None:
        """End the backward of a slice in a stage. Raises InputError as `Carry.end_backward`."""
        self._by_stage[stage].end_backward(index)

    @property
    def empty(self) -> bool:
        """Whether no stage keeps anything."""
        return all(carry.empty for carry in self._by_stage.values())


class CarriedSlice:
    """An `Exchange` with earlier slices."""

    keeps_keys = False

    def __init__(self, carry: Carry, index: int, within: Exchange) -> None:
        self._carry, self._within, self._index = carry, within, index
        self._end = carry.ends[index]
        self._own = slice(0 if index == 0 else carry.ends[index - 1], self._end)
        self._ran: set[int] = set()
        """Layers that ran on this slice."""

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        """Store the slice's keys, and return those of all slices up to it. A repeated forward stores the same."""
        buffers, length = self._carry._keys, self._carry.ends[-1]
        self._ran.add(layer)
        new = self._within.keys(layer, key, value)
        if layer not in buffers:
            key, value = (tensor.new_empty((*tensor.shape[:2], length, tensor.shape[3])) for tensor in new)
            buffers[layer] = key, value
        for buffer, local in zip(buffers[layer], new, strict=True):
            buffer[:, :, self._own] = local
        return self.keys_again(layer)

    def end_forward(self) -> None:
        """Raise InputError if this slice has run other layers than the first one."""
        if not self._index:
            self._carry._layers = self._ran
        for layer in self._ran ^ self._carry._layers:
            ran, not_ran = (self._index, 0) if layer in self._ran else (0, self._index)
            raise self._carry._uneven(layer, f"it runs on slice {ran}, and not on slice {not_ran}")

    def keys_again(self, layer: int, *local: Tensor) -> Keys:
        """Return the keys of all slices up to this one."""
        key, value = self._carry._keys[layer]
        return key[:, :, : self._end], value[:, :, : self._end]

    def gradients(self, layer: int, key: Tensor, value: Tensor, dtype: torch.dtype) -> Keys:
        """Add to the gradients of all slices up to this one, and return its own, which are complete."""
        sums = self._carry._gradients
        self._carry._reached[layer] = self._index
        if layer not in sums:
            wide = torch.promote_types(dtype, torch.float32)  # as many terms as there are slices
            sums[layer] = key.to(wide), value.to(wide)
        else:
            for total, addend in zip(sums[layer], (key, value), strict=True):
                total[:, :, : self._end] += addend
        key, value = (total[:, :, self._own].clone() for total in sums[layer])
        if not self._index:
            del sums[layer], self._carry._keys[layer]
        return self._within.gradients(layer, key, value, dtype)
