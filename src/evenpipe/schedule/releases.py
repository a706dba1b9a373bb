"""Infer when a device knows that a peer has received its transfers: from what it receives itself.

A device that has received a transfer knows that the sender had reached the position where it issued it, so all passes
before that position in the sender's row had their inputs. If this device had sent those inputs, it can free their
memory without waiting:

    device 0    0F0  0SEND_F0  ...  1RECV_B0  ...  0B0      0B0 has its gradient: 1F0 ran, 0SEND_F0 has arrived
    device 1    1RECV_F0  1F0  ...  1B0  1SEND_B0

The last transfers, and transfers to a device that never answers, have no such position.
"""

from __future__ import annotations

from .dependencies import Dependencies, Route
from .passes import HOP_KINDS, Kind, Transfer, TransferKind, parts_of, unit_of
from .program import Program

Carried = tuple[int, int]
"""Number of a route and a unit."""


def releases(program: Program, device: int) -> dict[int, tuple[Transfer, ...]]:
    """Return, by position in the row of `device`, the sent transfers that are known to have arrived once the pass there
    has everything that it waits for. `program` must be sound.

    Sent transfers are hops, and contributions to collectives whose result this device does not wait for itself.
    """
    dependencies, issued, used = _all_places(program)
    reached = [-1] * program.devices  # position that another device is known to have reached
    waits: dict[tuple[Kind, int | None], list[tuple[int, set[int]]]] = {}  # routes, other devices that feed them
    under_way: dict[Transfer, list[tuple[int, int]]] = {}  # device and position of each use
    found: dict[int, tuple[Transfer, ...]] = {}
    for position, item in enumerate(program.rows[device]):
        if isinstance(item, Transfer):
            route = dependencies.route_of(item, device)
            if route is not None and _sends(route, device):
                carried = (route.number, unit_of(item, program.slices))
                others = {site.device for site in route.consumers if site.device != device}
                under_way[item] = [(other, used[other][carried]) for other in others]
        elif item is not None:
            further = False
            for part in parts_of(item):
                what = part.kind, part.stage
                if what not in waits:
                    waits[what] = [
                        (route.number, {site.device for site in route.producers} - {device})
                        for route in dependencies.rule(device, *what).waits
                    ]
                for number, others in waits[what]:
                    carried = number, unit_of(part, program.slices)
                    for other in others:
                        if issued[other][carried] > reached[other]:
                            reached[other], further = issued[other][carried], True
            if not further:
                continue
            arrived = tuple(
                sent for sent, uses in under_way.items() if all(place < reached[other] for other, place in uses)
            )
            for sent in arrived:
                del under_way[sent]
            if arrived:
                found[position] = arrived
    return found


Places = tuple[Dependencies, list[dict[Carried, int]], list[dict[Carried, int]]]
"""For one program: its dependencies, and where each device issues each transfer, and has the pass that waits for it."""

_last: tuple[Program, Places] | None = None
"""Callers ask for the devices of one program one after the other."""


def _all_places(program: Program) -> Places:
    global _last  # noqa: PLW0603
    if _last is not None and _last[0] is program:
        return _last[1]
    places: Places = (Dependencies.of(program, program.sharing), [], [])
    dependencies, issued, used = places
    for device, row in enumerate(program.rows):
        issued.append({})
        used.append({})
        for position, item in enumerate(row):
            if isinstance(item, Transfer):
                if route := dependencies.route_of(item, device):
                    issued[device][route.number, unit_of(item, program.slices)] = position
                continue
            for part in parts_of(item) if item is not None else ():
                for route in dependencies.rule(device, part.kind, part.stage).waits:
                    used[device][route.number, unit_of(part, program.slices)] = position
    _last = program, places
    return places


def _sends(route: Route, device: int) -> bool:
    """Return whether the device sends data and waits for none."""
    if route.kind in HOP_KINDS:
        return device == route.members[0]
    if route.kind is TransferKind.ROW_GRADIENTS:
        return device == route.root
    return route.kind in {TransferKind.ROWS, TransferKind.DX} and device != route.root
