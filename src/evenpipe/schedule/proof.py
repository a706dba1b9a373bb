"""A quick proof that an order or a program is sound: it compares whole rows at once and explains nothing.

A schedule without a proof need not be wrong; the checker then examines every item and reports faults. For a program the
proof is stronger than needed: devices would reach their ends even if each waited at every transfer for all other
members (`meets`). Then one list of all transfers exists of which every row is a part. By induction along that list
every transfer is reached and completes, whether transfers queue per communicator or per device, and also if passes stop
until all transfers before them are complete; and no two members issue the transfers of a communicator in different
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import gt
from typing import Any

from .check_passes import wrong_pass
from .dependencies import Dependencies, Route
from .flows import vocabulary_kinds
from .order import Order
from .passes import OFFLOAD_KINDS, SHARDING_KINDS, Item, Kind, Pass, Transfer
from .places import ABSENT, Numbers, Places, is_complete, unmet_in_row
from .program import Program
from .sharding import check_sharding


def passes_in_place(schedule: Order | Program, places: Sequence[Places]) -> bool:
    """Return whether every pass appears once, on its device, with nothing else but transfers; `places` by device."""
    wanted = {(kind, None) for kind in vocabulary_kinds(schedule.barriers, schedule.forward_only)}
    stages_of = schedule.placement.stages_of
    return all(
        _in_place(here, wanted, stages_of(device), schedule.forward_only) for device, here in enumerate(places)
    ) and (not any(here.sharding for here in places) or _sharding_in_place(schedule))


def program_is_sound(program: Program, dependencies: Dependencies) -> bool:
    """Return whether `program` is proven to be sound."""
    places = [Places.of(row, program.units, slices=program.slices) for row in program.rows]
    if not passes_in_place(program, places):
        return False
    routes: list[list[Route]] = [[] for _ in places]
    for route in dependencies.routes:
        for device in route.members:
            routes[device].append(route)
    lines = []
    for device, (row, here) in enumerate(zip(program.rows, places, strict=True)):
        rule = partial(dependencies.rule, device)
        if any(unmet_in_row(here, row, 0, rule)) or not _transfers_in_place(row, here, routes[device], device):
            return False
        for (kind, stage), numbers in here.at.items():
            needs = rule(kind, stage)
            issued = [here.transfers[route.end(device)] for route in needs.uses]
            made = [here.transfers[route.end(device)] for route in needs.feeds]
            if not all(_before(late, numbers) for late in issued) or not all(_before(numbers, n) for n in made):
                return False
        lines.append(_line(len(row), here, routes[device], device, program.units))
    members = [len(route.members) for route in dependencies.routes for _ in range(program.units)]
    return meets(lines, members)


def meets(lines: Sequence[Sequence[int]], members: Sequence[int]) -> bool:
    """Return whether devices reach the ends of their lines if each waits at every number for its other members.

    members: by number, how many lines contain it.
    """
    steps = [iter(line) for line in lines]
    waiting = list(members)
    standing: dict[int, list[int]] = {}  # number -> devices that have come to it and wait for others
    finished = 0
    going = list(range(len(lines)))
    while going:
        device = going.pop()
        for number in steps[device]:
            waiting[number] -= 1
            if waiting[number]:
                standing.setdefault(number, []).append(device)
                break
            going += standing.pop(number, ())
        else:
            finished += 1
    return finished == len(lines)


def _in_place(places: Places, vocabulary: set[tuple[Kind, None]], stages: Sequence[int], forward_only: bool) -> bool:
    wanted: set[tuple[Kind, int | None]] = {*vocabulary}
    optional: set[tuple[Kind, int | None]] = set()
    for stage in stages:
        wanted.add((Kind.F, stage))
        if not forward_only:
            split = (Kind.I, stage) in places.at
            wanted |= {(Kind.I, stage), (Kind.W, stage)} if split else {(Kind.B, stage)}
            optional |= {(kind, stage) for kind in (Kind.R, *OFFLOAD_KINDS)}
            moved = [[number != ABSENT for number in places.at.get((kind, stage), ())] for kind in OFFLOAD_KINDS]
            if any(presence != moved[0] for presence in moved):
                return False
    there = {key for key, numbers in places.at.items() if numbers}
    return not places.odd and there <= wanted | optional and all(is_complete(places.at.get(what)) for what in wanted)


def _sharding_in_place(schedule: Order | Program) -> bool:
    """Return whether passes of `SHARDING_KINDS` belong to their device, and come where they may."""
    placed = ((device, item) for device, row in enumerate(schedule.rows) for item in row if isinstance(item, Pass))
    if any(item.kind in SHARDING_KINDS and wrong_pass(schedule, device, item) for device, item in placed):
        return False
    return not any(check_sharding(schedule.placement, schedule.barriers, schedule.rows))


def _transfers_in_place(row: Sequence[Item | None], places: Places, routes: Sequence[Route], device: int) -> bool:
    """Return whether a row has the transfers of these routes, each once and correctly addressed, and no others."""
    wanted = {route.end(device) for route in routes}
    if places.transfers.keys() != wanted or not all(map(is_complete, places.transfers.values())):
        return False
    for route in routes:
        # Transfers of a route usually share the tuple of their members: each tuple is compared once.
        found: dict[tuple[int, Any, str], Transfer] = {}
        for number in places.transfers[route.end(device)]:
            item = row[number]
            assert isinstance(item, Transfer)
            found[id(item.members), item.root, item.communicator] = item
        address = (route.members, route.root, route.communicator)
        if any((item.members, item.root, item.communicator) != address for item in found.values()):
            return False
    return True


def _before(earlier: Numbers, later: Numbers) -> bool:
    return not any(map(gt, earlier, later))


def _line(length: int, places: Places, routes: Sequence[Route], device: int, units: int) -> list[int]:
    """Return the transfers of a row in order, each as route number * units + unit."""
    line = [ABSENT] * length
    for route in routes:
        for transfer, number in enumerate(places.transfers[route.end(device)], route.number * units):
            line[number] = transfer
    return [transfer for transfer in line if transfer != ABSENT]
