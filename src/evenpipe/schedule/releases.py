"""When does a device know that what it sent has arrived? Nobody tells it, but what it receives gives it away.

A device that has received something knows that its sender had come to the place where it issued that, and so that all
passes which stand before it in the sender's row have had their inputs. Of those that this device had sent, the memory
can be given back, without waiting:

    device 0    0F0  0SEND_F0  ...  1RECV_B0  ...  0B0      0B0 has its gradient: 1F0 ran, 0SEND_F0 has arrived
    device 1    1RECV_F0  1F0  ...  1B0  1SEND_B0

What is sent last, or to a device that never answers, has no such place.
"""

from __future__ import annotations

from .dependencies import Dependencies, Route
from .passes import HOP_KINDS, Pass, Transfer, TransferKind, parts_of
from .program import Program

Carried = tuple[int, int]
"""Number of a route and a microbatch."""


def releases(program: Program, device: int) -> dict[int, tuple[Transfer, ...]]:
    """By position in the row of `device`: what it has sent and knows to have arrived once the pass there has all that
    it waits for. `program` has to be sound.

    Sent are hops, and contributions to what other devices receive: not what this device itself waits for.
    """
    dependencies, issued, used = _all_places(program)
    reached = [-1] * program.devices  # position up to which another device is known to have come
    under_way: dict[Transfer, list[tuple[int, int]]] = {}  # device and position that each is used at
    found: dict[int, tuple[Transfer, ...]] = {}
    for position, item in enumerate(program.rows[device]):
        if isinstance(item, Transfer):
            route = dependencies.route_of(item, device)
            if route is not None and _sends(route, device):
                carried = (route.number, item.microbatch)
                others = {site.device for site in route.consumers if site.device != device}
                under_way[item] = [(other, used[other][carried]) for other in others]
        elif item is not None and _learn(item, dependencies, device, issued, reached):
            arrived = tuple(
                sent for sent, uses in under_way.items() if all(place < reached[other] for other, place in uses)
            )
            for sent in arrived:
                del under_way[sent]
            if arrived:
                found[position] = arrived
    return found


Places = tuple[Dependencies, list[dict[Carried, int]], list[dict[Carried, int]]]
"""Of one program: its dependencies, and by device where it issues and where it uses each transfer."""

_last: tuple[Program, Places] | None = None
"""Devices of one program are asked for one after the other."""


def _all_places(program: Program) -> Places:
    global _last  # noqa: PLW0603
    if _last is None or _last[0] is not program:
        dependencies = Dependencies.of(program, program.sharing)
        places = [_places(program, dependencies, device) for device in range(program.devices)]
        _last = program, (dependencies, [issued for issued, _ in places], [used for _, used in places])
    return _last[1]


def _places(program: Program, dependencies: Dependencies, device: int) -> tuple[dict[Carried, int], dict[Carried, int]]:
    """Where a device issues each transfer, and where the pass stands that waits for it."""
    issued: dict[Carried, int] = {}
    used: dict[Carried, int] = {}
    for position, item in enumerate(program.rows[device]):
        if isinstance(item, Transfer):
            route = dependencies.route_of(item, device)
            if route is not None:
                issued[route.number, item.microbatch] = position
        elif item is not None:
            for part in parts_of(item):
                for route in dependencies.rule(device, part.kind, part.stage).waits:
                    assert part.microbatch is not None
                    used[route.number, part.microbatch] = position
    return issued, used


def _sends(route: Route, device: int) -> bool:
    """Whether the device gives something away and waits for nothing."""
    if route.kind in HOP_KINDS:
        return device == route.members[0]
    if route.kind is TransferKind.ROW_GRADIENTS:
        return device == route.root
    return route.kind in {TransferKind.ROWS, TransferKind.DX} and device != route.root


def _learn(
    item: Pass, dependencies: Dependencies, device: int, issued: list[dict[Carried, int]], reached: list[int]
) -> bool:
    """Notes how far other devices have come, from what a pass waits for; tells whether that is news."""
    before = list(reached)
    for part in parts_of(item):
        for route in dependencies.rule(device, part.kind, part.stage).waits:
            for site in route.producers:
                if site.device != device and part.microbatch is not None:
                    place = issued[site.device][route.number, part.microbatch]
                    reached[site.device] = max(reached[site.device], place)
    return before != reached
