"""Times of passes and transfers from traces: the medians of what was measured.

passes      A pass takes what it computed, and what its device then spent until it waited or began the next one: the
            time in which transfers are issued, tens of microseconds each on a host. So predicted steps include it.
            Where stages or devices were measured several times, within a step or in several, the median counts.
transfers   A transfer takes from the moment when its last member had issued it until a device that needs it went on.
            That is exact where the device stood waiting already when it was issued, and the median of such counts.
            Elsewhere it completed at some time before, so the shortest counts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Dependencies, Kind, Pass, Transfer, TransferKind
from evenpipe.schedule.passes import HOP_KINDS, STAGE_KINDS, VOCABULARY_KINDS
from evenpipe.schedule.trace import DeviceTrace, Trace

CLASS_OF = {
    TransferKind.X: "broadcast",
    TransferKind.STATISTICS: "statistics",
    TransferKind.DX: "reduce",
    TransferKind.ROWS: "embedding",
    TransferKind.ROW_GRADIENTS: "embedding",
}
"""Name of a collective in a cost file; hops are `p2p`."""

WEIGHTS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
"""How the time of passes that run as one is shared, where none of its kind runs alone."""


@dataclass(slots=True)
class Samples:
    """Seconds by kind and stage, by kind and device, and by class of transfer."""

    stages: dict[tuple[Kind, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    joint: dict[tuple[Kind, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    devices: dict[tuple[Kind, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    exact: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bounds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def costs_of(traces: Sequence[Trace]) -> Costs:
    """Seconds per pass and transfer: medians over all `traces`, which are of one placement.

    Raises InputError when there is none, when placements differ, and when a stage has no forward.
    """
    if not traces:
        raise InputError("there is no trace to take costs from; give at least one")
    placement = traces[0].program.placement
    for trace in traces:
        if trace.program.placement != placement:
            raise InputError(
                f"the traces are of different placements, {list(placement.stage_device)} and"
                f" {list(trace.program.placement.stage_device)}; costs are per stage, so one file is for one placement"
            )
    samples = Samples()
    for trace in traces:
        _passes(trace, samples)
        _transfers(trace, samples)
    times: dict[str, Any] = {}
    for kind in STAGE_KINDS - {Kind.O, Kind.L}:
        row = [
            samples.stages.get((kind, stage)) or samples.joint.get((kind, stage)) for stage in range(placement.stages)
        ]
        if all(row):
            times[kind.value] = tuple(statistics.median(values or ()) for values in row)
    for kind in VOCABULARY_KINDS:
        row = [samples.devices.get((kind, device)) for device in range(placement.devices)]
        if all(row):
            times[kind.value] = tuple(statistics.median(values or ()) for values in row)
    if Kind.F.value not in times:
        raise InputError("the traces have no forward of every stage, so no costs follow from them")
    transfers = {name: transfer_seconds(samples, name) for name in ("p2p", *dict.fromkeys(CLASS_OF.values()))}
    hop = transfers.pop("p2p")
    return Costs(**times, p2p=hop, collectives={name: time for name, time in transfers.items() if time > 0})


def transfer_seconds(samples: Samples, name: str) -> float:
    """How long a transfer of a class takes; 0 where there was none."""
    if samples.exact[name]:
        return statistics.median(samples.exact[name])
    return min(samples.bounds[name], default=0.0)


def _passes(trace: Trace, samples: Samples) -> None:
    for device, row in enumerate(trace.devices):
        behind = [*[gap.busy for gap in trace.gaps(device)][1:], 0.0]
        for entry, issuing in zip(row.passes, behind, strict=True):
            _add(samples, entry.item, device, entry.end - entry.start + issuing)


def _add(samples: Samples, item: Pass, device: int, seconds: float) -> None:
    if item.parts:
        whole = sum(WEIGHTS[part.kind] for part in item.parts)
        for part in item.parts:
            assert part.stage is not None
            samples.joint[part.kind, part.stage].append(seconds * WEIGHTS[part.kind] / whole)
    elif item.kind in VOCABULARY_KINDS:
        samples.devices[item.kind, device].append(seconds)
    elif item.kind in STAGE_KINDS:
        assert item.stage is not None
        samples.stages[item.kind, item.stage].append(seconds)


def _transfers(trace: Trace, samples: Samples) -> None:
    dependencies = Dependencies.of(trace.program)
    issued: dict[tuple[int, int, int], float] = {}

    def key(item: Transfer, device: int) -> tuple[int, int, int]:
        route = dependencies.route_of(item, device)
        assert route is not None
        return route.number, item.microbatch, item.slice

    for device, row in enumerate(trace.devices):
        for entry in row.transfers:
            place = key(entry.item, device)
            issued[place] = max(issued.get(place, entry.issued), entry.issued)
    for device, row in enumerate(trace.devices):
        for item, start, end in _awaited(row):
            ready = issued[key(item, device)]
            name = "p2p" if item.kind in HOP_KINDS else CLASS_OF[item.kind]
            (samples.exact if start <= ready else samples.bounds)[name].append(max(0.0, end - ready))


def _awaited(row: DeviceTrace) -> Iterator[tuple[Transfer, float, float]]:
    """Waits of passes; those of sends are not for their arrival."""
    return ((wait.transfer, wait.start, wait.end) for wait in row.waits if wait.needed_by is not None)


def kinds_in(traces: Iterable[Trace]) -> set[Kind]:
    """Kinds of pass that were measured."""
    return {entry.item.kind for trace in traces for row in trace.devices for entry in row.passes}
