"""torch's own schedules and runtime without processes, on stages that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules


@dataclass(frozen=True)
class Size:
    devices: int
    stages_per_device: int
    microbatches: int


def mock_stages(size: Size) -> list[Any]:
    """Stages of one device, with all that a schedule's constructor asks them for."""
    stages = size.devices * size.stages_per_device
    return [
        SimpleNamespace(group_size=size.devices, group_rank=0, num_stages=stages, submod=nn.Identity())
        for _ in range(size.stages_per_device)
    ]


def any_loss(output: Any, target: Any) -> Any:
    raise AssertionError("nothing runs here")


def file_of_torch(name: str, size: Size, folder: Path, file_format: str) -> str:
    """What torch writes for one of its schedules, in format "compute_only" or "compute_comms"."""
    schedule = schedules.get_schedule_class(name)(mock_stages(size), size.microbatches, loss_fn=any_loss)
    file = folder / "torch.csv"
    schedule._dump_csv(str(file), format=file_format)
    return file.read_bytes().decode("utf-8")
