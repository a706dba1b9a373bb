"""The offload transform: which activations go to the host, when they go, and when they return.

    2F0  2O0  ...  2D0  ...  2L0  ...  2B0

O starts the copy to the host and L the copy back; at D the copy must be complete, and the device's memory is freed. O,
D and L take no time themselves: copies overlap with compute, at the positions that this plan finds:

    late forwards    passes before the first backward of a device run as late as possible without delaying others:
                     activations that are produced later are held for a shorter time
    at the peak      of the activations held at the peak of a device, those used last go to the host: O as early and L
                     as late as the engines allow. Activations that cannot make the round trip in time stay. The device
                     furthest above its limit goes first, until all are within their limits, or no more activations
                     can be moved without delay
    whatever it      a device that is still above its limit frees memory as soon as its peak requires, allocates it
    takes            only when needed, and moves activations that will return late: this costs time

Late forwards, early O and late L: arXiv 2503.01328, section 3.3, and `scheduler/offloading.py` of its artifact. The
artifact moves whole chunks, the longest lifespan first, and fails if activations cannot return in time. Moving the
activations used last at the peak does the same for its schedules, moves no more than needed, and keeps slow engines
free for the copies that matter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from evenpipe.errors import InputError
from evenpipe.schedule.check_limit import limits_per_device
from evenpipe.schedule.costs import ASSUMED_COPY, EQUAL_COSTS, Costs
from evenpipe.schedule.held import held_along
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import OFFLOAD_KINDS, ROLE, Kind, Pass, parts_of, unit_of

from .bytes_held import BytesHeld
from .copy_lanes import BACK, OUT, Copy, Lanes, ends_of
from .late_forwards import late_forwards

Forward = tuple[int | None, int]
"""Stage and unit."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """An order with copies.

    moved: per device, the forwards whose activations go to the host. peak_bytes: per device, the most bytes held; None
    if costs have no bytes. over: per device, the excess over its limit.
    """

    order: Order
    moved: tuple[int, ...]
    peak_bytes: tuple[float, ...] | None
    over: tuple[float, ...]


def plan_offload(
    order: Order,
    costs: Costs | None = None,
    *,
    only: Collection[Forward] | None = None,
    limit: float | Sequence[float] | None = None,
    host_limit: float | None = None,
    allow_stalls: bool = False,
) -> Offloaded:
    """`order` with copies of activations to the host and back, which replace its own copies.

    Args:
        costs: pass times, copy times (`O` and `L`, or bytes over `engine.bandwidth`), and stored bytes; equal passes by
            default. Without copy times, both copies together take half as long as forward and backward.
        only: forwards, by stage and unit, whose activations may be moved; default: all.
        limit: most bytes per device, one number or one per device. Default: as few as possible without delay.
        host_limit: most bytes of each device on the host.
        allow_stalls: without a limit, reach the lowest possible peak, even if devices wait for copies.

    An order that only evaluates is returned unchanged. If memory or time do not suffice, `Offloaded.over` gives the
    excess. Raises InputError for an invalid limit, or if costs do not give the bytes that passes store.
    """
    costs = EQUAL_COSTS if costs is None else costs
    limits = None if limit is None else limits_per_device(limit, order.devices, "bytes")
    if order.forward_only:
        return Offloaded(order, (0,) * order.devices, None, (0.0,) * order.devices)
    plan = _Plan(without_offload(order), costs, None if only is None else frozenset(only), limits, host_limit)
    plan.move(forces=allow_stalls or limits is not None)
    return plan.result()


def without_offload(order: Order) -> Order:
    """`order` with all activations on the device."""
    if not any(item and item.kind in OFFLOAD_KINDS for row in order.rows for item in row):
        return order
    rows = tuple(tuple(item for item in row if item is None or item.kind not in OFFLOAD_KINDS) for row in order.rows)
    return replace(order, rows=rows)


def offloaded(order: Order) -> frozenset[Forward]:
    """The forwards whose activations `order` moves."""
    copies = {item for row in order.rows for item in row if item and item.kind is Kind.O}
    return frozenset((item.stage, unit_of(item, order.slices)) for item in copies)


@dataclass(frozen=True, slots=True, eq=False)
class _HeldActivation:
    """Activations of a forward on a device. Positions count the passes of its row."""

    device: int
    stage: int
    unit: int
    size: float
    made: int
    """Position of F."""
    used: int
    """Position of the first pass that needs them."""
    ready: float
    needed: float


class _RoundTrip(NamedTuple):
    """When copies to the host and back run, and the positions of O, D and L: each comes before the pass there."""

    out: float
    over: float
    """When the copy to the host ends."""
    back: float
    offload_at: int
    free_at: int
    reload_at: int


class _Plan:
    """The copies of an order, device by device."""

    def __init__(
        self,
        order: Order,
        costs: Costs,
        only: frozenset[Forward] | None,
        limits: tuple[float, ...] | None,
        host_limit: float | None,
    ) -> None:
        self.order, self.engine, self.host_limit = order, costs.engine, host_limit
        self.rows = [list(order.passes(device)) for device in range(order.devices)]
        copied = costs.with_copies(order.placement, ASSUMED_COPY)
        self.takes = [slice_costs.copy_times(order.placement) for slice_costs in copied.by_slice(order.slices)]
        self.known = costs.memory is not None or costs.bytes is not None
        if not self.known:
            if limits is not None or host_limit is not None:
                raise InputError("offload: a limit needs costs with bytes, the bytes that passes store")
            costs = replace(costs, bytes=1.0)
        self.deltas = [slice_costs.memory_deltas(order.placement) or {} for slice_costs in costs.by_slice(order.slices)]
        self.limited = limits is not None
        self.limits = (0.0,) * order.devices if limits is None else limits
        self.starts, self.ends, self.eager_ends = late_forwards(order, costs)
        self.tolerance = 1e-9 * max(end for ends in self.ends for end in ends)
        self.activations = [list(self._movable(device, only)) for device in range(order.devices)]
        self.longest = [
            max((activation.used - activation.made for activation in activations), default=0)
            for activations in self.activations
        ]
        self.held = [BytesHeld(list(self._held(device))) for device in range(order.devices)]
        self.moved: list[dict[_HeldActivation, _RoundTrip]] = [{} for _ in self.rows]
        self.lanes = Lanes(costs.engine)

    # --- activations that can move -----------------------------------------------------------------------------

    def _movable(self, device: int, only: frozenset[Forward] | None) -> Iterator[_HeldActivation]:
        """The movable activations of a device, in the order of their forwards."""
        if Kind.D not in self.deltas[0]:
            return
        activations = []
        made: dict[Forward, int] = {}
        starts, ends = self.starts[device], self.ends[device]
        for position, item in enumerate(self.rows[device]):
            for component in parts_of(item):
                stage = component.stage
                if component.kind is Kind.F:
                    unit = unit_of(component, self.order.slices)
                    if only is None or (stage, unit) in only:
                        made[stage, unit] = position
                elif component.kind is Kind.R or ROLE[component.kind] is Kind.B:
                    unit = unit_of(component, self.order.slices)
                    first = made.pop((stage, unit), position)
                    if first < position:
                        assert stage is not None
                        size = -self.deltas[component.slice][Kind.D][stage]
                        if size > 0:
                            activations.append(
                                _HeldActivation(
                                    device, stage, unit, size, first, position, ends[first], starts[position]
                                )
                            )
        yield from sorted(activations, key=lambda activation: activation.made)

    def _held(self, device: int) -> Iterator[float]:
        """The most bytes during each pass of a row if nothing is offloaded."""

        def added(item: Pass) -> float:
            sizes = self.deltas[item.slice].get(item.kind)
            return 0.0 if sizes is None else sizes[device if item.stage is None else item.stage]

        return (peak for _, peak, _ in held_along(self.rows[device], added))

    def _activations_at(self, device: int, position: int) -> Iterator[_HeldActivation]:
        """The activations that are produced before a position and used after it."""
        activations = self.activations[device]
        first = bisect_left(activations, position - self.longest[device], key=_made)
        return (
            activation
            for activation in activations[first : bisect_left(activations, position, key=_made)]
            if activation.used > position
        )

    def _copy(self, activation: _HeldActivation, kind: Kind) -> float:
        """The time of a copy, O or L."""
        return self.takes[activation.unit % self.order.slices][kind][activation.stage]

    # --- choosing activations to move --------------------------------------------------------------------------

    def move(self, *, forces: bool) -> None:
        """Choose the activations to move, and when; with `forces`, also activations whose move costs time."""
        while True:
            self._lower()
            if not self._drop_late():
                break
        if forces:
            for device, limit in enumerate(self.limits):
                self._force(device, limit * (1 + ROUNDING))

    def _lower(self) -> None:
        """Move activations to lower the peaks of devices above their limits, as long as nothing is delayed."""
        above = [
            (limit - held.peak, device) for device, (limit, held) in enumerate(zip(self.limits, self.held, strict=True))
        ]
        heapify(above)
        while above and above[0][0] < 0:
            _, device = heappop(above)
            if self._lower_at(device, self.held[device].where()):
                limit = self.limits[device] * (1 + ROUNDING)
                heappush(above, (limit - self.held[device].peak, device))

    def _lower_at(self, device: int, peak_position: int) -> bool:
        """Move the activations used last among those held at the peak; return False if none can move."""
        staying = [
            activation
            for activation in self._activations_at(device, peak_position)
            if activation not in self.moved[device]
        ]
        for activation in sorted(staying, key=lambda activation: -activation.used):
            trip = self._in_time(activation)
            if trip and trip.free_at <= peak_position < trip.reload_at and self._host_has_room(activation, trip):
                self.lanes.take(device, OUT, trip.out, self._copy(activation, Kind.O))
                self.lanes.take(device, BACK, trip.back, self._copy(activation, Kind.L))
                self._add(activation, trip)
                return True
        return False

    def _add(self, activation: _HeldActivation, trip: _RoundTrip) -> None:
        self.moved[activation.device][activation] = trip
        self.held[activation.device].add(trip.free_at, trip.reload_at, -activation.size)

    def _in_time(self, activation: _HeldActivation) -> _RoundTrip | None:
        """A trip if there is time for both copies and a pass in between."""
        device, out, back = activation.device, self._copy(activation, Kind.O), self._copy(activation, Kind.L)
        start = self.lanes.earliest(device, OUT, activation.ready, out)
        if start + out + back > activation.needed + self.tolerance:
            return None
        self.lanes.take(device, OUT, start, out)
        latest = self.lanes.latest(device, BACK, activation.needed, back)
        self.lanes.release(device, OUT, start, out)
        if start + out > latest + self.tolerance:
            return None
        # D comes at the first position after F that is reached when the copy to the host is complete.
        free_at = max(activation.made + 1, bisect_left(self.starts[device], start + out - self.tolerance))
        offload_at = min(free_at, max(activation.made + 1, bisect_right(self.ends[device], start + self.tolerance)))
        reload_at = min(activation.used, bisect_right(self.ends[device], latest + self.tolerance))
        return _RoundTrip(start, start + out, latest, offload_at, free_at, reload_at) if free_at < reload_at else None

    def _host_has_room(self, activation: _HeldActivation, trip: _RoundTrip) -> bool:
        """Whether the host stays within the device's limit from O to the end of L."""
        if self.host_limit is None:
            return True
        first, last = self._on_host(activation, trip)
        events = [(first, activation.size), (last, -activation.size)]
        for other_activation, other_trip in self.moved[activation.device].items():
            begin, end = self._on_host(other_activation, other_trip)
            if begin < last and end > first:
                events += [(max(begin, first), other_activation.size), (min(end, last), -other_activation.size)]
        events.sort()
        return max(accumulate(size for _, size in events)) <= self.host_limit * (1 + ROUNDING)

    def _on_host(self, activation: _HeldActivation, trip: _RoundTrip) -> tuple[float, float]:
        return trip.out, trip.back + self._copy(activation, Kind.L)

    def _drop_late(self) -> bool:
        """Simulate the copies with forwards as late as planned and as early as possible; if devices share links, also
        with mixtures of both, because links serve copies in the order of arrival. Activations that return too late, or
        leave too late to help, stay on the device. Return whether there were any."""
        late: dict[_HeldActivation, None] = {}
        devices = range(len(self.rows))
        scenarios = [[False for _ in devices], [True for _ in devices]]
        for chosen in devices if self.engine.shared else ():
            scenarios += [[device == chosen for device in devices], [device != chosen for device in devices]]
        steps = [_copy_steps(moved) for moved in self.moved]
        for early in scenarios:
            late |= self._late(early, steps)
        for activation in late:
            trip = self.moved[activation.device].pop(activation)
            self.activations[activation.device].remove(activation)
            self.held[activation.device].add(trip.free_at, trip.reload_at, activation.size)
            self.lanes.release(activation.device, OUT, trip.out, self._copy(activation, Kind.O))
            self.lanes.release(activation.device, BACK, trip.back, self._copy(activation, Kind.L))
        return bool(late)

    def _late(self, early: Sequence[bool], steps: list[list[_CopyStep]]) -> dict[_HeldActivation, None]:
        """The activations with late copies if the devices in `early` run forwards as early as possible, and other
        devices as late as planned."""
        copies: list[Copy] = []
        numbers: dict[tuple[_HeldActivation, Kind], int] = {}
        for device, moved in enumerate(self.moved):
            clock = 0.0
            for position, kind, activation in steps[device]:
                if position:
                    clock = max(clock, (self.eager_ends if early[device] else self.ends)[device][position - 1])
                if kind is Kind.D:
                    clock = clock if early[device] else max(clock, moved[activation].over)
                    continue
                numbers[activation, kind] = len(copies)
                predecessor = numbers[activation, Kind.O] if kind is Kind.L else None
                takes = self._copy(activation, kind)
                copies.append(Copy(device, BACK if kind is Kind.L else OUT, clock, takes, predecessor))
        ends = ends_of(copies, self.engine)
        late: dict[_HeldActivation, None] = {}
        for moved in self.moved:
            for activation in sorted(moved, key=_made):
                over = ends[numbers[activation, Kind.O]]
                too_late = ends[numbers[activation, Kind.L]] > activation.needed + self.tolerance
                if too_late or over > self.starts[activation.device][moved[activation].free_at] + self.tolerance:
                    late[activation] = None
        return late

    def _force(self, device: int, limit: float) -> None:
        """Make the device wait for copies until it stays within its limit, or nothing more helps."""
        held, moved = self.held[device], self.moved[device]
        while held.peak > limit:
            peak_position = held.where()
            present = list(self._activations_at(device, peak_position))
            leaving = [
                activation
                for activation in present
                if activation in moved and peak_position < moved[activation].free_at
            ]
            returned = [
                activation
                for activation in present
                if activation in moved and moved[activation].reload_at <= peak_position
            ]
            begin = self.starts[device][peak_position]
            if leaving:
                activation = min(leaving, key=lambda activation: moved[activation].over)
                trip = moved[activation]
                held.add(peak_position, trip.free_at, -activation.size)
                over, offload_at = min(trip.over, begin), min(trip.offload_at, peak_position)
                moved[activation] = trip._replace(over=over, offload_at=offload_at, free_at=peak_position)
            elif returned:
                activation = max(returned, key=lambda activation: activation.needed)
                trip = moved[activation]
                held.add(trip.reload_at, peak_position + 1, -activation.size)
                moved[activation] = trip._replace(back=max(trip.back, begin), reload_at=peak_position + 1)
            else:
                for activation in sorted(present, key=lambda activation: -activation.used):
                    trip = _RoundTrip(
                        activation.ready, begin, begin, activation.made + 1, peak_position, peak_position + 1
                    )
                    if activation not in moved and self._host_has_room(activation, trip):
                        self._add(activation, trip)
                        break
                else:
                    return

    # --- the result ------------------------------------------------------------------------------------------

    def result(self) -> Offloaded:
        """The order with its copies."""
        slices = self.order.slices
        rows = tuple(_row(row, moved, slices) for row, moved in zip(self.rows, self.moved, strict=True))
        peaks = tuple(held.peak for held in self.held) if self.known else None
        over = tuple(
            max(0.0, held.peak - limit) if self.limited and held.peak > limit * (1 + ROUNDING) else 0.0
            for held, limit in zip(self.held, self.limits, strict=True)
        )
        return Offloaded(replace(self.order, rows=rows), tuple(map(len, self.moved)), peaks, over)


_CopyStep = tuple[int, Kind, _HeldActivation]
"""Position of an O, D or L."""


def _copy_steps(moved: Mapping[_HeldActivation, _RoundTrip]) -> list[_CopyStep]:
    """O, D and L of a device in the order of its row, each with its position. At the same position, D comes first:
    `_in_time` ensures that no pass waits for it. Copies follow by time, as the engine runs them."""
    steps = []
    for activation, trip in moved.items():
        at_once = trip.offload_at == trip.free_at
        steps.append((trip.offload_at, not at_once, trip.out, Kind.O, activation))
        steps.append((trip.free_at, False, max(trip.out, trip.over), Kind.D, activation))
        steps.append((trip.reload_at, True, trip.back, Kind.L, activation))
    steps.sort(key=lambda step: (*step[:3], step[4].stage, step[4].unit, step[3] is Kind.D))
    return [(position, kind, activation) for position, _, _, kind, activation in steps]


def _row(row: Sequence[Pass], moved: Mapping[_HeldActivation, _RoundTrip], slices: int) -> tuple[Pass, ...]:
    copies: dict[int, list[Pass]] = {}
    for position, kind, activation in _copy_steps(moved):
        assert position < len(row), "every copy comes before a pass"
        copies.setdefault(position, []).append(Pass(kind, activation.stage, *divmod(activation.unit, slices)))
    return tuple(entry for position, item in enumerate(row) for entry in (*copies.get(position, ()), item))


ROUNDING = 1e-12
"""Rounding tolerance of sums of bytes."""

_made = attrgetter("made")
