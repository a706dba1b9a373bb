"""Infer when a device knows that a peer has received its transfers, from the transfers that it receives.

A device that has received a transfer knows that the sender reached the position where it issued the transfer, so all
passes before that position in the sender's row had their inputs. If this device sent those inputs, it can free their
memory without waiting:

    device 0    0F0  0SEND_F0  ...  1RECV_B0  ...  0B0      0B0 has its gradient: 1F0 ran, 0SEND_F0 has arrived
    device 1    1RECV_F0  1F0  ...  1B0  1SEND_B0

The last transfers, and transfers to a device that never answers, have no such position.
"""

from __future__ import annotations

from heapq import heappop, heappush

from .numbered import Numbered
from .passes import Transfer, TransferKind
from .program import Program
from .rules import PassGroup, Route


def releases(program: Program, device: int) -> dict[int, tuple[Transfer, ...]]:
    """Return, by position in the row of `device`, the sent transfers that are known to have arrived once the pass there
    has everything that it waits for. `program` must be sound.

    Sent transfers are hops, and contributions to collectives whose result this device does not wait for.
    """
    numbered = _numbered(program)
    row, rules = program.rows[device], numbered.rules
    sources = {route.number: _devices_except(route.producers, device) for route in rules.routes}
    uses = {route.number: _uses(numbered, route, device) for route in rules.routes if device in route.members}
    reached = [-1] * program.devices  # position that another device is known to have reached
    sent: list[int] = []
    unused: dict[int, int] = {}  # by sent transfer, number of receivers not known to have used it
    in_flight: list[list[tuple[int, int]]] = [
        [] for _ in reached
    ]  # by device, heaps of (position of use, index in `sent`)
    released: dict[int, tuple[Transfer, ...]] = {}
    for n in numbered.rows[device]:
        if numbered.is_transfer(n):
            receivers = uses[numbered.route(n).number]
            if receivers:
                for receiver, first in receivers.items():
                    heappush(in_flight[receiver], (numbered.position[first + numbered.unit_of(n)], len(sent)))
                unused[len(sent)] = len(receivers)
                sent.append(n)
            continue
        arrived: list[int] = []
        awaited = (n + step for step in numbered.needs[numbered.rule[n]] if numbered.is_transfer(n + step))
        for transfer in awaited:
            route = numbered.route(transfer).number
            for source in sources[route]:
                reached[source] = max(reached[source], numbered.issued[source][route][numbered.unit_of(transfer)])
                while in_flight[source] and in_flight[source][0][0] < reached[source]:
                    _, index = heappop(in_flight[source])
                    unused[index] -= 1
                    if not unused[index]:
                        arrived.append(index)
        if arrived:
            items = (row[numbered.position_of(sent[index], device)] for index in sorted(arrived))
            released[numbered.position_of(n, device)] = tuple(item for item in items if isinstance(item, Transfer))
    return released


def _devices_except(groups: tuple[PassGroup, ...], device: int) -> list[int]:
    return list(dict.fromkeys(group.device for group in groups if group.device != device))


def _uses(numbered: Numbered, route: Route, device: int) -> dict[int, int]:
    """The other devices that use the data that `device` sends on a route, each with the first number of the passes that
    use it; empty if it sends nothing."""
    if not _sends(route, device):
        return {}
    return {group.device: numbered.groups[group] for group in route.consumers if group.device != device}


_last: tuple[Program, Numbered] | None = None
"""The last program: callers query the devices of a program in succession."""


def _numbered(program: Program) -> Numbered:
    global _last  # noqa: PLW0603
    if _last is None or _last[0] is not program:
        _last = program, Numbered(program)
    return _last[1]


def _sends(route: Route, device: int) -> bool:
    """Whether the device sends data on this route and receives none."""
    if route.is_hop:
        return device == route.members[0]
    if route.kind in {TransferKind.X, TransferKind.ROW_GRADIENTS}:
        return device == route.root
    return route.kind in {TransferKind.ROWS, TransferKind.DX} and device != route.root
