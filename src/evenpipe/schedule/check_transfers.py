"""Check that a program has every transfer, once on each member, at a valid position."""

from __future__ import annotations

from collections.abc import Iterator

from .check_passes import runs, wrong_slice
from .dependencies import Dependencies, Route
from .faults import Fault, neighbours
from .passes import Pass, Transfer, parts_of, unit_of
from .program import Program

Carried = tuple[int, int]
"""Number of a route, and a unit: one transfer, on whichever member."""


def check_transfers(program: Program, dependencies: Dependencies) -> tuple[list[Fault], list[Fault]]:
    """Return the faults of the transfers of `program`: missing, repeated, unknown or wrongly addressed ones, and those
    at a wrong position (too early or late, or in another order than on another member)."""
    places: list[dict[Carried, int]] = []
    out_of_place: list[Fault] = []
    out_of_order: list[Fault] = []
    for device in range(program.devices):
        found: dict[Carried, int] = {}
        out_of_place += _out_of_place(program, dependencies, device, found)
        out_of_order += _at_wrong_time(program, dependencies, device, found)
        places.append(found)
    out_of_place += _missing(program, dependencies, places)
    out_of_order += _other_order(program, dependencies, places)
    return out_of_place, out_of_order


def _out_of_place(
    program: Program, dependencies: Dependencies, device: int, found: dict[Carried, int]
) -> Iterator[Fault]:
    """Return faults of transfers that do not belong in a row. The others go into `found` with their positions."""
    for position, item in enumerate(program.rows[device]):
        if not isinstance(item, Transfer):
            continue
        route = dependencies.route_of(item, device)
        what = ""
        if route is None:
            what = f"no pass needs {item}, or device {device} is not a member of it"
        elif not 0 <= item.microbatch < program.microbatches:
            what = f"{item} names a microbatch that does not exist; microbatches are 0 to {program.microbatches - 1}"
        elif absent := wrong_slice(item, program.slices):
            what = absent
        elif (earlier := found.setdefault((route.number, unit_of(item, program.slices)), position)) != position:
            what = f"{item} is already at position {earlier}"
        else:
            what = _wrong_address(item, route)
        if what:
            yield Fault(device, position, what, neighbours(program.rows, device, position))


def _wrong_address(item: Transfer, route: Route) -> str:
    for name in ("members", "root", "communicator"):
        has, wanted = getattr(item, name), getattr(route, name)
        if has != wanted:
            return f"{item} has {name} {has!r}, not {wanted!r}"
    return ""


def _at_wrong_time(
    program: Program, dependencies: Dependencies, device: int, found: dict[Carried, int]
) -> Iterator[Fault]:
    """Return faults of transfers that are issued before their data is ready, or after the pass that uses it."""
    for position, item in enumerate(program.rows[device]):
        if not isinstance(item, Pass):
            continue
        for part in parts_of(item):
            if part.microbatch is None:
                continue
            rule = dependencies.rule(device, part.kind, part.stage)
            for routes, needed in ((rule.uses, True), (rule.feeds, False)):
                for route in routes:
                    there = found.get((route.number, unit_of(part, program.slices)))
                    if there is None or (there < position) == needed:
                        continue
                    transfer = route.transfer(device, part.microbatch, part.slice)
                    what = (
                        f"{transfer} is issued after {part} at position {position}, "
                        + ("which waits for it" if route in rule.waits else "which consumes its data")
                        if needed
                        else f"{transfer} is issued before {part} at position {position}, whose data it carries"
                    )
                    yield Fault(device, there, what, neighbours(program.rows, device, there))


def _missing(program: Program, dependencies: Dependencies, places: list[dict[Carried, int]]) -> Iterator[Fault]:
    there: dict[tuple[int, int], list[int]] = {}  # device and route -> units
    for device, found in enumerate(places):
        for number, unit in found:
            there.setdefault((device, number), []).append(unit)
    for route in dependencies.routes:
        for device in route.members:
            for gap in runs(there.get((device, route.number), ()), program.units):
                if (route.number, gap[0]) not in places[device]:
                    first, last = (route.transfer(device, *divmod(gap[index], program.slices)) for index in (0, -1))
                    what = f"{first} is missing" if first == last else f"{first} to {last} are missing"
                    yield Fault(device, None, what)


def _other_order(program: Program, dependencies: Dependencies, places: list[dict[Carried, int]]) -> Iterator[Fault]:
    """Return faults of members that issue the transfers of a communicator in another order than its first member, among
    the transfers that both issue."""
    issued: dict[tuple[str, int], list[Carried]] = {}  # by communicator and device, in the order of the row
    for device, found in enumerate(places):
        for carried in found:
            issued.setdefault((dependencies.routes[carried[0]].communicator, device), []).append(carried)
    for communicator, (first, *others) in dict.fromkeys((r.communicator, r.members) for r in dependencies.routes):
        for device in others:
            reference = [carried for carried in issued.get((communicator, first), ()) if carried in places[device]]
            own = [carried for carried in issued.get((communicator, device), ()) if carried in places[first]]
            for wanted, found_first in zip(reference, own, strict=True):
                if wanted != found_first:
                    item, later = (
                        dependencies.routes[number].transfer(device, *divmod(unit, program.slices))
                        for number, unit in (found_first, wanted)
                    )
                    position = places[device][found_first]
                    what = f"{item} comes before {later} on communicator {communicator}, but not on device {first}"
                    yield Fault(device, position, what, neighbours(program.rows, device, position))
                    break
