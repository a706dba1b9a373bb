"""Schedules of others: CSV files of torch.distributed.pipelining, both ways, and Megatron's pipeline layouts, in.

Text in, text out: nothing here imports torch or Megatron.
"""

from __future__ import annotations

from .megatron_layout import Layout, StageLayout, from_megatron
from .torch_csv import from_torch, to_torch

__all__ = ["Layout", "StageLayout", "from_megatron", "from_torch", "to_torch"]
