"""A program as the event loop runs it: the numbers of `Numbered`, their times, and what waits for what.

Copies (O and L), and passes that gather or free parameters or sum gradients, overlap with compute. All other passes run
one after the other on their device.
"""

from __future__ import annotations

from collections import defaultdict

from evenpipe.schedule import Costs, Kind, Pass, Program, check_program
from evenpipe.schedule.numbered import ABSENT, Numbered
from evenpipe.schedule.passes import GATHERING_KINDS, SHARDING_KINDS
from evenpipe.schedule.sharding import ParameterUse, Part, part_of

COPIES = frozenset({Kind.O, Kind.L})


class Work:
    """The data that the event loop needs about a program.

    Attributes:
        numbered: the program in numbers. rows: per device, its passes and transfers.
        takes: by number, the time that it takes alone.
        needs: by number of a pass, how many transfers and overlapped passes it waits for.
        waiting: by number of such a transfer or pass, the passes that wait for it.
        overlapped: by number, the kind of each pass that overlaps with compute.
        queue: by number of a route, the number of its communicator's queue; -1 without one. queues: how many there are.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        """Raises InputError for a program with misplaced items, and if `costs` lack a kind."""
        self.program, self.numbered = program, Numbered(program)
        if self.numbered.misplaced or self.numbered.repeated:
            check_program(program).raise_if_faulty()
        self.rows = self.numbered.rows
        self.takes = self.numbered.durations(costs)
        self.overlapped: dict[int, Kind] = {}
        self._time_overlapped(costs)
        self.queue: list[int] = []
        self._time_transfers(costs)
        self.queues = max(self.queue, default=-1) + 1
        self.needs = [0] * self.numbered.size
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)
        self._count_needs()

    def item(self, n: int) -> Pass:
        """The pass with this number, or the joint pass that contains it."""
        item = self.numbered.item(n, self.numbered.device(n))
        assert isinstance(item, Pass)
        return item

    def _time_overlapped(self, costs: Costs) -> None:
        numbered, placement = self.numbered, self.program.placement
        copy_times = [slice_costs.copy_times(placement) for slice_costs in costs.by_slice(numbered.slices)]
        for group, first in numbered.groups.items():
            if group.kind in COPIES and group.stage is not None:
                for n in range(first, first + numbered.units):
                    self.takes[n] = copy_times[n % numbered.slices][group.kind][group.stage]
                    self.overlapped[n] = group.kind
        sharding_times = costs.sharding_times(placement)
        for n, (device, _, item, _) in numbered.separate.items():
            if item.kind in SHARDING_KINDS:
                self.overlapped[n] = item.kind
                times = sharding_times.get(item.kind)
                self.takes[n] = 0.0 if times is None else times[device if item.stage is None else item.stage]

    def _time_transfers(self, costs: Costs) -> None:
        numbered, each = self.numbered, costs.by_slice(self.numbered.slices)
        communicators: dict[str, int] = {}
        for route in numbered.rules.routes:
            name = route.communicator()
            times = [slice_costs.transfer_time(route.kind, name) for slice_costs in each]
            self.takes[numbered.place_of(route)] = times * (numbered.units // numbered.slices)
            queued = costs.link(route.kind, name) is not None
            self.queue.append(communicators.setdefault(name, len(communicators)) if queued else -1)

    def _count_needs(self) -> None:
        numbered, overlapped = self.numbered, self.overlapped
        for device, row in enumerate(self.rows):
            for n in row:
                if not numbered.is_transfer(n):
                    for step in numbered.needs[numbered.rule[n]]:
                        needed = n + step
                        if numbered.is_transfer(needed) or (
                            needed in overlapped and numbered.position[needed] != ABSENT
                        ):
                            self._wait(n, needed)
            self._wait_for_parameters(device, row)

    def _wait_for_parameters(self, device: int, row: list[int]) -> None:
        """Make the first pass that uses gathered parameters wait for them."""
        numbered, program = self.numbered, self.program
        if not any(n in numbered.separate for n in row):
            return
        users = ParameterUse.of_row(program.placement, program.vocabulary, program.rows[device])
        gathering: dict[Part, int] = {}
        for n in row:
            if numbered.is_transfer(n):
                continue
            item = self.item(n)
            if item.kind in GATHERING_KINDS:
                gathering[part_of(item)] = n
            for component in users.parts(item):
                if component in gathering:
                    self._wait(n, gathering.pop(component))

    def _wait(self, n: int, awaited: int) -> None:
        self.waiting[awaited].append(n)
        self.needs[n] += 1
