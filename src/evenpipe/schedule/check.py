"""Check whether an order or a program is sound. Every fault is listed, not only the first.

An order is sound if every pass required by its placement, units and vocabulary mode appears exactly once, on the right
device, if no pass comes before one that it needs in its own row, and if all devices reach the end of their rows. Every
F has its B, or its I and W, so every stored activation is released. Sharded parameters are gathered wherever they are
used, and gradients are summed when they are complete. A program also has every transfer exactly once on each of its
members, at a valid position, and completes however transfers are queued (`walk.Completion`). If limits are given, every
device stays within them.

Whole lists of positions are compared; items are examined individually only where the lists differ. Missing items count
as complete, so that one fault does not hide others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import ge, gt
from types import NoneType

from evenpipe.errors import InputError

from .check_limit import Limits, check_limits
from .deadlock import deadlock
from .faults import Fault, Report, brief, neighbours
from .held import peak_activations
from .numbered import ABSENT, Numbered
from .order import DeviceRows, Order
from .passes import (
    BACKWARD_KINDS,
    OFFLOAD_KINDS,
    SHAPES,
    SHARDING_KINDS,
    STAGE_KINDS,
    VOCABULARY_KINDS,
    Item,
    Kind,
    Pass,
    Transfer,
    parts_of,
    unit_of,
)
from .program import Program
from .rules import PassGroup, Route
from .sharding import check_sharding
from .walk import Completion, walk


def check_order(order: Order, limits: Limits | None = None) -> Report:
    """Every fault of `order`, and the most stage activations in flight on each device.

    Raises InputError for rows that contain anything but passes, and for invalid limits.
    """
    _refuse_others(order, {Pass, NoneType}, "a pass")
    numbered = Numbered(order)
    faults = [*_out_of_place(numbered), *_out_of_order(numbered)]
    if stopped := deadlock(walk(numbered, Completion.DATA, tolerant=True)):
        faults.append(stopped)
    return _report(order, faults, limits)


def check_program(program: Program, limits: Limits | None = None, *, experts: bool = False) -> Report:
    """Every fault of `program`, of its passes and its transfers; positions count both.

    experts: within F, B, I and R, devices exchange data with their copies in other replicas (`walk`).

    Raises InputError for rows that contain anything but passes and transfers, and for invalid limits.
    """
    _refuse_others(program, {Pass, Transfer, NoneType}, "a pass or transfer")
    numbered = Numbered(program)
    faults = list(_out_of_place(numbered))
    out_of_order = [*_out_of_order(numbered)]
    faults += out_of_order or _incomplete(numbered, experts=experts)
    return _report(program, faults, limits)


def _refuse_others(schedule: DeviceRows, accepted: set[type], expected: str) -> None:
    for device, row in enumerate(schedule.rows):
        if not accepted.issuperset(map(type, row)):
            position, item = next((n, item) for n, item in enumerate(row) if type(item) not in accepted)
            raise InputError(f"device {device}, position {position}: expected {expected}, not {item!r}")


def _report(schedule: Order | Program, faults: list[Fault], limits: Limits | None) -> Report:
    if limits is not None:
        faults += check_limits(schedule, limits)
    passes = ((item for item in row if isinstance(item, Pass)) for row in schedule.rows)
    return Report(tuple(faults), tuple(int(peak_activations(row)) for row in passes))


# --- every item exactly once, on the right device ------------------------------------------------------------------


def _out_of_place(numbered: Numbered) -> Iterator[Fault]:
    schedule = numbered.schedule
    suspects: list[set[int]] = [set() for _ in schedule.rows]
    standalone = [(entry.device, entry.position) for entry in numbered.separate.values()]
    for device, position in (*numbered.misplaced, *numbered.repeated, *standalone):
        suspects[device].add(position)
    for device, row in enumerate(schedule.rows):
        for position in sorted(suspects[device]):
            item = row[position]
            assert item is not None
            parts: tuple[Item, ...] = parts_of(item) if isinstance(item, Pass) else (item,)
            for index, component in enumerate(parts):
                message = _why_misplaced(numbered, device, position, component)
                if not message and component in parts[:index]:
                    message = f"{component} is already at position {position}"
                if message:
                    yield Fault(device, position, message, neighbours(schedule.rows, device, position))
        if not _has_all_passes(numbered, device):
            yield from _missing_passes(numbered, device)
    if any(entry.item.kind in SHARDING_KINDS for entry in numbered.separate.values()):
        yield from check_sharding(schedule.placement, schedule.vocabulary, schedule.rows)
    if isinstance(schedule, Program):
        yield from _addresses(numbered, schedule)


def _why_misplaced(numbered: Numbered, device: int, position: int, item: Item) -> str:
    """Why an item of a row has no number; an empty string for a part of a joint pass that has one."""
    schedule = numbered.schedule
    if isinstance(item, Pass):
        reason = _wrong_pass(schedule, device, item)
    elif numbered.rules.route(device, item) is None:
        reason = f"no pass needs {item}, or device {device} is not a member of it"
    else:
        reason = _wrong_unit(schedule, item)
    if reason:
        return reason
    n = numbered.number(device, item)
    recorded = ABSENT if n is None else numbered.position_of(n, device)
    if n is None or recorded == position:
        return ""
    earlier = numbered.item(n, device)
    if earlier.kind is item.kind:
        return f"{item} is already at position {recorded}"
    assert isinstance(earlier, Pass)
    return _split_again(Pass(Kind.B, item.stage, item.microbatch, item.slice))


def _split_again(backward: Pass) -> str:
    return f"{backward} has run whole, and a part of it appears here again"


def _wrong_pass(schedule: DeviceRows, device: int, item: Pass) -> str:
    """Why `item` does not belong on `device`; an empty string if it does."""
    if schedule.forward_only and item.kind in BACKWARD_KINDS:
        return f"{item} is not allowed in an order that only evaluates"
    if item.kind in VOCABULARY_KINDS and item.kind not in schedule.vocabulary.kinds(forward_only=schedule.forward_only):
        return f"{item} is not allowed in vocabulary mode {schedule.vocabulary}"
    if item.kind is Kind.OVERLAP_F_B:
        return "" if item.parts else f"{item} is not a pass: it has no parts"
    in_stage, of_microbatch = SHAPES[item.kind]
    if (item.stage is not None, item.microbatch is not None) != (in_stage, of_microbatch):
        shape = f"{'a' if in_stage else 'no'} stage and {'a' if of_microbatch else 'no'} microbatch"
        return f"{item} is not a pass: {item.kind} has {shape}"
    if item.stage is not None:
        if not 0 <= item.stage < schedule.placement.stages:
            return f"{item} names a stage that does not exist; stages are 0 to {schedule.placement.last_stage}"
        if schedule.placement.device_of(item.stage) != device:
            return f"{item} belongs to device {schedule.placement.device_of(item.stage)}"
    return _wrong_unit(schedule, item)


def _wrong_unit(schedule: DeviceRows, item: Item) -> str:
    """Why the microbatch or slice of `item` does not exist; an empty string if it does."""
    if item.microbatch is not None and not 0 <= item.microbatch < schedule.microbatches:
        return f"{item} names a microbatch that does not exist; microbatches are 0 to {schedule.microbatches - 1}"
    if item.slice < schedule.slices:
        return ""
    if schedule.slices == 1:
        return f"{item} is for a slice of a sequence, but sequences are not cut"
    return f"{item} names a slice that does not exist; slices are 0 to {schedule.slices - 1}"


def _positions(numbered: Numbered, device: int, kind: Kind, stage: int | None) -> list[int]:
    """Positions of a group by unit; empty if the device has no such group."""
    first = numbered.groups.get(PassGroup(device, kind, stage))
    return [] if first is None else numbered.position[first : first + numbered.units]


def _has_all_passes(numbered: Numbered, device: int) -> bool:
    """Whether a device certainly has all passes that belong there."""
    schedule, kinds = numbered.schedule, numbered.kinds

    def complete(kind: Kind, stage: int | None = None) -> bool:
        positions = _positions(numbered, device, kind, stage)
        return bool(positions) and ABSENT not in positions

    if numbered.units < schedule.units or not all(map(complete, numbered.rules.vocabulary_kinds)):
        return False
    for stage in schedule.placement.stages_of(device):
        if not complete(Kind.F, stage):
            return False
        if schedule.forward_only:
            continue
        is_full, is_split = ((device, kind, stage) in kinds for kind in (Kind.B, Kind.I))
        weights = _positions(numbered, device, Kind.W, stage)
        if is_full == is_split or not complete(Kind.B, stage) or bool(weights) != is_split or ABSENT in weights:
            return False
        copies = [_positions(numbered, device, kind, stage) for kind in sorted(OFFLOAD_KINDS)]
        if any(
            [position == ABSENT for position in positions] != [position == ABSENT for position in copies[0]]
            for positions in copies[1:]
        ):
            return False
    return True


def _missing_passes(numbered: Numbered, device: int) -> Iterator[Fault]:
    """Faults of missing passes, and of weight gradients of full backwards."""
    schedule = numbered.schedule
    positions: dict[tuple[Kind, int | None], dict[int, int]] = {}
    for position, item in enumerate(schedule.rows[device]):
        for component in parts_of(item) if isinstance(item, Pass) else ():
            if component.microbatch is not None and not _wrong_pass(schedule, device, component):
                positions.setdefault((component.kind, component.stage), {}).setdefault(
                    unit_of(component, schedule.slices), position
                )

    def absent(kind: Kind, stage: int | None, units: range, why: str = "") -> Fault:
        first, last = (Pass(kind, stage, *divmod(units[index], schedule.slices)) for index in (0, -1))
        message = f"{first} is missing" if first == last else f"{first} to {last} are missing"
        return Fault(device, None, message + why)

    for kind in sorted(numbered.rules.vocabulary_kinds):
        present = positions.get((kind, None), {})
        for units in _gaps(present, schedule.units):
            yield absent(kind, None, units)
    for stage in schedule.placement.stages_of(device):
        positions_of = {kind: positions.get((kind, stage), {}) for kind in sorted(STAGE_KINDS)}
        for units in _runs(set().union(*positions_of.values()), schedule.units):
            has = {kind: units[0] in present for kind, present in positions_of.items()}
            if not has[Kind.F]:
                yield absent(Kind.F, stage, units)
            if schedule.forward_only:
                continue
            if has[Kind.B] and has[Kind.W] and not has[Kind.I]:
                position = positions_of[Kind.W][units[0]]
                backward = Pass(Kind.B, stage, *divmod(units[0], schedule.slices))
                yield Fault(device, position, _split_again(backward), neighbours(schedule.rows, device, position))
            elif not (has[Kind.B] or has[Kind.I] or has[Kind.W]):
                yield absent(Kind.B, stage, units, ", so its activations are never released")
            elif not (has[Kind.B] or has[Kind.I]):
                yield absent(Kind.I, stage, units)
            elif not (has[Kind.B] or has[Kind.W]):
                yield absent(Kind.W, stage, units, ", so its activations are never released")
            if any(has[kind] for kind in _WITHOUT):
                yield from (absent(kind, stage, units, why) for kind, why in _WITHOUT.items() if not has[kind])


def _addresses(numbered: Numbered, program: Program) -> Iterator[Fault]:
    """Faults of transfers that are missing, or have wrong members, roots or communicators."""
    for device, issued in enumerate(numbered.issued):
        for route in numbered.rules.routes:
            if device not in route.members:
                continue
            positions = issued.get(route.number, [])
            address = {
                "members": route.members,
                "root": route.root,
                "communicator": route.communicator(program.sharing),
            }
            # Transfers of a route usually share one tuple of members, so each tuple is compared only once.
            correct: set[tuple[int, int | None, str]] = set()
            for position in positions:
                item = program.rows[device][position] if position != ABSENT else None
                if not isinstance(item, Transfer) or (id(item.members), item.root, item.communicator) in correct:
                    continue
                for name, expected in address.items():
                    if (actual := getattr(item, name)) != expected:
                        message = f"{item} has {name} {actual!r}, not {expected!r}"
                        yield Fault(device, position, message, neighbours(program.rows, device, position))
                        break
                else:
                    correct.add((id(item.members), item.root, item.communicator))
            if ABSENT in positions or len(positions) < program.units:
                yield from _missing_transfers(numbered, route, device, positions)


def _missing_transfers(numbered: Numbered, route: Route, device: int, positions: Sequence[int]) -> Iterator[Fault]:
    slices, microbatches = numbered.slices, numbered.microbatches
    present = {
        microbatches[unit // slices] * slices + unit % slices
        for unit, position in enumerate(positions)
        if position != ABSENT
    }
    for gap in _gaps(present, numbered.schedule.units):
        first, last = (route.transfer(device, *divmod(gap[index], slices)) for index in (0, -1))
        yield Fault(device, None, f"{first} is missing" if first == last else f"{first} to {last} are missing")


def _runs(present: Collection[int], units: int) -> Iterator[range]:
    """All units as ranges: units in `present` and in gaps of up to `LISTED` units individually, longer gaps whole."""
    start = 0
    for unit in (*sorted(present), units):
        gap = range(start, unit)
        if len(gap) > LISTED:
            yield gap
        else:
            yield from (range(i, i + 1) for i in gap)
        if unit < units:
            yield range(unit, unit + 1)
        start = unit + 1


def _gaps(present: Collection[int], units: int) -> Iterator[range]:
    """The units not in `present`, grouped as in `_runs`."""
    return (run for run in _runs(present, units) if run[0] not in present)


LISTED = 100
"""Most missing units of a gap that are listed individually."""

_WITHOUT = {
    Kind.O: ", so its activations are not on the host",
    Kind.D: ", so the copied memory is never freed",
    Kind.L: ", so its activations are never copied back",
}


# --- the order of items within a row -------------------------------------------------------------------------------


def _out_of_order(numbered: Numbered) -> Iterator[Fault]:
    for device in range(numbered.schedule.devices):
        if not _is_in_order(numbered, device):
            yield from _passes_too_early(numbered, device)
            yield from _transfers_at_wrong_time(numbered, device)


def _is_in_order(numbered: Numbered, device: int) -> bool:
    """Whether all items of a row certainly come after the items of that row that they need."""
    position, issued, units, slices = numbered.position, numbered.issued[device], numbered.units, numbered.slices
    is_program = isinstance(numbered.schedule, Program)
    for group, first in numbered.groups.items():
        if group.device != device or first >= len(numbered.rule) or numbered.rule[first] < 0:
            continue
        rule = numbered.rules.rule(group)
        positions = position[first : first + units]
        for slice_ in range(slices):
            slice_positions = positions[slice_::slices] if slices > 1 else positions
            for step in numbered.needs[numbered.rule[first + slice_]]:
                needed = first + slice_ + step
                if needed >= 0 and any(map(ge, position[needed : needed + units - slice_ : slices], slice_positions)):
                    return False
        if is_program:
            late = (issued[route.number] for route in rule.uses if route.number in issued)
            early = (issued[route.number] for route in rule.feeds if route.number in issued)
            if any(any(map(gt, issue_positions, positions)) for issue_positions in late) or any(
                any(map(gt, positions, issue_positions)) for issue_positions in early
            ):
                return False
    return True


def _passes_too_early(numbered: Numbered, device: int) -> Iterator[Fault]:
    rows, rule = numbered.schedule.rows, numbered.rule
    for n, index_of in _numbers(numbered, device):
        position = numbered.position[n]
        for step in numbered.needs[rule[n]]:
            needed_at = numbered.position[n + step] if n + step >= 0 else ABSENT
            if needed_at < position or (needed_at == position and index_of.get(n + step, -1) < index_of[n]):
                continue
            item = numbered.item(n, device)
            message = f"{item} comes before {brief(rows[device][needed_at])} at position {needed_at}, which it needs"
            if needed_at == position:
                message = f"{item} comes before the part of {brief(rows[device][needed_at])} that it needs"
            yield Fault(device, position, message, neighbours(rows, device, position))


def _transfers_at_wrong_time(numbered: Numbered, device: int) -> Iterator[Fault]:
    """Faults of transfers that are issued before their data is ready, or after the pass that uses it."""
    rows = numbered.schedule.rows
    for n, _ in _numbers(numbered, device):
        rule, position = numbered.rule[n], numbered.position[n]
        for steps, is_use in ((numbered.uses[rule], True), (numbered.feeds[rule], False)):
            for step in steps:
                issue_position = numbered.position_of(n + step, device)
                if issue_position == ABSENT or (issue_position < position) == is_use:
                    continue
                transfer, item = numbered.item(n + step, device), numbered.item(n, device)
                why = "which waits for it" if step in numbered.needs[rule] else "which consumes its data"
                message = f"{transfer} is issued after {item} at position {position}, {why}"
                if not is_use:
                    message = f"{transfer} is issued before {item} at position {position}, whose data it carries"
                yield Fault(device, issue_position, message, neighbours(rows, device, issue_position))


def _numbers(numbered: Numbered, device: int) -> Iterator[tuple[int, dict[int, int]]]:
    """The passes of a row, including parts of joint passes, each with the indices of all parts of its joint pass."""
    for n in numbered.rows[device]:
        if n >= 0:
            yield n, {n: 0}
        elif not numbered.is_transfer(n):
            parts = numbered.separate[n].parts
            index_of = {number: index for index, number in enumerate(parts)}
            yield from ((number, index_of) for number in parts)


# --- completion ----------------------------------------------------------------------------------------------------


def _incomplete(numbered: Numbered, *, experts: bool) -> list[Fault]:
    """Faults of a program that does not complete although all its rows are in order."""
    transfers = [[n for n in row if numbered.is_transfer(n)] for row in numbered.rows]
    if not walk(numbered, Completion.MEETING, rows=transfers, tolerant=True).stopped:
        return []
    if faults := list(_other_order(numbered)):
        return faults
    walks = [walk(numbered, model, tolerant=True) for model in (Completion.COMMUNICATOR, Completion.DEVICE)]
    if experts:
        walks.append(walk(numbered, Completion.DEVICE, tolerant=True, experts=True))
    return [fault for walked in walks if (fault := deadlock(walked))]


def _other_order(numbered: Numbered) -> Iterator[Fault]:
    """Faults of members that issue transfers of a communicator in a different order from its first member. Only the
    transfers that both issue are compared."""
    program = numbered.schedule
    assert isinstance(program, Program)
    issued: dict[tuple[str, int], list[int]] = {}  # by communicator and device, in the order of the row
    for device, row in enumerate(numbered.rows):
        for n in row:
            if numbered.is_transfer(n):
                issued.setdefault((numbered.route(n).communicator(program.sharing), device), []).append(n)
    groups = dict.fromkeys((route.communicator(program.sharing), route.members) for route in numbered.rules.routes)
    for communicator, (first, *followers) in groups:
        for device in followers:
            rows = [issued.get((communicator, member), []) for member in (first, device)]
            common = {*rows[0]} & {*rows[1]}
            reference, actual = ([n for n in row if n in common] for row in rows)
            for expected, n in zip(reference, actual, strict=True):
                if expected != n:
                    position = numbered.position_of(n, device)
                    item, later = numbered.item(n, device), numbered.item(expected, device)
                    message = f"{item} comes before {later} on communicator {communicator}, but not on device {first}"
                    yield Fault(device, position, message, neighbours(program.rows, device, position))
                    break
