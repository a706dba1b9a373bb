"""The drawing model that all four outputs share: a named timeline with its own origin, rows and colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from evenpipe.errors import InputError
from evenpipe.given import plain
from evenpipe.schedule import Event, Item, Kind, Pass, Timeline, TransferKind, parts_of
from evenpipe.schedule.held import held_over_time
from evenpipe.schedule.rules import IN_FLIGHT

from .kinds import STYLES, colours_of

Timelines = Timeline | Mapping[str, Timeline]
"""The input of every output: one timeline, or several by name, drawn in this order on one time axis."""

TRANSFER = "transfer"
"""The resource of a cause whose item had to arrive."""

Curve = list[tuple[float, float]]
"""A step function: (time, value from then on), by time."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A device was idle until `item`, which overlaps with compute, was complete."""

    item: Item
    start: float
    end: float


@dataclass(frozen=True)
class Panel:
    """One timeline to draw; times count from the start of its first event."""

    name: str
    timeline: Timeline

    @cached_property
    def rows(self) -> tuple[tuple[Event, ...], ...]:
        """The compute of each device by start. Measured events may come in any order."""
        return tuple(_by_start(row) for row in self.timeline.events)

    @cached_property
    def concurrent(self) -> tuple[tuple[Event, ...], ...]:
        """The events that overlap with compute, per device, by start."""
        rows = tuple(_by_start(row) for row in self.timeline.concurrent)
        return rows + ((),) * (self.devices - len(rows))

    @cached_property
    def passes_beside(self) -> tuple[tuple[Event, ...], ...]:
        """Copies, and collectives over replicas, per device, by start, without those of length 0."""
        return tuple(
            tuple(event for event in row if isinstance(event.item, Pass) and event.end > event.start)
            for row in self.concurrent
        )

    def waits(self, device: int) -> list[Wait]:
        """The idle times of a device that ended when something its next pass needs was complete, if causes are
        known."""
        waits = []
        clock = self.origin
        for event in self.rows[device]:
            cause = event.cause
            if event.start > clock and cause is not None and cause.resource == TRANSFER and cause.item is not None:
                waits.append(Wait(cause.item, clock, event.start))
            clock = max(clock, event.end)
        return waits

    @cached_property
    def awaited(self) -> tuple[Kind | TransferKind, ...]:
        """The kinds that overlap with compute and that any device waits for, in the order of legends."""
        kinds = {wait.item.kind for device in range(self.devices) for wait in self.waits(device)}
        return tuple(kind for kind in STYLES if kind in kinds)

    @property
    def devices(self) -> int:
        """Number of rows."""
        return len(self.timeline.events)

    @cached_property
    def origin(self) -> float:
        """The start of the first event; 0 without events."""
        return min((event.start for event in self._all()), default=0.0)

    @cached_property
    def length(self) -> float:
        """The time from the first start to the last end of all drawn events."""
        return max((event.end for event in self._all()), default=0.0) - self.origin

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Return, per device, the stages of its passes, ascending."""
        return tuple(
            tuple(
                sorted({component.stage for event in row for component in parts(event) if component.stage is not None})
            )
            for row in self.rows
        )

    @cached_property
    def slices(self) -> int:
        """The number of slices of a sequence."""
        return 1 + max((component.slice for row in self.rows for event in row for component in parts(event)), default=0)

    def colours(self, event: Event) -> tuple[str, ...]:
        """One colour, or one per part of a joint pass."""
        item = event.item
        parts = (
            tuple((component.kind, component.stage, component.slice) for component in item.parts)
            if isinstance(item, Pass)
            else ()
        )
        key = (item.kind, item.stage, item.slice, parts, event.device)
        colours = self._colours.get(key)
        if colours is None:
            stages = self.stages[event.device] if 0 <= event.device < self.devices else ()
            colours = self._colours[key] = colours_of(item, stages, self.slices)
        return colours

    @cached_property
    def _colours(self) -> dict[object, tuple[str, ...]]:
        return {}

    @property
    def knows_bytes(self) -> bool:
        """Whether `curve` is in bytes."""
        return self.timeline.memory is not None

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Return, per device, the maximum number of bytes if known, else of stage activations."""
        if self.knows_bytes:
            return tuple(max((value for _, value in self.curve(device)), default=0.0) for device in range(self.devices))
        return tuple(float(peak) for peak in self.timeline.peak_on_device)

    @property
    def highest(self) -> float:
        """The upper end of the scale of its curves: the highest peak, or a little more than the highest limit."""
        return max((*self.peaks, *(1.2 * limit for limit in self.timeline.limit or ())), default=0.0)

    @property
    def held(self) -> str:
        """The stage activations that `curve` counts if bytes are not known."""
        return "in flight" if self.timeline.on_device is None else "on the device"

    def curve(self, device: int) -> Curve:
        """The memory of a device over time: bytes if known, else stage activations on the device.

        An activation counts from the start of its forward to the end of the backward, or of the weight gradient, that
        releases it, except for its time on the host.
        """
        memory = self.timeline.on_device if self.timeline.memory is None else self.timeline.memory
        if memory is not None:
            return [(time, value) for time, value in memory[device]] if device < len(memory) else []
        changes = []
        for event in self.rows[device]:
            for component in parts(event):
                added = IN_FLIGHT.get(component.kind, 0)
                if added:
                    changes.append((event.start if added > 0 else event.end, 0, float(added)))
        return list(held_over_time(changes))

    def _all(self) -> Iterable[Event]:
        for rows in (self.rows, self.concurrent):
            for row in rows:
                yield from row


def panels_of(timelines: Timelines) -> tuple[Panel, ...]:
    """One panel per timeline. Raises InputError if there is none."""
    named = {"": timelines} if isinstance(timelines, Timeline) else timelines
    if not named:
        raise InputError("there is no timeline to draw; give at least one")
    return tuple(Panel(plain(name), timeline) for name, timeline in named.items())


def kinds_in(panels: Iterable[Panel]) -> tuple[Kind, ...]:
    """Kinds of pass that take time in at least one panel, in the order of legends."""
    timed = (event for panel in panels for row in panel.rows for event in row if event.end > event.start)
    kinds = {component.kind for event in timed for component in parts(event)}
    return tuple(kind for kind in STYLES if isinstance(kind, Kind) and kind in kinds)


def lanes(events: Iterable[Event]) -> list[int]:
    """The lane of each event: as few lanes as possible without overlapping events. Events must be sorted by start."""
    free: list[float] = []  # per lane, the end of its last event
    assigned = []
    for event in events:
        lane = next((number for number, end in enumerate(free) if end <= event.start), len(free))
        if lane == len(free):
            free.append(event.end)
        else:
            free[lane] = event.end
        assigned.append(lane)
    return assigned


def _by_start(row: tuple[Event, ...]) -> tuple[Event, ...]:
    if all(a.start <= b.start for a, b in pairwise(row)):
        return row
    return tuple(sorted(row, key=lambda event: event.start))


def parts(event: Event) -> tuple[Pass, ...]:
    """The passes that ran in an event; none for a transfer."""
    return parts_of(event.item) if isinstance(event.item, Pass) else ()
