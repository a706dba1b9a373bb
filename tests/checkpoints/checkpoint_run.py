"""A model of three parameters with an optimizer, for tests of checkpoints in one process."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from torch import Tensor, nn

from evenpipe.checkpoints import save
from evenpipe.model.placement import Cut, Held, TensorPlacement

METADATA = {"data": {"epoch": 1, "position": 3}, "scheduler": {"rate": 0.1 + 0.2}, "config": "[model]\n"}


class Run:
    """A few parameters, an optimizer, and gradients that follow from the step alone."""

    def __init__(
        self, seed: int = 0, dtype: torch.dtype = torch.float32, rows: int = 9, optimizer: str = "AdamW"
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "model.embed_tokens.weight": (rows, 4),
            "model.layers.0.mlp.weight": (4, 4),
            "model.norm.weight": (4,),
        }
        self.shards = {
            name: Held(
                nn.Parameter(torch.randn(shape, generator=generator).to(dtype)),
                TensorPlacement(shape, (Cut(("pp",), 0, 1),) if "embed" in name else ()),
            )
            for name, shape in shapes.items()
        }
        self.optimizer = getattr(torch.optim, optimizer)([shard.tensor for shard in self.shards.values()], lr=0.01)

    def take_step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 + step)
        for shard in self.shards.values():
            shard.tensor.grad = torch.randn(shard.tensor.shape, generator=generator).to(shard.tensor.dtype)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint has to bring back, copied."""
        found = {name: shard.tensor.detach().clone() for name, shard in self.shards.items()}
        for name, shard in self.shards.items():
            for key, value in self.optimizer.state.get(shard.tensor, {}).items():
                found[f"{key} of {name}"] = value.clone()
        return found

    def save(self, folder: Path, step: int, **options: object) -> Path:
        return save(folder, step, self.shards, self.optimizer, {**METADATA, "step": step}, **options)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.device == right[name].device, name
        assert torch.equal(tensor, right[name]), name


def saved_steps(folder: Path) -> list[str]:
    """All that the folder holds but its lock."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".evenpipe-lock-"))


def save_three(folder: Path) -> Path:
    """A folder with checkpoints of steps 1, 2 and 3."""
    run = Run()
    for step in (1, 2, 3):
        run.take_step(step)
        run.save(folder, step, keep=None)
    return folder


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))
