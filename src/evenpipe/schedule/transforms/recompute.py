"""The recompute transform: forwards of given stages keep only their input, and run again right before their backward.

    2F0 ... 2B0         ->  2F0 ... 2R0 2B0
    2F0 ... 2I0 ... 2W0 ->  2F0 ... 2R0 2I0 ... 2W0
    (1F3;2B0)OVERLAP_F_B    ->  2R0 (1F3;2B0)OVERLAP_F_B

A forward that is in the same joint pass as its backward is not recomputed. R needs nothing from other devices: it runs
while the gradient that its backward waits for is still being sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from evenpipe.errors import InputError
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import ROLE, Kind, Pass, parts_of


def add_recompute(order: Order, stages: Iterable[int] | None = None) -> Order:
    """`order` with an R before each backward of `stages` (all by default) that has none.

    An order that only evaluates is returned unchanged. Raises InputError for a stage that does not exist.
    """
    chosen = set(range(order.placement.stages) if stages is None else stages)
    for stage in sorted(chosen):
        if not 0 <= stage < order.placement.stages:
            raise InputError(f"recompute has stage {stage}; each must be 0 to {order.placement.last_stage}")
    return replace(order, rows=tuple(_row(row, chosen) for row in order.rows))


def _row(row: tuple[Pass | None, ...], stages: set[int]) -> tuple[Pass | None, ...]:
    existing = {item for item in row if item and item.kind is Kind.R}
    result: list[Pass | None] = []
    for item in row:
        parts = parts_of(item) if item else ()
        for component in parts:
            recompute = Pass(Kind.R, component.stage, component.microbatch, component.slice)
            at_once = Pass(Kind.F, component.stage, component.microbatch, component.slice) in parts
            if (
                ROLE[component.kind] is Kind.B
                and component.stage in stages
                and recompute not in existing
                and not at_once
            ):
                result.append(recompute)
        result.append(item)
    return tuple(result)
