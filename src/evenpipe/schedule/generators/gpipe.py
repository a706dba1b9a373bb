"""GPipe: all forwards, then all backwards (arXiv 1811.06965)."""

from __future__ import annotations

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass
from evenpipe.schedule.placement import Placement


def gpipe(devices: int, microbatches: int) -> Order:
    """All forwards in turn, then all backwards in the same turn, one stage per device.

    Any devices >= 1 and microbatches >= 1. Bubble (devices - 1) * (F + B) with equal stages; every device holds all
    `microbatches` activations at its peak.
    """
    rows = tuple(
        tuple(Pass(kind, stage, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(microbatches))
        for stage in range(devices)
    )
    return Order(Placement.linear(devices), microbatches, rows)
