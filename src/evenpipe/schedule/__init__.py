"""Schedules: what runs where, and in which order. Pure Python, no torch.

Schedules are data: a generator writes an order, transforms lower it to a program, the checker passes it, and the event
model times it.
"""

from .check import check_order, check_program
from .check_limit import Limits
from .costs import EQUAL_COSTS, CopyEngine, Costs, Link
from .deadlock import DeadlockError
from .faults import Fault, Report
from .generators import SCHEDULES
from .layers import even_split, splits_by_cost
from .order import Order
from .passes import Item, Kind, Pass, Transfer, TransferKind, parts_of
from .placement import Placement
from .planning import Schedule, evaluation_program, plan_order, plan_program
from .program import Program
from .registry import generate
from .rules import PER_KIND, PER_PAIR, SHARING, Route, Rules
from .timeline import Cause, Event, Slack, Timeline
from .timing import time_order
from .transforms.communication import add_communication
from .transforms.forward_only import forward_only
from .transforms.interlaced import interlace
from .transforms.offload import Offloaded, offloaded, plan_offload, without_offload
from .transforms.recompute import add_recompute
from .transforms.sharding import add_sharding, without_sharding
from .transforms.slices import add_slices
from .transforms.vocabulary import add_vocabulary
from .vocabulary_mode import MODES, VocabularyMode

__all__ = [
    "EQUAL_COSTS",
    "MODES",
    "PER_KIND",
    "PER_PAIR",
    "SCHEDULES",
    "SHARING",
    "Cause",
    "CopyEngine",
    "Costs",
    "DeadlockError",
    "Event",
    "Fault",
    "Item",
    "Kind",
    "Limits",
    "Link",
    "Offloaded",
    "Order",
    "Pass",
    "Placement",
    "Program",
    "Report",
    "Route",
    "Rules",
    "Schedule",
    "Slack",
    "Timeline",
    "Transfer",
    "TransferKind",
    "VocabularyMode",
    "add_communication",
    "add_recompute",
    "add_sharding",
    "add_slices",
    "add_vocabulary",
    "check_order",
    "check_program",
    "evaluation_program",
    "even_split",
    "forward_only",
    "generate",
    "interlace",
    "offloaded",
    "parts_of",
    "plan_offload",
    "plan_order",
    "plan_program",
    "splits_by_cost",
    "time_order",
    "without_offload",
    "without_sharding",
]
