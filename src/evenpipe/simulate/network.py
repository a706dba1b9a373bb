"""Collectives over replicas, which overlap with compute and share the network of their device with hops.

A device runs its collectives one at a time, in the order in which it issued them. All replicas do the same at the same
time, so nothing waits for another replica. While a collective and hops are in flight on a device, each runs at half
speed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import heappush
from typing import TYPE_CHECKING

from evenpipe.schedule.passes import SHARDING_KINDS

from .work import Work

if TYPE_CHECKING:
    from .loop import Loop

COMMUNICATOR = "communicator"


@dataclass(slots=True)
class _Pace:
    """Progress of a collective or hop. devices: whose networks it uses. left: remaining time from `since` on, if it
    runs alone. due: its end, if nothing changes."""

    devices: tuple[int, ...]
    left: float
    since: float
    rate: float = 1.0
    due: float = 0.0


class Network:
    """The networks of all devices, as part of a `Loop`, which keeps the times."""

    def __init__(self, work: Work, loop: Loop) -> None:
        self.work, self.loop = work, loop
        self.shared = any(kind in SHARDING_KINDS and work.takes[n] for n, kind in work.overlapped.items())
        """Whether any collective takes time."""
        self._queues: defaultdict[int, deque[int]] = defaultdict(deque)  # by device; the first collective runs
        self._hops: defaultdict[int, set[int]] = defaultdict(set)
        self._paces: dict[int, _Pace] = {}

    def submit(self, number: int, now: float) -> None:
        """Queue a collective that its device has issued. One that takes no time ends immediately."""
        if not self.work.takes[number]:
            self.loop.start[number] = now
            self.loop.over(number, now)
            return
        queue = self._queues[self.work.numbered.device(number)]
        queue.append(number)
        if len(queue) == 1:
            self._begin(number, now)

    def carry(self, hop: int, devices: tuple[int, ...], takes: float, now: float) -> None:
        """Start a hop between devices."""
        for device in devices:
            self._hops[device].add(hop)
        self._start(hop, devices, takes, now)

    def done(self, number: int, now: float) -> bool:
        """Process the expected end of a collective or hop; return False if its end has changed in the meantime."""
        pace = self._paces.get(number)
        if pace is None or pace.due != now:
            return False
        del self._paces[number]
        if self.work.numbered.is_transfer(number):
            for device in pace.devices:
                self._hops[device].discard(number)
        else:
            self.loop.over(number, now)
            queue = self._queues[pace.devices[0]]
            queue.popleft()
            if queue:
                self.loop.held_up(queue[0], COMMUNICATOR, number)
                self._begin(queue[0], now)
        self._change_speeds(pace.devices, now)
        return True

    def _begin(self, number: int, now: float) -> None:
        self.loop.start[number] = now
        self._start(number, (self.work.numbered.device(number),), self.work.takes[number], now)

    def _start(self, number: int, devices: tuple[int, ...], takes: float, now: float) -> None:
        pace = self._paces[number] = _Pace(devices, takes, now)
        pace.due = now + takes
        heappush(self.loop.heap, (pace.due, number))
        self._change_speeds(devices, now)

    def _change_speeds(self, devices: tuple[int, ...], now: float) -> None:
        """Update the speed of everything in flight on these devices."""
        for device in devices:
            for number in (*list(self._queues[device])[:1], *self._hops[device]):
                pace = self._paces.get(number)
                rate = 2.0 if self._is_shared(number) else 1.0
                if pace is not None and rate != pace.rate:
                    pace.left = max(0.0, pace.left - (now - pace.since) / pace.rate)
                    pace.since, pace.rate = now, rate
                    pace.due = now + pace.left * rate
                    heappush(self.loop.heap, (pace.due, number))

    def _is_shared(self, number: int) -> bool:
        if not self.work.numbered.is_transfer(number):
            return bool(self._hops[self.work.numbered.device(number)])
        return any(self._queues[device] for device in self._paces[number].devices)
