"""The evaluation order of any order: its forwards, and the passes that finish the loss."""

from __future__ import annotations

from dataclasses import replace

from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, parts_in
from evenpipe.schedule.vocabulary_mode import VocabularyMode

from .list_scheduling import Length, list_schedule
from .vocabulary import add_vocabulary


def forward_only(order: Order, costs: Costs | None = None) -> Order:
    """The forwards of `order` and, if it has vocabulary passes, E, S and C where they delay no forward.

    Devices with several stages run the earliest ready forward instead of keeping the order of training, if that is
    shorter. Vocabulary passes are placed again, with `costs` as for `add_vocabulary`: at their positions in training,
    without backwards in between, devices would wait. An order that only evaluates is returned unchanged. Raises
    DeadlockError if the forwards cannot complete.
    """
    if order.forward_only:
        return order
    rows = tuple(tuple(item for item in parts_in(row) if item.kind is Kind.F) for row in order.rows)
    forwards = replace(order, rows=rows, vocabulary=VocabularyMode.FIRST_LAST, forward_only=True)
    costs = EQUAL_COSTS if costs is None else costs
    in_turn, listed = Length.of(forwards, costs), list_schedule(forwards, forwards, None, costs)
    if listed and Length.of(listed, costs).better_than(in_turn):
        forwards = listed
    return add_vocabulary(forwards, costs=costs) if order.vocabulary.sharded else forwards
