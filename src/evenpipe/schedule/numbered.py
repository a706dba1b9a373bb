"""Number the passes and transfers of a schedule, to process millions of them fast.

The passes of a group (kind, stage and device) have consecutive numbers, by unit. The passes that a pass needs are the
same number of steps away in every unit, so needs are tuples of steps, resolved once per group and slice. Transfers have
negative numbers, by route and unit, so they are at the end of a list indexed by number. Between the two are the
*separate* passes, which belong to no single unit: joint passes, and passes that gather, free and reduce parameters.

    0 ... passes - 1     passes, by group and unit
    - size + passes      the last separate pass; the first is - transfers - 1
    - transfers ... -1   transfers, by route and unit

A joint pass waits for everything that its parts need, takes their total time, and produces their results when it ends.
Its parts have numbers too, and complete with it.

The schedule may lack passes, repeat them, or have passes that belong nowhere; those have no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .costs import Costs, PassTimes
from .order import DeviceRows
from .passes import ROLE, SHARDING_KINDS, Item, Kind, Pass, Transfer, parts_of
from .rules import IF_PRESENT, PassGroup, Route, Rules

ABSENT = -1
"""Position of a pass or transfer that is in no row."""


class Apart(NamedTuple):
    """A pass that belongs to no single unit. parts: numbers of the parts of a joint pass."""

    device: int
    position: int
    item: Pass
    parts: tuple[int, ...]


class Numbered:
    """The numbers of an order or program.

    Attributes:
        rows: per device, the numbers in the order of its row, each once.
        groups: the first number of each group.
        position: by number of a pass of a group, its position in the row of its device, or ABSENT.
        issued: per device and route number, the positions of its transfers by unit.
        separate: separate passes, by number: -transfers - 1 is the first, -transfers - 2 the second, and so on.
        misplaced, repeated: (device, position) of items that belong nowhere, or are already in the row.
        needs, uses, feeds: by `rule[number]`, steps to the passes and transfers that must be complete before it, to the
            transfers that must be issued before it, and to the transfers whose data it produces.
    """

    def __init__(self, schedule: DeviceRows) -> None:
        self.schedule, self.rules, self.slices = schedule, Rules.of(schedule), schedule.slices
        self.microbatches = _microbatches(schedule)
        self._index_of = {microbatch: index for index, microbatch in enumerate(self.microbatches)}
        self.units = len(self.microbatches) * self.slices
        self.transfers = len(self.rules.routes) * self.units
        self.groups: dict[PassGroup, int] = {}
        self.kinds: dict[tuple[int, Kind, int | None], int] = {}
        """The first number of each device, kind (B or I) and stage in the rows."""
        self.position: list[int] = []
        self.issued: list[dict[int, list[int]]] = [{} for _ in schedule.rows]
        self.separate: dict[int, Apart] = {}
        self.misplaced: list[tuple[int, int]] = []
        self.repeated: list[tuple[int, int]] = []
        self.rows = [self._number_row(device, row) for device, row in enumerate(schedule.rows)]
        self._resolve_rules()

    # --- numbers ---------------------------------------------------------------------------------------------------

    def _number_row(self, device: int, row: Sequence[Item | None]) -> list[int]:
        numbers: list[int] = []
        locations: dict[tuple[object, ...], tuple[int, list[int], int] | None] = {}
        for position, item in enumerate(row):
            if item is None:
                continue
            key = (item.kind, item.stage, item.peer) if isinstance(item, Transfer) else (item.kind, item.stage)
            try:
                location = locations[key]
            except KeyError:
                location = locations[key] = self._locate(device, item)
            if location is None:
                if isinstance(item, Pass) and (item.parts or item.kind in SHARDING_KINDS):
                    numbers.append(self._number_separate(device, position, item))
                else:
                    self.misplaced.append((device, position))
                continue
            first, positions, start = location
            unit = self._unit(item)
            if unit is None:
                self.misplaced.append((device, position))
            elif positions[start + unit] != ABSENT:
                self.repeated.append((device, position))
            else:
                positions[start + unit] = position
                numbers.append(first + unit)
        return numbers

    def _locate(self, device: int, item: Item) -> tuple[int, list[int], int] | None:
        """The number of unit 0, a list of positions and the index of unit 0 in it; None if the item does not belong."""
        if isinstance(item, Transfer):
            route = self.rules.route(device, item)
            if route is None:
                return None
            positions = self.issued[device][route.number] = [ABSENT] * self.units
            return self.transfers_of(route).start, positions, 0
        group = self.rules.group(device, item.kind, item.stage)
        if group is None:
            return None
        first = self.kinds[device, item.kind, item.stage] = self._first(group)
        return first, self.position, first

    def _first(self, group: PassGroup) -> int:
        first = self.groups.get(group)
        if first is None:
            first = self.groups[group] = len(self.position)
            self.position += [ABSENT] * self.units
        return first

    def _unit(self, item: Item) -> int | None:
        index = self._index_of.get(item.microbatch)  # type: ignore[arg-type]
        return None if index is None or item.slice >= self.slices else index * self.slices + item.slice

    def _number_separate(self, device: int, position: int, item: Pass) -> int:
        parts = []
        for component in item.parts:
            location, unit = self._locate(device, component), self._unit(component)
            if location is None or unit is None:
                self.misplaced.append((device, position))
            elif self.position[n := location[0] + unit] != ABSENT:
                self.repeated.append((device, position))
            else:
                self.position[n] = position
                parts.append(n)
        number = -self.transfers - 1 - len(self.separate)
        self.separate[number] = Apart(device, position, item, tuple(parts))
        return number

    # --- rules -----------------------------------------------------------------------------------------------------

    def _resolve_rules(self) -> None:
        units, slices = self.units, self.slices
        self.needs: list[tuple[int, ...]] = []
        self.uses: list[tuple[int, ...]] = []
        self.feeds: list[tuple[int, ...]] = []
        self.rule: list[int] = []
        for group, first in list(self.groups.items()):
            rule = self.rules.rule(group)
            uses, waits, feeds = (
                tuple(self.transfers_of(route).start - first for route in routes)
                for routes in (rule.uses, rule.waits, rule.feeds)
            )
            self.rule += list(range(len(self.needs), len(self.needs) + slices)) * (units // slices)
            for slice_ in range(slices):
                local_steps = []
                for kind, stage, step in rule.needs:
                    needed = PassGroup(group.device, kind, stage)
                    if 0 <= slice_ + step < slices and (kind not in IF_PRESENT or needed in self.groups):
                        local_steps.append(self._first(needed) + step - first)
                self.needs.append((*local_steps, *waits))
                self.uses.append(uses)
                self.feeds.append(feeds)
        self.passes = len(self.position)
        self._groups = list(self.groups)
        self.rule += [-1] * (self.passes - len(self.rule))  # groups that other passes need but that are in no row
        separate_rules = []
        for number, entry in self.separate.items():
            separate_rules.append(len(self.needs))
            for table in (self.needs, self.uses, self.feeds):
                steps = [
                    component + step - number
                    for index, component in enumerate(entry.parts)
                    for step in table[self.rule[component]]
                    if component + step not in entry.parts[:index]
                ]
                table.append(tuple(steps))
        self.rule += separate_rules[::-1] + [-1] * self.transfers
        self.size = len(self.rule)

    # --- lookups ---------------------------------------------------------------------------------------------------

    def number(self, device: int, item: Item) -> int | None:
        """The number of a pass of a group, or of a transfer, on a device; None if it has none there."""
        unit, first = self._unit(item), None
        if isinstance(item, Transfer):
            if route := self.rules.route(device, item):
                first = self.transfers_of(route).start
        elif group := self.rules.group(device, item.kind, item.stage):
            first = self.groups.get(group)
        return None if first is None or unit is None else first + unit

    def is_transfer(self, n: int) -> bool:
        """Whether `n` is a transfer."""
        return -self.transfers <= n < 0

    def route(self, n: int) -> Route:
        """The route of a transfer."""
        return self.rules.routes[(n + self.transfers) // self.units]

    def transfers_of(self, route: Route) -> range:
        """The numbers of the transfers of a route, by unit."""
        first = route.number * self.units - self.transfers
        return range(first, first + self.units)

    def unit_of(self, transfer: int) -> int:
        """The unit of a transfer."""
        return (transfer + self.transfers) % self.units

    def place_of(self, route: Route) -> slice:
        """The slice of a list indexed by number that has the transfers of a route."""
        first = self.size - self.transfers + route.number * self.units
        return slice(first, first + self.units)

    def about(self, n: int) -> tuple[int, int]:
        """The microbatch and slice of a pass of a group, or of a transfer."""
        index, slice_ = divmod((n + self.transfers if n < 0 else n) % self.units, self.slices)
        return self.microbatches[index], slice_

    def position_of(self, n: int, device: int) -> int:
        """The position of a pass, or of a transfer in the row of a device; ABSENT if it is not there."""
        if n >= 0:
            return self.position[n]
        if n < -self.transfers:
            return self.separate[n].position
        route, unit = divmod(n + self.transfers, self.units)
        positions = self.issued[device].get(route)
        return ABSENT if positions is None else positions[unit]

    def item(self, n: int, device: int) -> Item:
        """A pass or transfer as `device` names it; B for a backward that is in no row."""
        if n < -self.transfers:
            return self.separate[n].item
        if n < 0:
            return self.route(n).transfer(device, *self.about(n))
        group, unit = self._groups[n // self.units], n % self.units
        if self.position[n] != ABSENT:
            scheduled = self.schedule.rows[group.device][self.position[n]]
            assert isinstance(scheduled, Pass)
            if not scheduled.parts:
                return scheduled
            for component in scheduled.parts:
                if (
                    ROLE[component.kind] is group.kind
                    and component.stage == group.stage
                    and self._unit(component) == unit
                ):
                    return component
        return Pass(group.kind, group.stage, *self.about(n))

    def device(self, n: int) -> int:
        """The device of a pass."""
        return self.separate[n].device if n < 0 else self._groups[n // self.units].device

    def durations(self, costs: Costs) -> list[float]:
        """The duration of each number; 0 for the parts of joint passes.

        Raises InputError if `costs` lack a kind, or have lists of the wrong length.
        """
        schedule, units, slices = self.schedule, self.units, self.slices
        times = PassTimes(costs, schedule.placement, slices)
        takes = [0.0] * self.size
        for (device, kind, stage), first in self.kinds.items():
            slice_times = [times.of(Pass(kind, stage, 0, slice_), device) for slice_ in range(slices)]
            takes[first : first + units] = slice_times * (units // slices)
        mixed = {(device, stage) for device, kind, stage in self.kinds if kind is Kind.I} & {
            (device, stage) for device, kind, stage in self.kinds if kind is Kind.B
        }
        for device, _ in mixed:  # some backwards of a stage are full, others split
            for n in self.rows[device]:
                if n >= 0 and isinstance(item := schedule.rows[device][self.position[n]], Pass):
                    takes[n] = times.of(item, device)
        for number, entry in self.separate.items():
            takes[number] = times.of(entry.item, entry.device)
            for component in entry.parts:
                takes[component] = 0.0
        per_slice = costs.by_slice(slices if costs.slices else 1)
        for route in self.rules.routes:
            slice_times = [slice_costs.transfer_time(route.kind) for slice_costs in per_slice]
            takes[self.place_of(route)] = slice_times * (units // len(slice_times))
        return takes


def _microbatches(schedule: DeviceRows) -> Sequence[int]:
    """The microbatches that get numbers: all of them, or only those that appear if the rows have few items."""
    if schedule.microbatches <= sum(map(len, schedule.rows)):
        return range(schedule.microbatches)
    items = (item for row in schedule.rows for item in row if item is not None)
    components = (component for item in items for component in (parts_of(item) if isinstance(item, Pass) else (item,)))
    known = {component.microbatch for component in components if component.microbatch is not None}
    return sorted(microbatch for microbatch in known if 0 <= microbatch < schedule.microbatches)
