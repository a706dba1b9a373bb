"""A measured step: what each device did and waited for, on one clock, and the resulting timeline.

Trace -> timeline()     events with causes, and concurrent transfers: the type that the simulator returns
      -> gaps()         what a device did between its passes: waiting, or issuing transfers
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from .costs import Costs
from .passes import HOP_KINDS, Kind, Pass, Transfer, unit_of
from .program import Program
from .rules import Rules
from .timeline import Cause, Event, Timeline

WAITED_SECONDS = 20e-6
"""A shorter wait means that the transfer was already complete: the query alone takes some microseconds."""

END = "end"
"""Key of the wait after the last pass, until the last device is done."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """When a pass computed. All times of a device are in seconds on one clock."""

    item: Pass
    start: float
    """When all inputs were available."""
    end: float
    processor: float
    """Processor time of the main thread inside the pass; on a GPU the time to launch it."""


@dataclass(frozen=True, slots=True)
class WaitTime:
    """A device waited until a transfer, or a copy to or from the host, was complete, or found it complete."""

    transfer: Transfer | Pass
    """As this device issued it; for a copy, its O or L."""
    needed_by: Pass | None
    """The pass that uses it; None if a send was awaited to free its memory."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TransferTime:
    """When a device issued a transfer, and found it complete."""

    item: Transfer
    issued: float
    returned: float
    """When the call that issues it returned."""
    complete: float | None
    """End of the first wait for it: the completion, or later if it had completed before. None: nobody waited."""


@dataclass(frozen=True, slots=True)
class CopyTime:
    """Start and end of a copy to the host, or back."""

    item: Pass
    """O or L."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Offset between the clock of a device and that of the first device. All times are already corrected.

    offset: this clock minus that of device 0 at the start of the step, in seconds.
    drift: change of the offset until its end.
    uncertainty: half of the shortest round trip of the measurement.
    """

    offset: float = 0.0
    drift: float = 0.0
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class Allocations:
    """Calls of torch's GPU memory allocator in a step. It caches freed memory, so after the first steps it should not
    call the driver. With `backend:cudaMallocAsync` the driver caches memory, and torch counts no calls."""

    requests: int
    """Allocations of tensors, nearly all of them from the cache."""
    device_allocations: int
    """Calls of the driver for more memory (cudaMalloc, cuMemMap)."""
    device_frees: int
    """Calls of the driver that freed memory (cudaFree, cuMemUnmap): each may wait for all work of the GPU."""
    retries: int
    """Times when the driver had no more memory, so the cache was emptied before the next attempt."""

    @property
    def device_calls(self) -> int:
        """Calls of the driver: 0 in a step without churn."""
        return self.device_allocations + self.device_frees

    def since(self, earlier: Allocations) -> Allocations:
        """The difference between two counts of an allocator."""
        return Allocations(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """What one device did in a step, from `start` to `end`; passes and transfers in the order of its row."""

    start: float
    end: float
    passes: tuple[PassTime, ...]
    waits: tuple[WaitTime, ...]
    transfers: tuple[TransferTime, ...]
    clock: Clock = Clock()
    copies: tuple[CopyTime, ...] = ()
    allocations: Allocations | None = None
    """None on a CPU, and in files of older versions."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What a device did between a pass and the next one, or before its first.

    previous, following: the passes around the gap; `previous` is None before the first pass. waited: the waits in the
    gap. busy: the rest of the gap, spent issuing transfers.
    """

    previous: PassTime | None
    following: PassTime
    waited: tuple[WaitTime, ...]

    @property
    def waiting(self) -> float:
        """Seconds in waits."""
        return sum(wait.end - wait.start for wait in self.waited)

    @property
    def busy(self) -> float:
        """Seconds outside of passes and waits; 0 before the first pass."""
        return 0.0 if self.previous is None else max(0.0, self.following.start - self.previous.end - self.waiting)


@dataclass(frozen=True)
class Trace:
    """One measured step of `program`. Seconds from the start of the first device.

    costs: the costs that the order was arranged by, in their own unit. about: further facts for readers: schedule,
    vocabulary mode, number of the step, machine, versions. other_ranks: what the other tensor ranks of each device did,
    from rank 1 on; `devices` are the first ones.
    """

    program: Program
    devices: tuple[DeviceTrace, ...]
    costs: Costs | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    other_ranks: tuple[tuple[DeviceTrace, ...], ...] = ()

    @property
    def by_rank(self) -> tuple[Trace, ...]:
        """A trace for each tensor rank."""
        return tuple(replace(self, devices=devices, other_ranks=()) for devices in (self.devices, *self.other_ranks))

    @cached_property
    def seconds(self) -> float:
        """The seconds from the start of the first device to the end of the last one."""
        return max(device.end for device in self.devices) - min(device.start for device in self.devices)

    @cached_property
    def waiting(self) -> tuple[dict[str, float], ...]:
        """Return, per device, idle time by the kind of the awaited transfer, and "end" after its last pass, as in
        `Simulation`. Before its first pass a device waits from the first start of any device."""
        rows = []
        begin = min((row.passes[0].start for row in self.devices if row.passes), default=0.0)
        finish = max((row.passes[-1].end for row in self.devices if row.passes), default=0.0)
        for device, row in enumerate(self.devices):
            waits: dict[str, float] = {}
            for gap in self.gaps(device):
                for wait in gap.waited:
                    since = max(wait.start, begin)
                    if wait.end > since:
                        kind = wait.transfer.kind.value
                        waits[kind] = waits.get(kind, 0.0) + wait.end - since
            if row.passes and finish > row.passes[-1].end:
                waits[END] = finish - row.passes[-1].end
            rows.append(waits)
        return tuple(rows)

    def gaps(self, device: int) -> Iterator[Gap]:
        """The gap before each pass of a device. Waits inside a joint pass belong to no gap."""
        row = self.devices[device]
        waits = iter(row.waits)
        wait = next(waits, None)
        previous: PassTime | None = None
        for item in row.passes:
            waited = []
            while wait is not None and wait.end <= item.start:
                if previous is None or wait.start >= previous.end:
                    waited.append(wait)
                wait = next(waits, None)
            yield Gap(previous, item, tuple(waited))
            previous = item

    def timeline(self) -> Timeline:
        """Passes as they ran, with concurrent copies and transfers. A transfer lasts from the moment when its last
        member issued it until this device, or either end of a hop, found it complete."""
        devices = range(len(self.devices))
        transfers = self._transfers()
        concurrent = ((*transfers[device], *self._copies(device)) for device in devices)
        return Timeline(
            tuple(tuple(self._passes(device)) for device in devices),
            concurrent=tuple(tuple(sorted(row, key=attrgetter("start"))) for row in concurrent),
            placement=self.program.placement,
        )

    def _passes(self, device: int) -> Iterator[Event]:
        passes = self.devices[device].passes
        for index, gap in enumerate(self.gaps(device)):
            if gap.following.item.kind in (Kind.O, Kind.L):
                continue  # the position where a copy is issued
            longest = max(gap.waited, key=lambda wait: wait.end - wait.start, default=None)
            cause = _device_cause(passes, index, device)
            if longest is not None and longest.end - longest.start > max(WAITED_SECONDS, gap.busy):
                cause = Cause("transfer", longest.transfer, device)
            yield Event(device, gap.following.item, gap.following.start, gap.following.end, cause)

    def _transfers(self) -> list[list[Event]]:
        """The transfers of each device."""
        rules = Rules.of(self.program)
        issued: dict[tuple[int, int], tuple[float, int]] = {}  # when the last member issued it, and that member
        arrived: dict[tuple[int, int], float] = {}  # when either end of a hop found it complete: the sender checks late
        keys: list[list[tuple[int, int]]] = [[] for _ in self.devices]
        for device, row in enumerate(self.devices):
            for transfer in row.transfers:
                route = rules.route(device, transfer.item)
                assert route is not None, f"{transfer.item} on device {device} has no route"
                key = route.number, unit_of(transfer.item, self.program.slices)
                keys[device].append(key)
                issued[key] = max(issued.get(key, (transfer.issued, device)), (transfer.issued, device))
                if transfer.complete is not None and transfer.item.kind in HOP_KINDS:
                    arrived[key] = min(arrived.get(key, transfer.complete), transfer.complete)
        rows: list[list[Event]] = [[] for _ in self.devices]
        for device, row in enumerate(self.devices):
            for key, transfer in zip(keys[device], row.transfers, strict=True):
                start, issuer = issued[key]
                end = arrived.get(key, transfer.returned if transfer.complete is None else transfer.complete)
                passes = self.devices[issuer].passes
                cause = _device_cause(passes, bisect_right(passes, start, key=attrgetter("end")), issuer)
                rows[device].append(Event(device, transfer.item, start, max(start, end), cause))
        return rows

    def _copies(self, device: int) -> Iterator[Event]:
        row = self.devices[device]
        position_of = {entry.item: position for position, entry in enumerate(row.passes)}
        for copy in row.copies:
            yield Event(
                device, copy.item, copy.start, copy.end, _device_cause(row.passes, position_of[copy.item], device)
            )


def _device_cause(passes: Sequence[PassTime], position: int, device: int) -> Cause:
    """The cause of what a device does at a position of its row: its previous pass, or the start."""
    return Cause("device", passes[position - 1].item, device) if position else Cause("start")
