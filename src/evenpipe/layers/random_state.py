"""Random numbers of torch in layers, such as dropout: which numbers a layer draws, and how it draws them again.

Each step draws one number, the same on all processes. Before a layer's forward the generators are seeded by

    that number, the unit (a microbatch of any replica, or a slice of one), the layer, and the process's share of it

so a layer draws the same numbers wherever and whenever it runs: stages, schedules, vocabulary modes and replicas do not
matter, as long as the microbatches have the same rows. Processes that share a layer's tokens or heads (tensor and
context ranks) draw different ones for their shares. What a model draws before its layers has a seed too. After the step
the generators continue as if nothing had been drawn.

Seeding takes 3 us on the host (the state of a GPU's generator is on the host, too); getting and setting a state would
take 5 us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BEFORE_LAYERS = -1
"""In place of a layer's index."""
_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of the host's generator, and of the GPU's generator if the device is a GPU."""

    host: Tensor
    gpu: Tensor | None
    torch_device: torch.device

    @classmethod
    def of(cls, torch_device: torch.device) -> RandomState:
        gpu = torch.cuda.get_rng_state(torch_device) if torch_device.type == "cuda" else None
        return cls(torch.get_rng_state(), gpu, torch_device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, for a checkpoint."""
        return {"random_state": self.host} | ({} if self.gpu is None else {"random_state_of_gpu": self.gpu})

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw numbers from this state inside; restore the current state on exit."""
        with torch.random.fork_rng([] if self.gpu is None else [self.torch_device]):
            self.restore()
            yield

    def restore(self) -> None:
        """Draw numbers from this state from now on."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.torch_device)


def seed_of_layer(number: int, unit: int, layer: int, share: int = 0) -> int:
    """Return the seed of a layer's forward: a hash of 64 bits, of which the host's generator uses the lower 32."""
    state = number
    for value in (share, unit, layer):  # splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom generators")
        state = (state + value * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS
        state ^= state >> 31
    return state


class Draws:
    """Seeds the generators of a process for the layers of its stages."""

    def __init__(self, torch_device: torch.device, share: int) -> None:
        """share: index of this process among the processes that share each layer."""
        self._torch_device, self._share = torch_device, share
        self._gpu: torch.Generator | None = None
        if torch_device.type == "cuda":
            index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
            self._gpu = torch.cuda.default_generators[index]
        self._number: int | None = None
        self._first = self._unit = 0

    @staticmethod
    def draw() -> int:
        """Return a step's number, from the generator of the host."""
        return int(torch.randint(2**63 - 1, ()))

    @contextmanager
    def step(self, number: int, first_unit: int) -> Iterator[None]:
        """Seed the layers inside. number: drawn for the step; first_unit: index of this replica's first unit among
        those of all replicas."""
        state = RandomState.of(self._torch_device)
        self._number, self._first = number, first_unit
        try:
            yield
        finally:
            self._number = None
            state.restore()

    def begin(self, unit: int) -> None:
        """Before the forward of a stage: seed what the model draws before its layers."""
        self._unit = self._first + unit
        self._seed(BEFORE_LAYERS)

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        """As a `LayerTransform`: seed each call of a layer."""
        for index, layer in layers.items():
            layer.forward = self._seeding(layer.forward, index)

    def _seeding(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        @functools.wraps(forward)
        def with_seed(*args: Any, **kwargs: Any) -> Any:
            self._seed(index)
            return forward(*args, **kwargs)

        return with_seed

    def _seed(self, layer: int) -> None:
        if self._number is None:  # an evaluation
            return
        seed = seed_of_layer(self._number, self._unit, layer, self._share)
        torch.default_generator.manual_seed(seed)
        if self._gpu is not None:
            self._gpu.manual_seed(seed)
