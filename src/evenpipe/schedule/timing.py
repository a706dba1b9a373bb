"""The event model: compute the timeline of an order from costs.

Each device runs its row in order. A pass starts when its device is free, every pass that it needs has ended and every
transfer that it needs has completed; a transfer completes `Costs.transfer_time` after its last producer ended.
Transfers do not contend with each other or with compute (the full simulator models that).
"""

from __future__ import annotations

from .check import check_order
from .costs import Costs
from .deadlock import DeadlockError
from .numbered import Numbered
from .order import Order
from .timeline import Event, Timeline
from .walk import Completion, Walked, walk


def time_order(order: Order, costs: Costs) -> Timeline:
    """Run `order` in the event model.

    Raises DeadlockError if it cannot complete, and InputError for misplaced passes, or if `costs` lack a kind or have
    lists of the wrong length.
    """
    walked = timed(order, costs)
    rows = [
        tuple(
            Event(device, item, walked.start[n], walked.end[n])
            for n, item in zip(numbers, order.passes(device), strict=True)
        )
        for device, numbers in enumerate(walked.rows)
    ]
    placement = order.placement
    return Timeline(
        tuple(rows),
        costs.stage_bytes(placement),
        placement=placement,
        exchange=costs.exchange_times(placement),
        token_factors=costs.token_factors,
    )


def timed(order: Order, costs: Costs) -> Walked:
    """When every pass and transfer of `order` runs. Raises as `time_order` does."""
    numbered = Numbered(order)
    if numbered.misplaced or numbered.repeated:
        check_order(order).raise_if_faulty()
    return completed(walk(numbered, Completion.DATA, numbered.durations(costs)))


def completed(walked: Walked) -> Walked:
    """Return `walked`. Raises DeadlockError if it is incomplete."""
    if walked.stopped:
        raise DeadlockError(walked)
    return walked
