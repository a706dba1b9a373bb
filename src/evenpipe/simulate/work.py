"""A program in numbers, for the event loop.

Passes are numbered device after device in the order of their rows, also those that run beside compute: copies (O, L),
and what gathers and frees parameters and sums gradients. Transfers have numbers of their own. A row holds n for pass n
and ~k for transfer k.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from evenpipe.schedule import Costs, Dependencies, Kind, Pass, Program, Route, Transfer, check_program, parts_of
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.passes import GATHERING_KINDS, HOP_KINDS, SHARDING_KINDS, unit_of
from evenpipe.schedule.sharding import Part, Users, part_of

COPIES = frozenset({Kind.O, Kind.L})
_WAITS_FOR = {Kind.D: Kind.O, Kind.B: Kind.L, Kind.I: Kind.L, Kind.R: Kind.L}
"""The copy that a kind of pass waits for."""


@dataclass(slots=True)
class Transfers:
    """The transfers of a program, as lists by their number.

    takes: their time alone. queue: number of the communicator, or -1 without a queue; there are `queues`. slows:
    whether it slows compute down. feeds: the passes that wait for it.
    """

    route: list[Route] = field(default_factory=list)
    unit: list[int] = field(default_factory=list)
    takes: list[float] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    slows: list[bool] = field(default_factory=list)
    feeds: list[list[int]] = field(default_factory=list)
    queues: int = 0


class Work:
    """The program as the event loop needs it. By pass: `items`, `device_of`, `takes` and `needs`.

    takes: their time alone. needs: how many transfers and passes beside compute a pass waits for. beside: by number of
    a pass that runs beside compute, the passes that wait for it.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        """Raises InputError if the program has a transfer that no pass needs, or if `costs` lack a kind."""
        self.rows: list[list[int]] = []
        self.items: list[Pass] = []
        self.device_of: list[int] = []
        self.takes: list[float] = []
        self.needs: list[int] = []
        self.beside: dict[int, list[int]] = {}
        self.transfers = Transfers()
        self._program, self._dependencies = program, Dependencies.of(program)
        self._numbers: dict[int, int] = {}  # by number of a route * units + unit
        self._communicators: dict[str, int] = {}
        self._carried_by: dict[tuple[int, int], tuple[int, float]] = {}  # by number of a route, and slice
        self._each = costs.by_slice(program.slices)
        self._pass_times = PassTimes(costs, program.placement, program.slices)
        self._copy_times = [one.copy_times(program.placement) for one in self._each]
        self._sharding_times = costs.sharding_times(program.placement)
        for device in range(program.devices):
            self._row(device)

    def _row(self, device: int) -> None:
        program, items, needs, takes, feeds = self._program, self.items, self.needs, self.takes, self.transfers.feeds
        numbers, units, slices = self._numbers, program.units, program.slices
        row: list[int] = []
        times: dict[tuple[Kind, int | None, int], float] = {}
        waits: dict[tuple[Kind, int | None], tuple[Route, ...]] = {}
        copies: dict[tuple[Kind, int | None, int], int] = {}
        gathering: dict[Part, int] = {}
        users = Users.of_row(program.placement, program.barriers, program.rows[device])
        for item in program.rows[device]:
            if item is None:
                continue
            if isinstance(item, Transfer):
                row.append(~self._transfer(item, device))
                continue
            n = len(items)
            row.append(n)
            items.append(item)
            self.device_of.append(device)
            needs.append(0)
            kind, stage = item.kind, item.stage
            if kind in COPIES or kind in SHARDING_KINDS:
                alone = (self._copy_times[item.slice] if kind in COPIES else self._sharding_times).get(kind)
                takes.append(0.0 if alone is None else alone[device if stage is None else stage])
                self.beside[n] = []
                if kind in COPIES:
                    unit = unit_of(item, slices)
                    copies[kind, stage, unit] = n
                    if kind is Kind.L:
                        self._after(copies.get((Kind.O, stage, unit)), n)
                elif kind in GATHERING_KINDS:
                    gathering[part_of(item)] = n
                continue
            if gathering:
                for used in users.parts(item):
                    self._after(gathering.pop(used, None), n)
            time = None if item.parts else times.get((kind, stage, item.slice))
            if time is None:
                time = times[kind, stage, item.slice] = self._pass_times.of(item, device)
            takes.append(time)
            for part in parts_of(item):
                assert part.microbatch is not None
                what = (part.kind, part.stage)
                routes = waits.get(what)
                if routes is None:
                    routes = waits[what] = self._dependencies.rule(device, *what).waits
                unit = part.microbatch * slices + part.slice
                for route in routes:
                    key = route.number * units + unit
                    k = numbers.get(key)
                    if k is None:
                        k = self._number(key, route, unit)
                    feeds[k].append(n)
                    needs[n] += 1
                if copies and part.kind in _WAITS_FOR:
                    self._after(copies.get((_WAITS_FOR[part.kind], part.stage, unit)), n)
        self.rows.append(row)

    def _after(self, other: int | None, n: int) -> None:
        if other is not None:
            self.beside[other].append(n)
            self.needs[n] += 1

    def _transfer(self, item: Transfer, device: int) -> int:
        route = self._dependencies.route_of(item, device)
        program = self._program
        if route is None or not 0 <= item.microbatch < program.microbatches or item.slice >= program.slices:
            check_program(program).raise_if_faulty()
            raise AssertionError(f"{item} on device {device} has no route")
        unit = unit_of(item, program.slices)
        key = route.number * self._program.units + unit
        k = self._numbers.get(key)
        return self._number(key, route, unit) if k is None else k

    def _number(self, key: int, route: Route, unit: int) -> int:
        transfers = self.transfers
        k = self._numbers[key] = len(transfers.route)
        slice_ = unit % self._program.slices
        carried = self._carried_by.get((route.number, slice_))
        if carried is None:
            carried = self._carried_by[route.number, slice_] = self._carried(route, self._each[slice_])
        queue, time = carried
        transfers.route.append(route)
        transfers.unit.append(unit)
        transfers.takes.append(time)
        transfers.queue.append(queue)
        transfers.slows.append(transfers.takes[k] > 0 and route.kind not in HOP_KINDS)
        transfers.feeds.append([])
        return k

    def _carried(self, route: Route, costs: Costs) -> tuple[int, float]:
        """Return the number of the queue of a route (-1 without one), and the time of its transfers."""
        time = costs.transfer_time(route.kind, route.communicator)
        if costs.link(route.kind, route.communicator) is None:
            return -1, time
        queue = self._communicators.setdefault(route.communicator, len(self._communicators))
        self.transfers.queues = len(self._communicators)
        return queue, time
