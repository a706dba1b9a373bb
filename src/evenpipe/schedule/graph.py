"""An order in numbers, for fast work on millions of passes.

Passes are numbered device by device in the order of their rows, without idle slots; then transfers, route by route and
by unit. A pass waits for and feeds the same transfers in every unit, so these are stored once per *site* (the passes of
one device, kind and stage): the number of a transfer is that of unit 0, which the tables have, plus the `offset` of the
pass, its unit.

Irregular items (passes run as one, units that do not exist, files that are mostly empty) have a site of their own, with
offset 0.

Needs within a row are checked only once: `stop` is where a row ends, or reaches a pass that needs a later one. The
graph of an order that lacks passes is legal: passes that need them wait forever, and `timing` reports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from .dependencies import Dependencies, Route
from .order import Order
from .passes import Pass, parts_of
from .places import Places, unmet_in_row

Carried = tuple[Route, int, int]
"""Route, microbatch, slice: a transfer, on whichever member."""


@dataclass(slots=True)
class Graph:
    """Numbered passes and transfers of an order.

    items: the passes by number.
    device_of: the device of each.
    first: the number of each device's first pass, and one more at the end.
    stop: per device the number of the first pass that can never run because of its own row, or the end.
    site, offset: by number of a pass.
    waits, feeds: by site, the numbers of transfers for offset 0.
    places: per device, the places of its items, in these numbers.
    units: the number of transfers of each route; 0 if the order has too few passes for them, and all are odd.
    slices: of every sequence.
    odd: irregular transfers, which follow those, by number and by what they carry.
    """

    items: list[Pass]
    device_of: list[int]
    first: list[int]
    routes: tuple[Route, ...]
    units: int
    slices: int
    places: list[Places] = field(default_factory=list, init=False)
    stop: list[int] = field(default_factory=list, init=False)
    site: list[int] = field(default_factory=list, init=False)
    offset: list[int] = field(default_factory=list, init=False)
    waits: list[tuple[int, ...]] = field(default_factory=list, init=False)
    feeds: list[tuple[int, ...]] = field(default_factory=list, init=False)
    odd: list[Carried] = field(default_factory=list, init=False)
    _odd_number: dict[tuple[int, int, int], int] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, order: Order, dependencies: Dependencies | None = None, *, absent_is_done: bool = False) -> Graph:
        """Return the graph of `order`, in time linear in its passes.

        With `absent_is_done`, passes that are missing from a row count as done (`producers` does the same for other
        rows).
        """
        dependencies = dependencies or Dependencies.of(order)
        rows = [[item for item in row if item is not None] for row in order.rows]
        items = [item for row in rows for item in row]
        first = [0]
        for row in rows:
            first.append(first[-1] + len(row))
        device_of = [device for device, row in enumerate(rows) for _ in row]
        dense = len(dependencies.routes) * order.units <= 8 * len(items) + 1024
        graph = cls(items, device_of, first, dependencies.routes, order.units if dense else 0, order.slices)
        graph.site, graph.offset = [0] * len(items), [0] * len(items)
        for device, row in enumerate(rows):
            places = Places.of(row, order.units, first[device], order.slices)
            rule = partial(dependencies.rule, device)
            graph.places.append(places)
            graph.stop.append(first[device + 1])
            for number, _, there in unmet_in_row(places, row, first[device], rule):
                if there is not None or not absent_is_done:
                    graph.stop[device] = number
                    break
            if dense:
                graph._number_sites(places, dependencies, device)
                graph._number_apart(dict.fromkeys((*places.joint, *places.sharding, *places.odd)), dependencies, device)
            else:
                graph._number_apart(range(first[device], first[device + 1]), dependencies, device)
        return graph

    @property
    def size(self) -> int:
        """Number of passes and transfers."""
        return len(self.items) + len(self.routes) * self.units + len(self.odd)

    def carried(self, number: int) -> Carried:
        """Return the transfer with this number."""
        ordinary = number - len(self.items)
        if ordinary < len(self.routes) * self.units:
            route, unit = divmod(ordinary, self.units)
            return self.routes[route], *divmod(unit, self.slices)
        return self.odd[ordinary - len(self.routes) * self.units]

    def by_route(self) -> list[tuple[Route, range]]:
        """Return each route and the numbers of its transfers, by unit; irregular ones follow one by one."""
        count, passes = self.units, len(self.items)
        starts = [(route, passes + route.number * count) for route in self.routes if count]
        odd = self.size - len(self.odd)
        return [(route, range(start, start + count)) for route, start in starts] + [
            (route, range(n, n + 1)) for n, (route, _, _) in enumerate(self.odd, odd)
        ]

    def producers(self, *, absent_is_done: bool = False) -> list[int]:
        """Return for each transfer how many passes have to run first: all of its route, or only those that appear in a
        row.

        The list is indexed by number - len(items).
        """
        if not absent_is_done:
            return [len(route.producers) for route, numbers in self.by_route() for _ in numbers]
        passes = len(self.items)
        counts = [0] * (self.size - passes)
        for site, offset in zip(self.site, self.offset, strict=True):
            for base in self.feeds[site]:
                counts[base + offset - passes] += 1
        return counts

    def transfer(self, route: Route, microbatch: int, slice_: int = 0) -> int:
        """Return the number of a transfer; new ones are added to `odd`."""
        unit = microbatch * self.slices + slice_
        if slice_ < self.slices and 0 <= unit < self.units:
            return len(self.items) + route.number * self.units + unit
        key = (route.number, microbatch, slice_)
        if key not in self._odd_number:
            self._odd_number[key] = self.size
            self.odd.append((route, microbatch, slice_))
        return self._odd_number[key]

    def _number_sites(self, places: Places, dependencies: Dependencies, device: int) -> None:
        """Assign sites to the regular passes of a device."""
        site, offset = self.site, self.offset
        for (kind, stage), numbers in places.at.items():
            rule = dependencies.rule(device, kind, stage)
            here = len(self.waits)
            self.waits.append(tuple(self.transfer(route, 0) for route in rule.waits))
            self.feeds.append(tuple(self.transfer(route, 0) for route in rule.feeds))
            for unit, number in enumerate(numbers):
                if number >= 0:
                    site[number] = here
                    offset[number] = unit

    def _number_apart(self, numbers: Iterable[int], dependencies: Dependencies, device: int) -> None:
        """Assign a site to each of these passes."""
        for number in numbers:
            waits, feeds = [], []
            for part in parts_of(self.items[number]):
                if part.microbatch is not None:
                    rule = dependencies.rule(device, part.kind, part.stage)
                    waits += [self.transfer(route, part.microbatch, part.slice) for route in rule.waits]
                    feeds += [self.transfer(route, part.microbatch, part.slice) for route in rule.feeds]
            self.site[number], self.offset[number] = len(self.waits), 0
            self.waits.append(tuple(waits))
            self.feeds.append(tuple(feeds))
