"""The communication transform: place every transfer of an order so that all its members issue it without deadlock.

A transfer has one instant: the predicted end of its last producer. On every member it comes before the first pass that
is predicted to end later. So each row is a subsequence of one list of all passes and transfers, sorted by these times
(ties in the order of the event model), in which every item comes after its needs. Devices that execute such rows cannot
deadlock, even if every operation blocked, for any number of communicators and any serialisation by the library; and a
receive comes before the pass that runs while its data becomes ready.

If kinds of transfers share a communicator, a late transfer delays the following ones. The reduce of dX waits longest,
for the slowest of all devices, so its instant is a quarter of an interval (the work of the busiest device per
microbatch) before the backward that uses it, if that is later, but at most an interval after the last part of dX,
because every device holds its part until then.

D waits for a copy, and should do so as late as possible: transfers between the pass before it and the next pass come
before D.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.numbered import ABSENT
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import OFFLOAD_KINDS, Item, Kind, Pass, Transfer, TransferKind
from evenpipe.schedule.program import Program
from evenpipe.schedule.rules import PER_PAIR, PassGroup, Route
from evenpipe.schedule.timing import timed
from evenpipe.schedule.walk import Walked

from .vocabulary import interval_of


def add_communication(order: Order, costs: Costs | None = None, sharing: str = PER_PAIR) -> Program:
    """The program of `order`: its passes in their order, and the transfers that they need.

    `costs` (equal ones by default) predict when passes end; `sharing` as in `Program`. Raises DeadlockError if the
    order cannot complete, and InputError if a cost is missing.
    """
    lowering = Lowering(order, costs, sharing)
    rows = tuple(lowering.row(device) for device in range(order.devices))
    return Program(
        order.placement, order.microbatches, rows, order.vocabulary, order.forward_only, order.slices, sharing
    )


class Lowering:
    """A timed order, from which the program row of any device can be built separately.

    Timing needs the whole order, a row only its own passes and transfers.
    """

    def __init__(self, order: Order, costs: Costs | None = None, sharing: str = PER_PAIR) -> None:
        """Arguments and errors as for `add_communication`."""
        walked = timed(order, EQUAL_COSTS if costs is None else costs)
        self._order, self._numbered, self._sharing = order, walked.numbered, sharing
        first = self._numbered.size - self._numbered.transfers
        instants = walked.end[:first] + walked.start[first:]
        if sharing != PER_PAIR:
            _delay_reduces(walked, instants)
        self._rank = [NOWHERE] * len(instants)
        """By number, the position in the list that all rows are subsequences of."""
        for index, number in enumerate(sorted(walked.happened, key=instants.__getitem__)):
            self._rank[number] = index
        self._collectives: dict[int, list[Transfer]] = {}
        """By route number: all members share the same objects."""

    def row(self, device: int) -> tuple[Item, ...]:
        """The passes and transfers of `device`, in order."""
        numbered, rank = self._numbered, self._rank
        items: dict[int, Item] = dict(zip(numbered.rows[device], self._order.passes(device), strict=True))
        for route in numbered.rules.routes:
            if device in route.members:
                items.update(zip(numbered.transfers_of(route), self._transfers(route, device), strict=True))
        scheduled = [number for number in items if rank[number] != NOWHERE]
        return tuple(_with_late_returns([items[number] for number in sorted(scheduled, key=rank.__getitem__)]))

    def _transfers(self, route: Route, device: int) -> list[Transfer]:
        """The transfers of a route as `device` issues them, by unit."""
        transfers = self._collectives.get(route.number)
        if transfers is None:
            kind, stage, peer = route.end(device)
            members, root, communicator = route.members, route.root, route.communicator(self._sharing)
            transfers = [
                Transfer(kind, stage, microbatch, slice_, members, root, communicator, peer)
                for microbatch in self._numbered.microbatches
                for slice_ in range(self._numbered.slices)
            ]
            if not route.is_hop:
                self._collectives[route.number] = transfers
        return transfers


def _delay_reduces(walked: Walked, instants: list[float]) -> None:
    """Move the instants of DX to a quarter of an interval before the backward of the last stage, by at most one
    interval."""
    numbered = walked.numbered
    placement = numbered.schedule.placement
    backward = numbered.groups.get(PassGroup(placement.last_device, Kind.B, placement.last_stage))
    interval = interval_of(walked)
    for route in numbered.rules.routes:
        if route.kind is TransferKind.DX and backward is not None:
            for n, transfer in enumerate(numbered.transfers_of(route), backward):
                if numbered.position[n] != ABSENT:
                    before_use = min(walked.start[n] - interval / 4, instants[transfer] + interval)
                    instants[transfer] = max(instants[transfer], before_use)


def _with_late_returns(row: Iterable[Item]) -> Iterator[Item]:
    """Move D, and copies that follow it, right before the next pass."""
    waiting: list[Item] = []
    for item in row:
        if item.kind is Kind.D or (waiting and item.kind in OFFLOAD_KINDS):
            waiting.append(item)
            continue
        if waiting and isinstance(item, Pass):
            yield from waiting
            waiting.clear()
        yield item
    yield from waiting


NOWHERE = -1
