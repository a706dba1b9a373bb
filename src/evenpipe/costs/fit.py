"""Times of passes and transfers from traces of steps.

passes      The time of a pass is its compute plus the time until its device waits or starts the next pass, in which the
            host issues transfers (tens of microseconds each). Predicted steps therefore include that time.
            Within a step we take the mean, because the step is the sum of all its passes, including slow ones (the
            first gradient of a matrix is written to new memory); over several steps the median, because some steps are
            disturbed.
contention  Passes that ran while other devices computed are compared with passes of the same kind and stage that ran
            alone. The factor is the one for which all times agree best, and times are then those of a pass running
            alone. If overlap hardly varies between passes, or no factor improves the agreement, the factor is 1 and
            times are as measured.
transfers   A transfer lasts from the moment its last member issues it until a device that needs it continues. This is
            exact if the device was already waiting when the transfer was issued; we then take the median. Otherwise
            the transfer completed at an unknown earlier time, so we take the shortest.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import sub
from typing import Any, NamedTuple

import numpy as np

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Kind, Pass, Rules, Transfer, TransferKind
from evenpipe.schedule.passes import HOP_KINDS, OFFLOAD_KINDS, STAGE_KINDS, VOCABULARY_KINDS, unit_of
from evenpipe.schedule.trace import Trace

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
"""How the time of a joint pass is divided between its parts if no pass of that kind runs separately."""

FACTORS = [1 + step / 100 for step in range(301)]
"""Candidate factors for contention; they reach 2 and more if there are more processes than cores."""

BETTER = 0.02
"""Fraction by which the deviations must shrink for a factor to be accepted."""


class Sample(NamedTuple):
    """Duration of a pass."""

    seconds: tuple[float, ...]
    """Split by how many devices computed: first so few that none is slowed down, then one more each, up to all."""

    def times(self, factor: float) -> Sample:
        return Sample(tuple(factor * seconds for seconds in self.seconds))

    def alone(self, contention: float) -> float:
        """Return the duration without contention. As in the simulator, a pass is slowed down by `contention` while all
        devices compute, and proportionally less while only some do."""
        increment = (contention - 1) / max(1, len(self.seconds) - 1)
        return sum(seconds / (1 + increment * number) for number, seconds in enumerate(self.seconds))


Site = tuple[Kind, int]
"""Kind of a pass, and its stage, or its device for the vocabulary passes."""


@dataclass(slots=True)
class Samples:
    """Measurements of a step, by site of passes and by class of transfers. joint: shares of joint passes."""

    passes: dict[Site, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    joint: dict[Site, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    exact: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bounds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def costs_of(
    traces: Sequence[Trace],
    contention_traces: Sequence[Trace] = (),
    tokens: Sequence[int] = (),
    *,
    contention: float | None = None,
    free: int = 1,
) -> Costs:
    """Return the seconds per pass and transfer from `traces`, which must share one placement.

    contention_traces: further traces of the same model, used only to fit the contention. tokens: of each slice of a
    sequence, if known. contention: fitted to the traces if None. free: number of devices that can compute at the same
    time without slowing each other down, because they have their own cores; the simulator assumes 1. Raises InputError
    if there are no traces, if placements differ, or if a stage has no forward.
    """
    if not traces:
        raise InputError("there is no trace; give at least one")
    placement = traces[0].program.placement
    for trace in (*traces, *contention_traces):
        if trace.program.placement != placement:
            raise InputError(
                f"the traces have different placements, {list(placement.stage_device)} and"
                f" {list(trace.program.placement.stage_device)}, but need the same one"
            )
    steps = [_samples(trace, free) for trace in traces]
    if contention is None:
        contention = contention_of(*steps, *(_samples(trace, free) for trace in contention_traces))
    times: dict[str, Any] = {}
    for kind in (STAGE_KINDS - OFFLOAD_KINDS) | VOCABULARY_KINDS:
        indices = range(placement.devices if kind in VOCABULARY_KINDS else placement.stages)
        row = [_pass_seconds(steps, (kind, index), contention) for index in indices]
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


def _samples(trace: Trace, free: int) -> Samples:
    samples = Samples()
    for device, (row, passes) in enumerate(zip(trace.devices, _passes(trace, free), strict=True)):
        issuing_times = [*[gap.busy for gap in trace.gaps(device)][1:], 0.0]
        for entry, issuing, sample in zip(row.passes, issuing_times, passes, strict=True):
            took = entry.end - entry.start
            with_issuing = sample.times(1 + issuing / took) if took else Sample((issuing, *sample.seconds[1:]))
            _add(samples, entry.item, device, with_issuing)
    _transfers(trace, samples)
    return samples


def _pass_seconds(steps: Sequence[Samples], site: Site, contention: float) -> float | None:
    """Return the median over steps of the mean within a step; None if no step has the pass. Shares of joint passes
    count only if no pass of that kind runs separately."""
    for kind in ("passes", "joint"):
        per_step = [samples for step in steps if (samples := getattr(step, kind).get(site))]
        if per_step:
            return statistics.median(
                statistics.fmean(sample.alone(contention) for sample in samples) for samples in per_step
            )
    return None


def _copy_seconds(traces: Sequence[Trace], kind: Kind) -> dict[int, float]:
    """Return the time of copies of a kind, by stage."""
    durations: dict[int, list[float]] = defaultdict(list)
    for copy in chain.from_iterable(row.copies for trace in traces for row in trace.devices):
        if copy.item.kind is kind:
            assert copy.item.stage is not None
            durations[copy.item.stage].append(copy.end - copy.start)
    return {stage: statistics.median(times) for stage, times in durations.items()}


def _transfer_seconds(steps: Sequence[Samples], name: str) -> float | None:
    """Return the time of a transfer of this class; None if there was none."""
    exact = [time for step in steps for time in step.exact[name]]
    if exact:
        return statistics.median(exact)
    return min((time for step in steps for time in step.bounds[name]), default=None)


def contention_of(*measured: Samples) -> float:
    """Return the factor for which the passes of each site agree best; long passes count more than short ones."""
    sites: dict[Site, list[Sample]] = defaultdict(list)
    for site, site_samples in chain.from_iterable(samples.passes.items() for samples in measured):
        sites[site] += site_samples
    deviations, total = np.zeros(len(FACTORS)), np.zeros(len(FACTORS))
    for site_samples in sites.values():
        seconds = np.array([sample.seconds for sample in site_samples])
        shares = np.arange(seconds.shape[1]) / max(1, seconds.shape[1] - 1)
        isolated = seconds @ (1 / (1 + np.outer(shares, np.array(FACTORS) - 1)))  # of every sample, with every factor
        median = np.median(isolated, axis=0)
        deviations += np.abs(isolated - median).sum(axis=0)
        total += len(site_samples) * median
    relative = np.divide(deviations, total, out=np.zeros_like(deviations), where=total > 0)
    best = relative.argmin()
    return FACTORS[best] if relative[best] < (1 - BETTER) * relative[0] else 1.0


def _passes(trace: Trace, free: int) -> list[list[Sample]]:
    """Return the durations of all passes, per device. free: as for `costs_of`."""
    changes = sorted(
        (moment, change)
        for row in trace.devices
        for entry in row.passes
        for moment, change in ((entry.start, 1), (entry.end, -1))
    )
    max_contending = max(0, len(trace.devices) - free)
    spent = [0.0] * (max_contending + 1)
    until: dict[float, tuple[float, ...]] = {}
    previous, computing = 0.0, 0
    for moment, change in changes:
        spent[min(max_contending, max(0, computing - free))] += moment - previous
        until[moment], previous = tuple(spent), moment
        computing += change
    return [
        [Sample(tuple(map(sub, until[entry.end], until[entry.start]))) for entry in row.passes] for row in trace.devices
    ]


def _add(samples: Samples, item: Pass, device: int, sample: Sample) -> None:
    if item.parts:
        total = sum(WEIGHTS[component.kind] for component in item.parts)
        for component in item.parts:
            assert component.stage is not None
            samples.joint[component.kind, component.stage].append(sample.times(WEIGHTS[component.kind] / total))
    elif item.kind in VOCABULARY_KINDS:
        samples.passes[item.kind, device].append(sample)
    elif item.kind in STAGE_KINDS:
        assert item.stage is not None
        samples.passes[item.kind, item.stage].append(sample)


def _transfers(trace: Trace, samples: Samples) -> None:
    rules = Rules.of(trace.program)
    issued: dict[tuple[int, int], float] = {}

    def key(item: Transfer, device: int) -> tuple[int, int]:
        route = rules.route(device, item)
        assert route is not None
        return route.number, unit_of(item, trace.program.slices)

    for device, row in enumerate(trace.devices):
        for entry in row.transfers:
            transfer_key = key(entry.item, device)
            issued[transfer_key] = max(issued.get(transfer_key, entry.issued), entry.issued)
    for device, row in enumerate(trace.devices):
        for wait in row.waits:
            item = wait.transfer
            if wait.needed_by is None or not isinstance(item, Transfer):  # a sender's wait does not show the arrival
                continue
            ready = issued[key(item, device)]
            name = "p2p" if item.kind in HOP_KINDS else CLASS_OF[item.kind]
            (samples.exact if wait.start <= ready else samples.bounds)[name].append(max(0.0, wait.end - ready))
