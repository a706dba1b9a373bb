"""Times of passes and transfers from traces of steps.

passes      The time of a pass is its compute plus the time until its device waits or starts the next pass, in which it
            issues transfers (tens of microseconds each on a host). So predicted steps include that time.
            Within a step the mean counts, since the step is the sum of all its passes, also of slow ones (the first
            gradient of a matrix is written to new memory); over several steps the median, since some are disturbed.
contention  Passes that ran while other devices computed are compared with passes of the same kind and stage that ran
            alone: the factor is the one by which all times agree best. Times are then those of a pass alone. If passes
            hardly differ in overlap, or do not agree better, the factor is 1 and times are as measured.
transfers   The time of a transfer lasts from the moment when its last member issued it until a device that needs it
            went on. That is exact if the device was already waiting when it was issued, and then the median counts.
            Otherwise it completed at some time before, so the shortest counts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Dependencies, Kind, Pass, Transfer, TransferKind
from evenpipe.schedule.passes import HOP_KINDS, OFFLOAD_KINDS, STAGE_KINDS, VOCABULARY_KINDS, unit_of
from evenpipe.schedule.trace import PassTime, Trace

from .slice_fit import slice_factors

CLASS_OF = {
    TransferKind.X: "broadcast",
    TransferKind.STATISTICS: "statistics",
    TransferKind.DX: "reduce",
    TransferKind.ROWS: "embedding",
    TransferKind.ROW_GRADIENTS: "embedding",
}
"""Name of a collective in a cost file; hops are `p2p`."""

WEIGHTS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
"""How the time of passes that run as one is divided if no pass of the kind runs alone."""

FACTORS = [1 + step / 100 for step in range(301)]
"""Candidate factors for contention: 2 or more if devices have more processes than there are cores."""

BETTER = 0.02
"""Share by which the deviations must shrink for a factor to be accepted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Duration of a pass, and the share of that time (0 to 1) in which other devices computed: 1 if all did."""

    seconds: float
    beside: float

    def alone(self, contention: float) -> float:
        """Return the duration alone: time beside others counts 1 / `contention`."""
        return self.seconds * (1 - self.beside + self.beside / contention)


Site = tuple[Kind, int]
"""Kind of a pass, and its stage, or its device for the vocabulary passes."""


@dataclass(slots=True)
class Samples:
    """Measurements of one step, by site of passes and by class of transfers; joint: shares of passes that run as
    one."""

    passes: dict[Site, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    joint: dict[Site, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    exact: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bounds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def costs_of(
    traces: Sequence[Trace],
    others: Sequence[Trace] = (),
    tokens: Sequence[int] = (),
    *,
    contention: float | None = None,
) -> Costs:
    """Return the seconds per pass and transfer from all `traces`, which have one placement.

    others: further traces of the same model, only for contention. tokens: of each slice of a sequence, if known.
    contention: None: found in the traces. Raises InputError if there are no traces, if placements differ, and if a
    stage has no forward.
    """
    if not traces:
        raise InputError("there is no trace; give at least one")
    placement = traces[0].program.placement
    for trace in (*traces, *others):
        if trace.program.placement != placement:
            raise InputError(
                f"the traces have different placements, {list(placement.stage_device)} and"
                f" {list(trace.program.placement.stage_device)}, but need the same one"
            )
    steps = [_samples(trace) for trace in traces]
    if contention is None:
        contention = contention_of(*steps, *map(_samples, others))
    times: dict[str, Any] = {}
    for kind in (STAGE_KINDS - OFFLOAD_KINDS) | VOCABULARY_KINDS:
        places = range(placement.devices if kind in VOCABULARY_KINDS else placement.stages)
        row = [_pass_seconds(steps, (kind, place), contention) for place in places]
        if None not in row:
            times[kind.value] = tuple(row)
    if Kind.F.value not in times:
        raise InputError("some stages have no forward in the traces, so their costs are unknown")
    for kind in (Kind.O, Kind.L):
        copies = _copy_seconds(traces, kind)
        if copies:
            usual = statistics.fmean(copies.values())
            times[kind.value] = tuple(copies.get(stage, usual) for stage in range(placement.stages))
    seconds = {name: _transfer_seconds(steps, name) for name in dict.fromkeys(["p2p", *CLASS_OF.values()])}
    collectives = {name: time for name, time in seconds.items() if name != "p2p" and time is not None}
    slices = slice_factors(traces, tokens)
    return Costs(**times, p2p=seconds["p2p"] or 0.0, collectives=collectives, contention=contention, slices=slices)


def _samples(trace: Trace) -> Samples:
    samples = Samples()
    for device, row in enumerate(trace.devices):
        behind = [*[gap.busy for gap in trace.gaps(device)][1:], 0.0]
        beside = _beside(trace, device)
        for entry, issuing, share in zip(row.passes, behind, beside, strict=True):
            _add(samples, entry.item, device, Sample(entry.end - entry.start + issuing, share))
    _transfers(trace, samples)
    return samples


def _pass_seconds(steps: Sequence[Samples], site: Site, contention: float) -> float | None:
    """Return the median over steps of the mean within a step; None if no step has the pass. Shares of passes that run
    as one count only if no pass of the kind runs alone."""
    for kind in ("passes", "joint"):
        found = [samples for step in steps if (samples := getattr(step, kind).get(site))]
        if found:
            return statistics.median(statistics.fmean(one.alone(contention) for one in samples) for samples in found)
    return None


def _copy_seconds(traces: Sequence[Trace], kind: Kind) -> dict[int, float]:
    """Return the time of copies of one kind, by stage."""
    found: dict[int, list[float]] = defaultdict(list)
    for copy in chain.from_iterable(row.copies for trace in traces for row in trace.devices):
        if copy.item.kind is kind:
            assert copy.item.stage is not None
            found[copy.item.stage].append(copy.end - copy.start)
    return {stage: statistics.median(times) for stage, times in found.items()}


def _transfer_seconds(steps: Sequence[Samples], name: str) -> float | None:
    """Return the time of a transfer of a class; None if there was none."""
    exact = [time for step in steps for time in step.exact[name]]
    if exact:
        return statistics.median(exact)
    return min((time for step in steps for time in step.bounds[name]), default=None)


def contention_of(*measured: Samples) -> float:
    """Return the factor by which passes of one site agree best; long passes count more than short ones."""
    sites: dict[Site, list[Sample]] = defaultdict(list)
    for site, found in chain.from_iterable(samples.passes.items() for samples in measured):
        sites[site] += found

    def deviation(contention: float) -> float:
        off = whole = 0.0
        for found in sites.values():
            times = [one.alone(contention) for one in found]
            median = statistics.median(times)
            off += sum(abs(time - median) for time in times)
            whole += median * len(times)
        return off / whole if whole else 0.0

    best = min(FACTORS, key=deviation)
    return best if deviation(best) < (1 - BETTER) * deviation(1.0) else 1.0


def _beside(trace: Trace, device: int) -> list[float]:
    """Return, per pass of a device, the share of its time in which the others computed, on average over them."""
    shares = [0.0] * len(trace.devices[device].passes)
    others = [row.passes for number, row in enumerate(trace.devices) if number != device]
    for row in others:
        for number, common in enumerate(_common(trace.devices[device].passes, row)):
            shares[number] += common / len(others)
    return shares


def _common(passes: Sequence[PassTime], others: Sequence[PassTime]) -> Iterator[float]:
    """Return the part of each pass that overlaps any of the others; both sorted by time."""
    first = 0
    for entry in passes:
        while first < len(others) and others[first].end <= entry.start:
            first += 1
        common, place = 0.0, first
        while place < len(others) and others[place].start < entry.end:
            common += max(0.0, min(entry.end, others[place].end) - max(entry.start, others[place].start))
            place += 1
        yield common / (entry.end - entry.start) if entry.end > entry.start else 0.0


def _add(samples: Samples, item: Pass, device: int, sample: Sample) -> None:
    if item.parts:
        whole = sum(WEIGHTS[part.kind] for part in item.parts)
        for part in item.parts:
            assert part.stage is not None
            share = sample.seconds * WEIGHTS[part.kind] / whole
            samples.joint[part.kind, part.stage].append(Sample(share, sample.beside))
    elif item.kind in VOCABULARY_KINDS:
        samples.passes[item.kind, device].append(sample)
    elif item.kind in STAGE_KINDS:
        assert item.stage is not None
        samples.passes[item.kind, item.stage].append(sample)


def _transfers(trace: Trace, samples: Samples) -> None:
    dependencies = Dependencies.of(trace.program)
    issued: dict[tuple[int, int], float] = {}

    def key(item: Transfer, device: int) -> tuple[int, int]:
        route = dependencies.route_of(item, device)
        assert route is not None
        return route.number, unit_of(item, trace.program.slices)

    for device, row in enumerate(trace.devices):
        for entry in row.transfers:
            place = key(entry.item, device)
            issued[place] = max(issued.get(place, entry.issued), entry.issued)
    for device, row in enumerate(trace.devices):
        for wait in row.waits:
            item = wait.transfer
            if wait.needed_by is None or not isinstance(item, Transfer):  # waits of sends are not for their arrival
                continue
            ready = issued[key(item, device)]
            name = "p2p" if item.kind in HOP_KINDS else CLASS_OF[item.kind]
            (samples.exact if wait.start <= ready else samples.bounds)[name].append(max(0.0, wait.end - ready))
