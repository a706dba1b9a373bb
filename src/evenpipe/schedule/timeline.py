"""Events and their times: the result of a simulation, and of a measured run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from evenpipe.words import count

from .held import factor_of, peak_activations
from .passes import SHARDING_KINDS, VOCABULARY_KINDS, Item, Kind, Pass, parts_of
from .placement import Placement


class Cause(NamedTuple):
    """Why an event did not start earlier: the last thing it waited for.

    resource: "device" (busy with `item`, an earlier pass of the same row), "transfer" (`item` had to arrive),
    "communicator" or "link" (`item` was on it), "engine" (the copy engine was busy with `item`), or "start" (nothing).
    item, device: that pass or transfer, and its device.
    """

    resource: str
    item: Item | None = None
    device: int | None = None


class Slack(NamedTuple):
    """How much later an event could end without making the step longer.

    time: in the unit of the timeline. item, device: the pass that would make it longer first, as it waits for the
    event, directly or at the end of a chain of transfers; None for the end of the step.
    """

    time: float
    item: Item | None = None
    device: int | None = None


class Event(NamedTuple):
    """`item` ran on `device` from `start` to `end`.

    cause: the last thing it waited for, if known. slack: how much later it could end; of simulated events only.
    """

    device: int
    item: Item
    start: float
    end: float
    cause: Cause | None = None
    slack: Slack | None = None


@dataclass(frozen=True)
class Timeline:
    """Events of each device, in the order in which it ran them, in any one unit of time.

    stage_bytes: bytes that one forward of each stage stores until its backward, if known; for `peak_bytes`.
    beside: per device, events concurrent with its compute, by start: transfers, copies to and from the host,
        collectives over replicas.
    memory: per device, memory as a step function, (time, bytes from then on); None if bytes are not known.
    on_device: likewise the stage activations on the device, if some move to the host; else None.
    placement: of the stages, if known.
    exchange: for each kind of pass, the time in which tensor ranks of the device only exchange rows, per stage or per
        device; empty if there is none.
    token_factors: for each slice of a sequence, the factor on `stage_bytes` and `exchange`; empty if all are 1.
    limit: the most that each device may hold, if there is a limit: bytes if `memory` is known, else stage activations.
    """

    events: tuple[tuple[Event, ...], ...]
    stage_bytes: tuple[float, ...] | None = None
    concurrent: tuple[tuple[Event, ...], ...] = ()
    memory: tuple[tuple[tuple[float, float], ...], ...] | None = None
    on_device: tuple[tuple[tuple[float, float], ...], ...] | None = None
    placement: Placement | None = None
    exchange: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    token_factors: tuple[float, ...] = ()
    limit: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        if not any(self.events):
            return f"<Timeline: {count(self.devices, 'device')}, no events>"
        return f"<Timeline: {count(self.devices, 'device')}, step {self.makespan:g}, busy {100 * self.mean_busy:.1f} %>"

    def _repr_html_(self) -> str:
        """The picture, for notebooks."""
        from .picture import html_of_timeline

        return html_of_timeline(self, repr(self))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.events)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Per device, from the start of its first event to the end of its last, collectives over replicas included."""
        return tuple(map(_span, self._steps))

    @property
    def span(self) -> float:
        """The longest span of any device."""
        return max(self.spans)

    @cached_property
    def makespan(self) -> float:
        """The time from the first start to the last end, over all devices."""
        return _span([event for row in self._steps for event in row])

    @cached_property
    def _steps(self) -> tuple[tuple[Event, ...], ...]:
        """Per device, its compute and concurrent collectives over replicas: the step ends when both have ended."""
        return tuple(
            (*row, *(event for event in concurrent if event.item.kind in SHARDING_KINDS))
            for row, concurrent in zip_longest(self.events, self.concurrent, fillvalue=())
        )

    @property
    def skew(self) -> float:
        """The difference between makespan and span."""
        return self.makespan - self.span

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Return, per device, the time in compute passes."""
        return tuple(sum(times.values()) for times in self.busy_by_kind)

    @cached_property
    def busy_by_kind(self) -> tuple[dict[Kind, float], ...]:
        """Return, per device and kind, the time in compute passes."""
        result = []
        for row in self.events:
            times: dict[Kind, float] = {}
            for event in row:
                if isinstance(event.item, Pass):
                    times[event.item.kind] = times.get(event.item.kind, 0.0) + event.end - event.start
            result.append(times)
        return tuple(result)

    def exchange_of(self, event: Event) -> float:
        """The part of a pass in which tensor ranks only exchange rows; 0 for anything else."""
        if not self.exchange or not isinstance(event.item, Pass):
            return 0.0
        total = 0.0
        for component in parts_of(event.item):
            index = event.device if component.kind in VOCABULARY_KINDS else component.stage
            if component.kind in self.exchange and index is not None:
                total += self.exchange[component.kind][index] * factor_of(component, self.token_factors)
        return total

    @property
    def mean_busy(self) -> float:
        """The mean share of the makespan in which devices compute; 0 if nothing takes time."""
        device_time = self.devices * self.makespan
        return sum(self.busy) / device_time if device_time else 0.0

    @property
    def bubble(self) -> float:
        """The idle time of the device with the longest span, within that span."""
        device = max(range(self.devices), key=self.spans.__getitem__)
        return self.spans[device] - self.busy[device]

    @property
    def bubble_rate(self) -> float:
        """`bubble` over `span`; 0 if nothing takes time."""
        return self.bubble / self.span if self.span else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The main figures for JSON. Lists are per device."""
        return {
            "devices": self.devices,
            "span": self.span,
            "makespan": self.makespan,
            "mean_busy": self.mean_busy,
            "skew": self.skew,
            "bubble": self.bubble,
            "bubble_rate": self.bubble_rate,
            "busy": list(self.busy),
            "peak_in_flight": list(self.peak_in_flight),
            "peak_on_device": list(self.peak_on_device),
        }

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Return, per device, the most stage activations that were forwarded and not yet released."""
        return tuple(int(peak) for peak in self._peaks(None))

    @cached_property
    def peak_on_device(self) -> tuple[int, ...]:
        """Return, per device, the most stage activations in flight that were not on the host."""
        if self.on_device is None:
            return self.peak_in_flight
        return tuple(int(_highest(curve)) for curve in self.on_device)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Return, per device, the most bytes held; None if they are not known.

        From `memory` if present, which counts all passes and copies; else from stage activations, from F to B or W.
        """
        if self.memory is not None:
            return tuple(_highest(curve) for curve in self.memory)
        return None if self.stage_bytes is None else self._peaks(self.stage_bytes)

    def _peaks(self, weights: tuple[float, ...] | None) -> tuple[float, ...]:
        return tuple(
            peak_activations((event.item for event in row if isinstance(event.item, Pass)), weights, self.token_factors)
            for row in self.events
        )


def _span(events: Collection[Event]) -> float:
    return max(event.end for event in events) - min(event.start for event in events) if events else 0.0


def _highest(curve: tuple[tuple[float, float], ...]) -> float:
    return max((held for _, held in curve), default=0.0)
