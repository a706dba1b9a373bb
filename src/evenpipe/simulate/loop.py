"""The event loop: all devices execute their rows in simulated time.

When a pass ends, its device issues the transfers, copies and collectives over replicas that precede the next pass. That
pass starts when those it needs have completed. A transfer starts once its last member has issued it (its data is then
ready, because each producer issues it after the pass that computes the data) and, if its communicator has a link, once
the link has carried all transfers that were ready earlier. While a collective runs, compute on its members runs at
1 / `overlap_slowdown` of its speed; likewise at 1 / `contention` while all other devices compute, and proportionally
while only some do. Events are processed by time, so the result does not depend on the order of devices.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from evenpipe.schedule import CopyEngine, Kind
from evenpipe.schedule.copy_streams import CopyStreams

from .network import COMMUNICATOR, Network
from .work import COPIES, Work

START, DEVICE, TRANSFER = "start", "device", "transfer"


class Loop:
    """Start, end and cause of every event, after `run`.

    By number: `start`, `end`, `why` (a resource of `Cause`) and `who` (the number of the event that it waited for). By
    transfer: `posted`, the time at which the destination of a hop issued it. `issued` has the time at which each pass
    that overlaps with compute was issued. `ended` lists all numbers in the order in which they ended, so nothing comes
    before what it waited for.
    """

    def __init__(self, work: Work, slowdown: float, engine: CopyEngine, contention: float = 1.0) -> None:
        numbered, size, devices = work.numbered, work.numbered.size, len(work.rows)
        self.work, self.numbered, self.slowdown, self.contention = work, numbered, slowdown, contention
        self.units, self.routes = numbered.units, numbered.rules.routes
        self.first_transfer = -numbered.transfers
        self.computing = self.counted = 0  # devices that compute, now and at the last change of speeds
        self.rate = [1.0] * devices  # current slowdown of a running pass
        self.start, self.end = [0.0] * size, [-1.0] * size
        self.why, self.who = [START] * size, [0] * size
        self.posted = [0.0] * numbered.transfers
        self.issued: dict[int, float] = {}
        self.ended: list[int] = []
        self.needs = list(work.needs)
        self.missing = [len(route.members) for route in self.routes for _ in range(self.units)]
        self.position = [0] * devices  # position in the row
        self.clock = [0.0] * devices  # end of the last pass
        self.running: list[int | None] = [None] * devices
        self.last: list[int | None] = [None] * devices  # the last pass
        self.carrying: list[int | None] = [None] * work.queues
        self.pending: list[deque[int]] = [deque() for _ in range(work.queues)]
        self.active = [0] * devices  # running collectives
        self.left, self.since, self.due = [0.0] * devices, [0.0] * devices, [0.0] * devices
        # A device issues a copy back after D, which waits for the copy out, so the copy back has nothing to wait for.
        self.copies = CopyStreams(engine, self._line_of, lambda _: 0, self._begin_copy, self.held_up)
        self.network = Network(work, self)
        self.heap: list[tuple[float, int]] = []

    def run(self) -> bool:
        """Run until no device can proceed; return whether all rows and all transfers were completed."""
        for device in range(len(self.work.rows)):
            self._walk(device, 0.0)
        heap, device_of, running, due = self.heap, self.numbered.device, self.running, self.due
        overlapped, first_transfer = self.work.overlapped, self.first_transfer
        now = 0.0
        while heap:
            if self.contention > 1 and self.computing != self.counted:
                self.counted = self.computing
                for device in range(len(running)):
                    self._change_speed(device, now)
            now, number = heappop(heap)
            if first_transfer <= number < 0:
                self._carried(number, now)
                continue
            if number in overlapped:
                if overlapped[number] in COPIES:
                    self.over(number, now)
                    self.copies.done(number, now)
                else:
                    self.network.done(number, now)
                continue
            device = device_of(number)
            if running[device] == number and due[device] == now:
                running[device] = None
                self.computing -= 1
                self.last[device] = number
                self.end[number] = self.clock[device] = now
                self.ended.append(number)
                self._walk(device, now)
        return all(at == len(row) for at, row in zip(self.position, self.work.rows, strict=True)) and all(
            missing == 0 for missing in self.missing
        )

    def _walk(self, device: int, now: float) -> None:
        """Advance to the next pass, and start it if all its needs are met."""
        row, at, overlapped, first_transfer = (
            self.work.rows[device],
            self.position[device],
            self.work.overlapped,
            self.first_transfer,
        )
        while at < len(row):
            number = row[at]
            if first_transfer <= number < 0:
                self._issue(number, device, now)
            elif number in overlapped:
                self.issued[number] = now
                self.why[number], self.who[number] = self._since(device)
                (self.copies if overlapped[number] in COPIES else self.network).submit(number, now)
            elif self.needs[number]:
                break
            else:
                if now <= self.clock[device]:
                    self.why[number], self.who[number] = self._since(device)
                self.start[number] = self.since[device] = now
                self.running[device] = number
                self.computing += 1
                takes = self.left[device] = self.work.takes[number]
                rate = self.rate[device] = self._rate(device)
                ends = self.due[device] = now + takes * rate
                heappush(self.heap, (ends, number))
                at += 1
                break
            at += 1
        self.position[device] = at

    def over(self, number: int, now: float) -> None:
        """Record the end of a pass that overlaps with compute."""
        self.end[number] = now
        self.ended.append(number)
        for waiting in self.work.waiting.get(number, ()):
            self.arrived(waiting, number, now)

    def held_up(self, number: int, resource: str, holder: int) -> None:
        """Record that a transfer or copy had to wait for `resource`, which was busy with `holder`."""
        self.why[number], self.who[number] = resource, holder

    def _begin_copy(self, number: int, now: float) -> None:
        self.start[number] = now
        heappush(self.heap, (now + self.work.takes[number], number))

    def _line_of(self, copy: int) -> tuple[int, bool]:
        return self.numbered.device(copy), self.work.overlapped[copy] is Kind.L

    def _since(self, device: int) -> tuple[str, int]:
        """Why the device did not get here earlier."""
        last = self.last[device]
        return (START, 0) if last is None else (DEVICE, last)

    def _issue(self, transfer: int, device: int, now: float) -> None:
        self.missing[transfer] -= 1
        route = (transfer - self.first_transfer) // self.units
        if device == self.routes[route].members[-1]:
            self.posted[transfer] = now
        if self.missing[transfer]:
            return
        self.why[transfer], self.who[transfer] = self._since(device)
        queue = self.work.queue[route]
        if queue >= 0:
            if self.carrying[queue] is not None:
                self.pending[queue].append(transfer)
                return
            self.carrying[queue] = transfer
        self._carry(transfer, now)

    def _carry(self, transfer: int, now: float) -> None:
        self.start[transfer] = now
        if self.slowdown > 1:
            self._slow_down(transfer, 1, now)
        if self.network.shared and self._is_on_network(transfer):
            members = self.numbered.route(transfer).members
            self.network.carry(transfer, members, self.work.takes[transfer], now)
        else:
            heappush(self.heap, (now + self.work.takes[transfer], transfer))

    def _is_on_network(self, transfer: int) -> bool:
        """Whether it is a hop with a link, which shares the network with collectives over replicas."""
        route = (transfer - self.first_transfer) // self.units
        return self.work.queue[route] >= 0 and self.routes[route].is_hop

    def _carried(self, transfer: int, now: float) -> None:
        if self.network.shared and self._is_on_network(transfer) and not self.network.done(transfer, now):
            return
        self.end[transfer] = now
        self.ended.append(transfer)
        if self.slowdown > 1:
            self._slow_down(transfer, -1, now)
        queue = self.work.queue[(transfer - self.first_transfer) // self.units]
        if queue >= 0:
            self.carrying[queue] = None
            if self.pending[queue]:
                following = self.carrying[queue] = self.pending[queue].popleft()
                self.held_up(following, COMMUNICATOR, transfer)
                self._carry(following, now)
        for number in self.work.waiting.get(transfer, ()):
            self.arrived(number, transfer, now)

    def _slow_down(self, transfer: int, added: int, now: float) -> None:
        """Update the number of running collectives on the members of one that begins or ends."""
        route = self.numbered.route(transfer)
        if not route.is_hop and self.work.takes[transfer] > 0:
            for member in route.members:
                self.active[member] += added
                self._change_speed(member, now)

    def _rate(self, device: int) -> float:
        """The current slowdown of compute on a device."""
        rate = self.slowdown if self.active[device] else 1.0
        if self.contention > 1 and len(self.running) > 1:
            competing = self.computing - (self.running[device] is not None)
            rate *= 1 + (self.contention - 1) * competing / (len(self.running) - 1)
        return rate

    def _change_speed(self, device: int, now: float) -> None:
        """Update the speed of a running pass."""
        number, previous, current = self.running[device], self.rate[device], self._rate(device)
        if number is not None and current != previous:
            self.rate[device] = current
            self.left[device] = max(0.0, self.left[device] - (now - self.since[device]) / previous)
            self.since[device] = now
            self.due[device] = now + self.left[device] * current
            heappush(self.heap, (self.due[device], number))

    def arrived(self, number: int, awaited: int, now: float) -> None:
        """Mark one need of a pass as met; `awaited` has just completed."""
        self.needs[number] -= 1
        self.why[number], self.who[number] = TRANSFER, awaited
        if self.needs[number]:
            return
        device = self.numbered.device(number)
        at = self.position[device]
        if self.running[device] is None and at < len(self.work.rows[device]) and self.work.rows[device][at] == number:
            self._walk(device, now)
