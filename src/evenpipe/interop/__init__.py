"""Read and write schedules of others: torch.distributed.pipelining, as files both ways and as objects in, and
Megatron's pipeline layouts, in.

Nothing here imports torch or Megatron.
"""

from .megatron_layout import MegatronLayout, StageLayout, from_megatron
from .torch_csv import from_torch, to_torch
from .torch_schedule import from_torch_schedule, is_torch_schedule

__all__ = [
    "MegatronLayout",
    "StageLayout",
    "from_megatron",
    "from_torch",
    "from_torch_schedule",
    "is_torch_schedule",
    "to_torch",
]
