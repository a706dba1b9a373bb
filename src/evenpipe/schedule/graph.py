"""An order as a graph of numbers, for everything that has to be quick over millions of passes.

Passes are numbered device after device in the order of their rows, idle slots left out; transfers follow. What a pass
needs from earlier passes of its own row is implied by the row and has no edge. The graph of an order that lacks passes
is legal: whoever waits for them waits for ever, which `timing` reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dependencies import Dependencies, Route
from .order import Order
from .passes import ROLE, Kind, Pass, parts_of

Key = tuple[Kind, int | None, int | None, int]
"""Kind (B for I), stage, microbatch, slice: what a need names."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Numbered passes and transfers of an order, with an edge for every need that the rows do not imply.

    items: the passes by number. device_of: the device of each. first: the number of each device's first pass, and one
    more at the end.
    carried: (route, microbatch, slice) of each transfer; the first one has number len(items).
    needs: by number, how many other numbers must be done first (all producers of a transfer, present or not).
    feeds: by number, who counts this one among its needs.
    """

    items: list[Pass]
    device_of: list[int]
    first: list[int]
    carried: list[tuple[Route, int, int]]
    needs: list[int]
    feeds: list[list[int]]

    @classmethod
    def of(cls, order: Order, dependencies: Dependencies | None = None) -> Graph:
        """The graph of `order`, in time linear in its passes."""
        dependencies = dependencies or Dependencies.of(order)
        items: list[Pass] = []
        first = [0]
        for device in range(order.devices):
            items.extend(order.passes(device))
            first.append(len(items))
        needs = [0] * len(items)
        feeds: list[list[int]] = [[] for _ in items]
        carried: list[tuple[Route, int, int]] = []
        numbers: dict[tuple[int, int, int], int] = {}

        def number(route: Route, microbatch: int, slice_: int) -> int:
            key = (route.number, microbatch, slice_)
            found = numbers.get(key)
            if found is None:
                found = numbers[key] = len(items) + len(carried)
                carried.append((route, microbatch, slice_))
                needs.append(len(route.producers))
                feeds.append([])
            return found

        for device in range(order.devices):
            where = positions(items, first[device], first[device + 1])
            for here in range(first[device], first[device + 1]):
                for part in parts_of(items[here]):
                    microbatch, slice_ = part.microbatch, part.slice
                    rule = dependencies.rule(device, part.kind, part.stage)
                    for kind, stage in rule.after:
                        there = where.get((ROLE[kind], stage, microbatch, slice_))
                        if there is None:
                            needs[here] += 1
                        elif there > here:
                            feeds[there].append(here)
                            needs[here] += 1
                    for kind, stage in rule.if_present:
                        there = where.get((kind, stage, microbatch, slice_))
                        if there is not None and there > here:
                            feeds[there].append(here)
                            needs[here] += 1
                    if microbatch is None:
                        continue
                    for route in rule.waits:
                        feeds[number(route, microbatch, slice_)].append(here)
                        needs[here] += 1
                    for route in rule.feeds:
                        feeds[here].append(number(route, microbatch, slice_))
        device_of = [device for device in range(order.devices) for _ in range(first[device], first[device + 1])]
        return cls(items, device_of, first, carried, needs, feeds)


def positions(items: list[Pass], start: int, stop: int) -> dict[Key, int]:
    """Number of each pass, or part of one, among items[start:stop]."""
    return {
        (ROLE[part.kind], part.stage, part.microbatch, part.slice): number
        for number in range(start, stop)
        for part in parts_of(items[number])
    }
