"""Read and write schedules of torch.distributed.pipelining: as files both ways, and as objects in.

Nothing here imports torch.
"""

from .torch_csv import from_torch, to_torch
from .torch_schedule import from_torch_schedule, is_torch_schedule

__all__ = ["from_torch", "from_torch_schedule", "is_torch_schedule", "to_torch"]
