"""Transforms of orders, in the order of use: slices, vocabulary or interlaced, recompute, offload, forward_only for
evaluation, communication, sharding.

All are pure functions from an order to another order; communication makes a program of it, and sharding takes either.
"""

from __future__ import annotations

from .communication import add_communication
from .forward_only import forward_only
from .interlaced import interlace
from .offload import Offloaded, offloaded, plan_offload, without_offload
from .recompute import add_recompute
from .sharding import add_sharding, without_sharding
from .slices import add_slices
from .vocabulary import add_vocabulary

__all__ = [
    "Offloaded",
    "add_communication",
    "add_recompute",
    "add_sharding",
    "add_slices",
    "add_vocabulary",
    "forward_only",
    "interlace",
    "offloaded",
    "plan_offload",
    "without_offload",
    "without_sharding",
]
