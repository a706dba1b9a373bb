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
from .passes import HOP_KINDS, Pass, Transfer, TransferKind, parts_of, unit_of
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
    under_way: dict[Transfer, list[tuple[int, int]]] = {}  # device and position of each use
    found: dict[int, tuple[Transfer, ...]] = {}
    for position, item in enumerate(program.rows[device]):
        if isinstance(item, Transfer):
            route = dependencies.route_of(item, device)
            if route is not None and _sends(route, device):
                carried = (route.number, unit_of(item, program.slices))
                others = {site.device for site in route.consumers if site.device != device}
                under_way[item] = [(other, used[other][carried]) for other in others]
        elif item is not None and _learn(item, dependencies, device, issued, reached, slices=program.slices):
            arrived = tuple(
                sent for sent, uses in under_way.items() if all(place < reached[other] for other, place in uses)
            )
            for sent in arrived:
                del under_way[sent]
            if arrived:
                found[position] = arrived
    return found


Places = tuple[Dependencies, list[dict[Carried, int]], list[dict[Carried, int]]]
"""For one program: its dependencies, and where each device issues and uses each transfer."""

_last: tuple[Program, Places] | None = None
"""Callers ask for the devices of one program one after the other."""


def _all_places(program: Program) -> Places:
    global _last  # noqa: PLW0603
    if _last is None or _last[0] is not program:
        dependencies = Dependencies.of(program, program.sharing)
        places = [_places(program, dependencies, device) for device in range(program.devices)]
        _last = program, (dependencies, [issued for issued, _ in places], [used for _, used in places])
    return _last[1]


def _places(program: Program, dependencies: Dependencies, device: int) -> tuple[dict[Carried, int], dict[Carried, int]]:
    """Return where a device issues each transfer, and the position of the pass that waits for it."""
    issued: dict[Carried, int] = {}
    used: dict[Carried, int] = {}
    for position, item in enumerate(program.rows[device]):
        if isinstance(item, Transfer):
            route = dependencies.route_of(item, device)
            if route is not None:
                issued[route.number, unit_of(item, program.slices)] = position
        elif item is not None:
            for part in parts_of(item):
                for route in dependencies.rule(device, part.kind, part.stage).waits:
                    used[route.number, unit_of(part, program.slices)] = position
    return issued, used


def _sends(route: Route, device: int) -> bool:
    """Return whether the device sends data and waits for none."""
    if route.kind in HOP_KINDS:
        return device == route.members[0]
    if route.kind is TransferKind.ROW_GRADIENTS:
        return device == route.root
    return route.kind in {TransferKind.ROWS, TransferKind.DX} and device != route.root


def _learn(
    item: Pass,
    dependencies: Dependencies,
    device: int,
    issued: list[dict[Carried, int]],
    reached: list[int],
    *,
    slices: int,
) -> bool:
    """Note how far other devices have come, from the transfers that a pass waits for; return whether that is new."""
    before = list(reached)
    for part in parts_of(item):
        for route in dependencies.rule(device, part.kind, part.stage).waits:
            for site in route.producers:
                if site.device != device and part.microbatch is not None:
                    place = issued[site.device][route.number, unit_of(part, slices)]
                    reached[site.device] = max(reached[site.device], place)
    return before != reached
