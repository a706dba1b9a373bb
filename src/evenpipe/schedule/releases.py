"""Infer when a device knows that a peer has received its transfers: from what it receives itself.

A device that has received a transfer knows that the sender had reached the position where it issued it, so all passes
before that position in the sender's row had their inputs. If this device had sent those inputs, it can free their
memory without waiting:

    device 0    0F0  0SEND_F0  ...  1RECV_B0  ...  0B0      0B0 has its gradient: 1F0 ran, 0SEND_F0 has arrived
    device 1    1RECV_F0  1F0  ...  1B0  1SEND_B0

The last transfers, and transfers to a device that never answers, have no such position.
"""

from __future__ import annotations

from heapq import heappop, heappush

from .dependencies import Dependencies, End, Route, What
from .passes import HOP_KINDS, Transfer, TransferKind, parts_of, unit_of
from .places import Numbers, Places
from .program import Program

Elsewhere = list[tuple[int, Numbers]]
"""Other devices, each with the positions of some of its items, by unit."""


def releases(program: Program, device: int) -> dict[int, tuple[Transfer, ...]]:
    """Return, by position in the row of `device`, the sent transfers that are known to have arrived once the pass there
    has everything that it waits for. `program` must be sound.

    Sent transfers are hops, and contributions to collectives whose result this device does not wait for itself.
    """
    positions, slices = _positions(program), program.slices
    reached = [-1] * program.devices  # position that another device is known to have reached
    waits: dict[What, Elsewhere] = {}  # where others issue what a pass waits for
    uses: dict[End, Elsewhere] = {}  # where others use what a transfer carries; nowhere if it is not sent
    sent: list[Transfer] = []
    unused: list[int] = []  # by number in `sent`: others that are not known to have used it
    under_way: list[list[tuple[int, int]]] = [[] for _ in reached]  # by device, heaps of positions of uses, and numbers
    found: dict[int, tuple[Transfer, ...]] = {}
    for position, item in enumerate(program.rows[device]):
        if isinstance(item, Transfer):
            end = item.kind, item.stage, item.peer
            if end not in uses:
                uses[end] = positions.uses(item, device)
            if uses[end]:
                unit = unit_of(item, slices)
                for other, numbers in uses[end]:
                    heappush(under_way[other], (numbers[unit], len(sent)))
                sent.append(item)
                unused.append(len(uses[end]))
        elif item is not None:
            arrived: list[int] = []
            for part in parts_of(item):
                what = part.kind, part.stage
                if what not in waits:
                    waits[what] = positions.sources(what, device)
                for other, numbers in waits[what]:
                    reached[other] = max(reached[other], numbers[unit_of(part, slices)])
                    while under_way[other] and under_way[other][0][0] < reached[other]:
                        _, number = heappop(under_way[other])
                        unused[number] -= 1
                        if not unused[number]:
                            arrived.append(number)
            if arrived:
                found[position] = tuple(sent[number] for number in sorted(arrived))
    return found


class _Positions:
    """Where each device of a program issues each transfer, and has the pass that waits for it."""

    def __init__(self, program: Program) -> None:
        self._dependencies = dependencies = Dependencies.of(program, program.sharing)
        self._issued: list[dict[int, Numbers]] = []
        """By device: for each route, positions by unit."""
        self._used: list[dict[int, Numbers]] = []
        for device, row in enumerate(program.rows):
            places = Places.of(row, program.units, slices=program.slices)
            routes = ((dependencies.route_at(end, device), numbers) for end, numbers in places.transfers.items())
            self._issued.append({route.number: numbers for route, numbers in routes if route is not None})
            used: dict[int, Numbers] = {}
            for what, numbers in places.at.items():
                for route in dependencies.rule(device, *what).waits:
                    others = used.get(route.number)  # some backwards of a stage may be whole, and others split
                    used[route.number] = numbers if others is None else list(map(max, numbers, others))
            self._used.append(used)

    def sources(self, what: What, device: int) -> Elsewhere:
        """Return the others that feed such a pass, and where they issue it."""
        return [
            (site.device, self._issued[site.device][route.number])
            for route in self._dependencies.rule(device, *what).waits
            for site in dict.fromkeys(route.producers)
            if site.device != device
        ]

    def uses(self, item: Transfer, device: int) -> Elsewhere:
        """Return the others that use what such a transfer carries, and where; none if `device` does not send it."""
        route = self._dependencies.route_of(item, device)
        if route is None or not _sends(route, device):
            return []
        others = {site.device for site in route.consumers if site.device != device}
        return [(other, self._used[other][route.number]) for other in others]


_last: tuple[Program, _Positions] | None = None
"""Callers ask for the devices of one program one after the other."""


def _positions(program: Program) -> _Positions:
    global _last  # noqa: PLW0603
    if _last is None or _last[0] is not program:
        _last = program, _Positions(program)
    return _last[1]


def _sends(route: Route, device: int) -> bool:
    """Return whether the device sends data and waits for none."""
    if route.kind in HOP_KINDS:
        return device == route.members[0]
    if route.kind is TransferKind.ROW_GRADIENTS:
        return device == route.root
    return route.kind in {TransferKind.ROWS, TransferKind.DX} and device != route.root
