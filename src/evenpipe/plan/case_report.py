"""Cases as text: one in detail, several in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from evenpipe import words
from evenpipe.words import count

from .cases import WHOLE, Case

EQUAL = "equal (F = I = W = 1 per stage, B = 2; S = T = 0.4 per device; no transfer takes time)"
EQUAL_REPLICAS = "replicas: UNSHARD 1, REDUCE_GRAD 2 per stage; of E and S 0.4 and 0.8 per device"
EQUAL_COPIES = "copies to the host and back: 0.75 each; bytes: a forward of a stage stores 1"


def summary(case: Case, costs: str | None) -> str:
    """Return one case in detail. `costs`: the name of their file, None for equal ones."""
    simulation, timeline = case.simulation, case.simulation.timeline
    schedule = case.schedule
    lines = [
        f"{labels([case])[0]}: {_size(case)}, {count(schedule.placement.stages, 'stage')}",
        f"costs      {EQUAL if costs is None else costs}",
        *([f"           {EQUAL_COPIES}"] if costs is None and timeline.on_device else []),
        *([f"           {EQUAL_REPLICAS}"] if costs is None and case.costs.sharding else []),
        f"step       {_number(simulation.makespan)}{_bound(case, 'makespan')}",
        f"busy       {100 * timeline.mean_busy:.1f} % of the step, on average over devices",
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


SORTED_BY: dict[str, Callable[[Case], float]] = {
    "step": lambda case: case.simulation.makespan,
    "busy": lambda case: -case.simulation.timeline.mean_busy,
    "span": lambda case: case.simulation.span,
    "bubble": lambda case: case.simulation.bubble_rate,
    "in-flight": lambda case: _microbatches(case, max(case.simulation.timeline.peak_in_flight)),
    "on-device": lambda case: _microbatches(case, max(case.simulation.timeline.peak_on_device)),
    "bytes": lambda case: max(case.simulation.timeline.peak_bytes or (math.inf,)),
}
"""Sort keys for the rows of `table`, the best first: least, or busiest."""

_EQUALLY_SHORT = 1e-9
"""Steps with a smaller relative difference count as equal."""


def sorted_cases(cases: Sequence[Case], by: str | None) -> list[Case]:
    """Return `cases` sorted by a name of `SORTED_BY`, or unsorted. Equal cases keep their order."""
    return list(cases) if by is None else sorted(cases, key=SORTED_BY[by])


def table(cases: Sequence[Case], costs: str | None, *, sort: str | None = None) -> str:
    """Return one row per case, the shortest step marked. `costs` as in `summary`; sort: a name of `SORTED_BY`."""
    modes = any(case.mode not in (None, *WHOLE) for case in cases)
    with_bytes = any(case.simulation.timeline.peak_bytes for case in cases)
    copied = any(case.simulation.timeline.on_device for case in cases)
    first = cases[0]
    head = ["schedule", *_if(modes, "vocabulary"), "stages per\ndevice", "step", "bound", "busy %", "span"]
    head += ["bubble % of the\nslowest device", "stages\nin flight", *_if(copied, "on the\ndevice")]
    head += ["microbatches\nin flight", *_if(copied, "on the\ndevice"), *_if(with_bytes, "peak\nbytes"), ""]
    shortest = min(case.simulation.makespan for case in cases)
    rows = []
    for case in sorted_cases(cases, sort):
        timeline = case.simulation.timeline
        count = case.stages_per_device
        peak, here = max(timeline.peak_in_flight), max(timeline.peak_on_device)
        row = [case.name, *_if(modes, case.mode or "unchanged")]
        row += ["-" if count is None else str(count), _number(timeline.makespan)]
        row += [_number(case.simulation.bounds["makespan"].value), f"{100 * timeline.mean_busy:.1f}"]
        row += [_number(timeline.span), f"{100 * timeline.bubble_rate:.1f}"]
        row += [str(peak), *_if(copied, str(here))]
        row += [_number(_microbatches(case, peak)), *_if(copied, _number(_microbatches(case, here)))]
        if with_bytes:
            row.append(_number(max(timeline.peak_bytes)) if timeline.peak_bytes else "-")
        row.append("<- shortest" if timeline.makespan <= shortest * (1 + _EQUALLY_SHORT) and len(cases) > 1 else "")
        rows.append(row)
    notes = [EQUAL_COPIES] if costs is None and copied else []
    if len({case.schedule.placement.stages for case in cases}) > 1:
        notes.append(f"costs are those of a stage of {first.name}; in all schedules a device does the same work")
    if modes and any(case.mode in WHOLE for case in cases):
        notes.append("without sharding, the first and last stage also do the vocabulary work")
    return "\n".join(
        [
            _size(first),
            f"costs: {EQUAL if costs is None else costs}",
            *notes,
            "step: from the first start to the last end; bound: lower bound for all orders of these passes",
            "busy: share of the step that devices compute, on average over all of them",
            "in flight: most activations on a device, counted per stage, and as microbatches through all its layers",
            "",
            *_table(head, rows, left=2 if modes else 1),
        ]
    )


def _if(condition: object, column: str) -> list[str]:
    """Return a column that only some tables have."""
    return [column] if condition else []


def _microbatches(case: Case, stages: float) -> float:
    """Return stage activations converted to microbatches through all layers of a device."""
    return stages * case.schedule.devices / case.schedule.placement.stages / case.schedule.slices


def to_dict(cases: Sequence[Case], costs: str | None, *, several: bool, sort: str | None = None) -> dict[str, Any]:
    """Return a dict for JSON: a case, or with `several` a list of them under "schedules", sorted as in `table`."""
    source = {"costs": costs or "equal"}
    if several:
        return {**source, "schedules": [case.to_dict() for case in sorted_cases(cases, sort)]}
    return {**source, **cases[0].to_dict()}


def labels(cases: Sequence[Case]) -> list[str]:
    """Return names, with modes if any of them adds passes."""
    modes = any(case.mode not in (None, *WHOLE) for case in cases)
    return [f"{case.name}, {case.mode}" if modes and case.mode else case.name for case in cases]


QUEUES = ("communicator", "link", "engine")


def _size(case: Case) -> str:
    size = f"{count(case.schedule.devices, 'device')}, {count(case.schedule.microbatches, 'microbatch')}"
    return size if case.schedule.slices == 1 else f"{size} of {count(case.schedule.slices, 'slice')}"


def _bound(case: Case, what: str) -> str:
    bound = case.simulation.bounds[what]
    above = _share(getattr(case.simulation, what) - bound.value, bound.value)
    if above < 0.05:
        return f"  (no order is shorter: {bound.why})"
    return f"  ({above:.1f} % above the bound of {_number(bound.value)}: {bound.why})"


def _critical_path(case: Case) -> list[str]:
    path = case.simulation.critical_path
    kinds = ", ".join(f"{kind} {_number(time)}" for kind, time in path.by_kind.items() if time)
    queues = {what: time for what, time in path.by_resource.items() if time and what in QUEUES}
    behind = ", ".join(f"{what} {_number(time)}" for what, time in queues.items())
    lines = [f"critical path: {count(len(path.steps), 'step')}, {kinds or 'nothing takes time'}"]
    if behind:
        lines.append(f"of which in a queue for a {behind}")
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return aligned columns; the first `left` and one without a heading to the left, figures to the right. Headings
    may have two lines."""
    above = [name.rpartition("\n")[0] for name in head]
    lines = [*([above] if any(above) else []), [name.rpartition("\n")[2] for name in head], *rows]
    return words.table(lines, {column for column, name in enumerate(head) if column < left or not name})


def _number(value: float) -> str:
    """Return a number with at most six digits, with thousands separators."""
    if abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.6g}"


def _share(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
