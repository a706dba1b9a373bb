"""The event loop: all devices execute their rows in simulated time.

When a pass has ended, its device issues the transfers, copies and collectives over replicas before the next pass. That
pass starts when those it needs have completed. A transfer starts when its last member has issued it (so its data is
ready: on each producer it comes after the pass that makes it) and, if its communicator has a link, when the link has
carried earlier ready transfers. While a collective runs, compute on its members runs at 1 / `overlap_slowdown` of its
speed, for exactly that time; likewise at 1 / `contention` while all other devices compute, and in between while some
do. Events are processed by time, so the result does not depend on the order of devices.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from evenpipe.schedule import CopyEngine, Kind
from evenpipe.schedule.copy_streams import CopyStreams
from evenpipe.schedule.passes import HOP_KINDS

from .network import COMMUNICATOR, Network
from .work import COPIES, Work

START, DEVICE, TRANSFER = "start", "device", "transfer"


class Loop:
    """Start, end and cause of every event, after `run`.

    By number, n for pass or copy n and ~k for transfer k, whose entries are at the other end of the lists: `start`,
    `end`, `why` (a resource of `Cause`) and `who`, again a number. By transfer k: `posted`, when the destination of a
    hop issued it. `issued` has the time at which each copy was issued, by pass.
    """

    def __init__(self, work: Work, slowdown: float, engine: CopyEngine, contention: float = 1.0) -> None:
        passes, transfers, devices = len(work.items), len(work.transfers.route), len(work.rows)
        self.work, self.transfers, self.slowdown, self.contention = work, work.transfers, slowdown, contention
        self.computing = self.counted = 0  # devices that compute, now and at the last change of speeds
        self.rate = [1.0] * devices  # current slowdown of a running pass
        self.start, self.end = [0.0] * (passes + transfers), [-1.0] * (passes + transfers)
        self.why, self.who = [START] * (passes + transfers), [0] * (passes + transfers)
        self.posted = [0.0] * transfers
        self.issued: dict[int, float] = {}
        self.needs = list(work.needs)
        self.missing = [len(route.members) for route in work.transfers.route]
        self.stands = [0] * devices  # position in the row
        self.clock = [0.0] * devices  # end of the last pass
        self.running = [-1] * devices
        self.last = [-1] * devices  # the last pass
        self.carrying = [-1] * work.transfers.queues
        self.pending: list[deque[int]] = [deque() for _ in range(work.transfers.queues)]
        self.active = [0] * devices  # running collectives
        self.left, self.since, self.due = [0.0] * devices, [0.0] * devices, [0.0] * devices
        waits = self.needs.__getitem__
        self.copies = CopyStreams(engine, self._place_of, waits, self._begin_copy, self.held_up)
        self.network = Network(work, self)
        self.heap: list[tuple[float, int]] = []

    def run(self) -> bool:
        """Run until no device can move; return whether all reached the end of their rows and made every transfer."""
        for device in range(len(self.work.rows)):
            self._walk(device, 0.0)
        heap, device_of, running, due = self.heap, self.work.device_of, self.running, self.due
        now = 0.0
        while heap:
            if self.contention > 1 and self.computing != self.counted:
                self.counted = self.computing
                for device in range(len(running)):
                    self._change_speed(device, now)
            now, number = heappop(heap)
            if number < 0:
                self._carried(~number, now)
                continue
            device = device_of[number]
            if number in self.work.beside:
                if self.work.items[number].kind in COPIES:
                    self.over(number, now)
                    self.copies.done(number, now)
                else:
                    self.network.done(number, now)
            elif running[device] == number and due[device] == now:
                running[device] = -1
                self.computing -= 1
                self.last[device] = number
                self.end[number] = self.clock[device] = now
                self._walk(device, now)
        return all(at == len(row) for at, row in zip(self.stands, self.work.rows, strict=True)) and all(
            missing == 0 for missing in self.missing
        )

    def _walk(self, device: int, now: float) -> None:
        """Go on to the next pass, and start it if nothing is missing."""
        row, at = self.work.rows[device], self.stands[device]
        while at < len(row):
            number = row[at]
            if number < 0:
                self._issue(~number, device, now)
            elif number in self.work.beside:
                self.issued[number] = now
                self.why[number], self.who[number] = self._since(device)
                (self.copies if self.work.items[number].kind in COPIES else self.network).submit(number, now)
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
        self.stands[device] = at

    def over(self, number: int, now: float) -> None:
        """Note the end of a pass beside compute."""
        self.end[number] = now
        for waiting in self.work.beside[number]:
            self.arrived(waiting, number, now)

    def held_up(self, number: int, what: str, by: int) -> None:
        """Note that something had to wait for `what`, which was busy with `by`."""
        self.why[number], self.who[number] = what, by

    def _begin_copy(self, number: int, now: float) -> None:
        self.start[number] = now
        heappush(self.heap, (now + self.work.takes[number], number))

    def _place_of(self, copy: int) -> tuple[int, bool]:
        return self.work.device_of[copy], self.work.items[copy].kind is Kind.L

    def _since(self, device: int) -> tuple[str, int]:
        """Return why the device is not further."""
        return (START, 0) if self.last[device] < 0 else (DEVICE, self.last[device])

    def _issue(self, k: int, device: int, now: float) -> None:
        self.missing[k] -= 1
        if device == self.transfers.route[k].members[-1]:
            self.posted[k] = now
        if self.missing[k]:
            return
        self.why[~k], self.who[~k] = self._since(device)
        queue = self.transfers.queue[k]
        if queue >= 0:
            if self.carrying[queue] >= 0:
                self.pending[queue].append(k)
                return
            self.carrying[queue] = k
        self._carry(k, now)

    def _carry(self, k: int, now: float) -> None:
        self.start[~k] = now
        self._slow_down(k, 1, now)
        if self._is_on_network(k):
            self.network.carry(~k, self.transfers.route[k].members, self.transfers.takes[k], now)
        else:
            heappush(self.heap, (now + self.transfers.takes[k], ~k))

    def _is_on_network(self, k: int) -> bool:
        """Return whether it is a hop that shares a link with collectives over replicas."""
        return self.network.shared and self.transfers.queue[k] >= 0 and self.transfers.route[k].kind in HOP_KINDS

    def _carried(self, k: int, now: float) -> None:
        if self._is_on_network(k) and not self.network.done(~k, now):
            return
        self.end[~k] = now
        self._slow_down(k, -1, now)
        queue = self.transfers.queue[k]
        if queue >= 0:
            self.carrying[queue] = -1
            if self.pending[queue]:
                following = self.carrying[queue] = self.pending[queue].popleft()
                self.held_up(~following, COMMUNICATOR, ~k)
                self._carry(following, now)
        for number in self.transfers.feeds[k]:
            self.arrived(number, ~k, now)

    def _slow_down(self, k: int, added: int, now: float) -> None:
        """Count a collective that begins or ends on its members."""
        if self.slowdown > 1 and self.transfers.slows[k]:
            for member in self.transfers.route[k].members:
                self.active[member] += added
                self._change_speed(member, now)

    def _rate(self, device: int) -> float:
        """Return the current slowdown of compute on a device."""
        rate = self.slowdown if self.active[device] else 1.0
        if self.contention > 1 and len(self.running) > 1:
            others = self.computing - (self.running[device] >= 0)
            rate *= 1 + (self.contention - 1) * others / (len(self.running) - 1)
        return rate

    def _change_speed(self, device: int, now: float) -> None:
        """Change the speed of a running pass to the current one."""
        number, before, after = self.running[device], self.rate[device], self._rate(device)
        if number >= 0 and after != before:
            self.rate[device] = after
            self.left[device] = max(0.0, self.left[device] - (now - self.since[device]) / before)
            self.since[device] = now
            self.due[device] = now + self.left[device] * after
            heappush(self.heap, (self.due[device], number))

    def arrived(self, number: int, what: int, now: float) -> None:
        """Count one need of pass or copy `number` as met; `what` has just completed."""
        self.needs[number] -= 1
        self.why[number], self.who[number] = TRANSFER, what
        if self.needs[number]:
            return
        if number in self.work.beside:
            self.copies.unblocked(number, now)
            return
        device = self.work.device_of[number]
        at = self.stands[device]
        if self.running[device] < 0 and at < len(self.work.rows[device]) and self.work.rows[device][at] == number:
            self._walk(device, now)
