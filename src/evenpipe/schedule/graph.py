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
from itertools import accumulate

from .dependencies import Dependencies, Route
from .order import Order
from .passes import Pass, parts_of
from .places import Places, unmet_in_row

Carried = tuple[Route, int, int]
"""Route, microbatch, slice: a transfer, on whichever member."""


@dataclass(slots=True)
class TransferNumbers:
    """Numbers of the transfers of an order.

    first: the number of the first one, above those of all passes.
    units: the number of transfers of each route; 0 if the order has too few passes for them, and all are odd.
    slices: of every sequence.
    odd: irregular transfers, which follow the others, by what they carry.
    """

    first: int
    routes: tuple[Route, ...]
    units: int
    slices: int
    odd: list[Carried] = field(default_factory=list)
    _odd_number: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """One more than the last number."""
        return self._first_odd + len(self.odd)

    @property
    def _first_odd(self) -> int:
        return self.first + len(self.routes) * self.units

    def carried(self, number: int) -> Carried:
        """Return the transfer with this number."""
        if number < self._first_odd:
            route, unit = divmod(number - self.first, self.units)
            return self.routes[route], *divmod(unit, self.slices)
        return self.odd[number - self._first_odd]

    def by_route(self) -> list[tuple[Route, range]]:
        """Return each route and the numbers of its transfers, by unit; irregular ones follow one by one."""
        starts = [(route, self.first + route.number * self.units) for route in self.routes if self.units]
        return [(route, range(start, start + self.units)) for route, start in starts] + [
            (route, range(n, n + 1)) for n, (route, _, _) in enumerate(self.odd, self._first_odd)
        ]

    def of(self, route: Route, microbatch: int, slice_: int = 0) -> int:
        """Return the number of a transfer; new ones are added to `odd`."""
        unit = microbatch * self.slices + slice_
        if slice_ < self.slices and 0 <= unit < self.units:
            return self.first + route.number * self.units + unit
        key = (route.number, microbatch, slice_)
        if key not in self._odd_number:
            self._odd_number[key] = self.end
            self.odd.append((route, microbatch, slice_))
        return self._odd_number[key]


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
    """

    items: list[Pass]
    device_of: list[int]
    first: list[int]
    transfers: TransferNumbers
    places: list[Places] = field(default_factory=list, init=False)
    stop: list[int] = field(default_factory=list, init=False)
    site: list[int] = field(default_factory=list, init=False)
    offset: list[int] = field(default_factory=list, init=False)
    waits: list[tuple[int, ...]] = field(default_factory=list, init=False)
    feeds: list[tuple[int, ...]] = field(default_factory=list, init=False)

    @classmethod
    def of(
        cls,
        order: Order,
        dependencies: Dependencies | None = None,
        *,
        absent_is_done: bool = False,
        in_order: bool = True,
    ) -> Graph:
        """Return the graph of `order`, in time linear in its passes.

        With `absent_is_done`, passes that are missing from a row count as done (`producers` does the same for other
        rows). Without `in_order`, the passes of a row are in no order yet, and `stop` is its end.
        """
        dependencies = dependencies or Dependencies.of(order)
        rows = [[item for item in row if item is not None] for row in order.rows]
        items = [item for row in rows for item in row]
        first = [0, *accumulate(map(len, rows))]
        device_of = [device for device, row in enumerate(rows) for _ in row]
        dense = len(dependencies.routes) * order.units <= 8 * len(items) + 1024
        transfers = TransferNumbers(len(items), dependencies.routes, order.units if dense else 0, order.slices)
        graph = cls(items, device_of, first, transfers)
        graph.site, graph.offset = [0] * len(items), [0] * len(items)
        for device, row in enumerate(rows):
            places = Places.of(row, order.units, first[device], order.slices)
            rule = partial(dependencies.rule, device)
            graph.places.append(places)
            graph.stop.append(first[device + 1])
            for number, _, there in unmet_in_row(places, row, first[device], rule) if in_order else ():
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
        return self.transfers.end

    def producers(self, *, absent_is_done: bool = False) -> list[int]:
        """Return for each transfer how many passes have to run first: all of its route, or only those that appear in a
        row.

        The list is indexed by number - len(items).
        """
        if not absent_is_done:
            return [len(route.producers) for route, numbers in self.transfers.by_route() for _ in numbers]
        passes = len(self.items)
        counts = [0] * (self.size - passes)
        for site, offset in zip(self.site, self.offset, strict=True):
            for base in self.feeds[site]:
                counts[base + offset - passes] += 1
        return counts

    def _number_sites(self, places: Places, dependencies: Dependencies, device: int) -> None:
        """Assign sites to the regular passes of a device."""
        site, offset = self.site, self.offset
        for (kind, stage), numbers in places.at.items():
            rule = dependencies.rule(device, kind, stage)
            here = len(self.waits)
            self.waits.append(tuple(self.transfers.of(route, 0) for route in rule.waits))
            self.feeds.append(tuple(self.transfers.of(route, 0) for route in rule.feeds))
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
                    waits += [self.transfers.of(route, part.microbatch, part.slice) for route in rule.waits]
                    feeds += [self.transfers.of(route, part.microbatch, part.slice) for route in rule.feeds]
            self.site[number], self.offset[number] = len(self.waits), 0
            self.waits.append(tuple(waits))
            self.feeds.append(tuple(feeds))
