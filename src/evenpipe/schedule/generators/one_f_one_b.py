"""1F1B: each backward as early as possible (PipeDream-Flush, arXiv 2006.09503; lag form of arXiv 2401.10241)."""

from __future__ import annotations

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass
from evenpipe.schedule.placement import Placement


def one_f_one_b(devices: int, microbatches: int) -> Order:
    """A device with d devices behind it runs d forwards ahead, then a forward and a backward in turn.

    Any devices >= 1 and microbatches >= 1, one stage per device. Bubble (devices - 1) * (F + B) with equal stages;
    device r holds min(microbatches, devices - r) activations at its peak.
    """
    rows = tuple(_row(stage, devices - 1 - stage, microbatches) for stage in range(devices))
    return Order(Placement.linear(devices), microbatches, rows)


def _row(stage: int, lag: int, microbatches: int) -> tuple[Pass, ...]:
    row = []
    for turn in range(microbatches + lag):
        if turn < microbatches:
            row.append(Pass(Kind.F, stage, turn))
        if turn >= lag:
            row.append(Pass(Kind.B, stage, turn - lag))
    return tuple(row)
