"""Cases as text: a single case in detail, several in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evenpipe import words
from evenpipe.words import count

from .cases import Case

EQUAL = "F = I = W = 1 and B = 2 for all stages of a device, S = T = 0.4 per device; no transfer takes time"
EQUAL_REPLICAS = "replicas: UNSHARD 1 and REDUCE_GRAD 2 for all stages of a device; of E and S 0.4 and 0.8 per device"
EQUAL_COPIES = "copies to the host and back: 0.75 each for all stages of a device, whose forwards store 1 byte"
WHOLE = "without sharding, the first and last stage do the vocabulary work of all devices"


def summary(case: Case, costs: str | None) -> str:
    """One case in detail. costs: name of the cost file, None for equal costs."""
    simulation, timeline = case.simulation, case.simulation.timeline
    schedule = case.schedule
    first, *further = _work([case], costs)
    lines = [
        f"{labels([case])[0]}: {_size(case)}, {count(schedule.placement.stages, 'stage')}",
        f"work       {first}",
        *(f"           {line}" for line in further),
        f"lost       {100 * case.lost:.1f} % of the step, in which devices do not compute, on average",
        f"step       {_number(simulation.makespan)}{_bound(case, 'makespan')}",
        f"span       {_number(simulation.span)}{_bound(case, 'span')}",
        f"bubble     {_number(timeline.bubble)}, {100 * timeline.bubble_rate:.1f} % of the span of the slowest device",
        "",
        *_table(
            [
                *("device", "busy", "% of the step", "in flight"),
                *_if(timeline.on_device, "on the device"),
                *_if(timeline.peak_bytes, "peak bytes"),
            ],
            [
                [
                    str(device),
                    _number(timeline.busy[device]),
                    f"{_share(timeline.busy[device], simulation.makespan):.1f}",
                    str(timeline.peak_in_flight[device]),
                    *_if(timeline.on_device, str(timeline.peak_on_device[device])),
                    *([_number(timeline.peak_bytes[device])] if timeline.peak_bytes else []),
                ]
                for device in range(schedule.devices)
            ],
        ),
        "",
        *_critical_path(case),
    ]
    return "\n".join(lines)


def _work(cases: Sequence[Case], costs: str | None) -> list[str]:
    """Lines that describe the work of a step. costs: as in `summary`."""
    lines = [EQUAL if costs is None else f"{costs}, with the vocabulary layers"]
    if costs is None and any(case.simulation.timeline.on_device for case in cases):
        lines.append(EQUAL_COPIES)
    if costs is None and cases[0].costs.sharding:
        lines.append(EQUAL_REPLICAS)
    if costs is not None and len({case.schedule.placement.stages for case in cases}) > 1:
        lines.append(f"costs are those of a stage of {cases[0].name}; in all schedules a device does the same work")
    if any(not case.schedule.vocabulary.sharded for case in cases):
        lines.append(WHOLE)
    return lines


SORTED_BY: dict[str, Callable[[Case], float]] = {
    "lost": lambda case: case.lost,
    "step": lambda case: case.simulation.makespan,
    "span": lambda case: case.simulation.span,
    "bubble": lambda case: case.simulation.bubble_rate,
    "in-flight": lambda case: _microbatches(case, max(case.simulation.timeline.peak_in_flight)),
    "on-device": lambda case: _microbatches(case, max(case.simulation.timeline.peak_on_device)),
    "bytes": lambda case: max(case.simulation.timeline.peak_bytes or (math.inf,)),
}
"""Sort keys for the rows of `table`, in ascending order."""

_EQUALLY_SHORT = 1e-9
"""Steps with a smaller relative difference count as equal."""


def sorted_cases(cases: Sequence[Case], by: str | None) -> list[Case]:
    """`cases` sorted by a key of `SORTED_BY`, or unsorted. Equal cases keep their order."""
    return list(cases) if by is None else sorted(cases, key=SORTED_BY[by])


@dataclass(frozen=True, slots=True)
class CaseTable:
    """One row per case. above: explanations before the table. head: headings, which may have two lines. left: number of
    leading columns that are text."""

    above: list[str]
    head: list[str]
    rows: list[list[str]]
    left: int = 2

    def text(self) -> str:
        """The table in plain text."""
        return "\n".join([*self.above, "", *_table(self.head, self.rows, left=self.left)])


def table(cases: Sequence[Case], costs: str | None, *, sort: str | None = None) -> CaseTable:
    """One row per case, with the shortest step marked. costs: as in `summary`. sort: a key of `SORTED_BY`."""
    with_bytes = any(case.simulation.timeline.peak_bytes for case in cases)
    copied = any(case.simulation.timeline.on_device for case in cases)
    head = ["schedule", "vocabulary", "stages per\ndevice", "lost %", "step", "bound", "span"]
    head += ["bubble % of the\nslowest device", "stages\nin flight", *_if(copied, "on the\ndevice")]
    head += ["microbatches\nin flight", *_if(copied, "on the\ndevice"), *_if(with_bytes, "peak\nbytes"), ""]
    shortest = min(case.simulation.makespan for case in cases)
    rows = []
    for case in sorted_cases(cases, sort):
        timeline = case.simulation.timeline
        stages = case.stages_per_device
        peak, held = max(timeline.peak_in_flight), max(timeline.peak_on_device)
        row = [case.name, _mode(case), "-" if stages is None else str(stages), f"{100 * case.lost:.1f}"]
        row += [_number(timeline.makespan), _number(case.simulation.bounds["makespan"].value)]
        row += [_number(timeline.span), f"{100 * timeline.bubble_rate:.1f}"]
        row += [str(peak), *_if(copied, str(held))]
        row += [_number(_microbatches(case, peak)), *_if(copied, _number(_microbatches(case, held)))]
        if with_bytes:
            row.append(_number(max(timeline.peak_bytes)) if timeline.peak_bytes else "-")
        row.append("<- shortest" if timeline.makespan <= shortest * (1 + _EQUALLY_SHORT) and len(cases) > 1 else "")
        rows.append(row)
    first, *further = _work(cases, costs)
    above = [_size(cases[0]), f"work: {first}", *further]
    above += [
        "lost: share of the step in which devices do not compute, on average over all of them",
        "step: from the first start to the last end; bound: lower bound for all orders of these passes",
        "in flight: most activations on a device, counted per stage, and as microbatches through all its layers",
    ]
    return CaseTable(above, head, rows)


def _if(condition: object, column: str) -> list[str]:
    """A column that only some tables have."""
    return [column] if condition else []


def _microbatches(case: Case, stages: float) -> float:
    """Stage activations converted to microbatches through all layers of a device."""
    return stages * case.schedule.devices / case.schedule.placement.stages / case.schedule.slices


def to_dict(cases: Sequence[Case], costs: str | None, *, several: bool, sort: str | None = None) -> dict[str, Any]:
    """A dict for JSON: a case, or with `several` a list of them under "schedules", sorted as in `table`."""
    source = {"costs": costs or "equal"}
    if several:
        return {**source, "schedules": [case.to_dict() for case in sorted_cases(cases, sort)]}
    return {**source, **cases[0].to_dict()}


def labels(cases: Sequence[Case]) -> list[str]:
    """Names with vocabulary modes, or only names if all cases are unchanged files."""
    modes = any(case.mode is not None for case in cases)
    return [f"{case.name}, {_mode(case)}" if modes else case.name for case in cases]


def _mode(case: Case) -> str:
    return case.mode or case.schedule.vocabulary.value


QUEUES = ("communicator", "link", "engine")


def _size(case: Case) -> str:
    size = f"{count(case.schedule.devices, 'device')}, {count(case.schedule.microbatches, 'microbatch')}"
    return size if case.schedule.slices == 1 else f"{size} of {count(case.schedule.slices, 'slice')}"


def _bound(case: Case, quantity: str) -> str:
    bound = case.simulation.bounds[quantity]
    above = _share(getattr(case.simulation, quantity) - bound.value, bound.value)
    if above < 0.05:
        return f"  (no order is shorter: {bound.why})"
    return f"  ({above:.1f} % above the {bound.why})"


def _critical_path(case: Case) -> list[str]:
    path = case.simulation.critical_path
    kinds = ", ".join(f"{kind} {_number(time)}" for kind, time in path.by_kind.items() if time)
    queues = {resource: time for resource, time in path.by_resource.items() if time and resource in QUEUES}
    queued = ", ".join(f"{resource} {_number(time)}" for resource, time in queues.items())
    lines = [f"critical path: {count(len(path.steps), 'step')}, {kinds or 'nothing takes time'}"]
    if queued:
        lines.append(f"of which in a queue for a {queued}")
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Aligned columns: the first `left` ones and any without a heading to the left, figures to the right. Headings may
    have two lines."""
    above = [name.rpartition("\n")[0] for name in head]
    lines = [*([above] if any(above) else []), [name.rpartition("\n")[2] for name in head], *rows]
    return words.table(lines, {column for column, name in enumerate(head) if column < left or not name})


def _number(value: float) -> str:
    """A number with at most six digits, with thousands separators."""
    if abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.6g}"


def _share(amount: float, total: float) -> float:
    return 100 * amount / total if total else 0.0
