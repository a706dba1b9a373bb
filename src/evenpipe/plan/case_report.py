"""Cases in words: one in detail, several in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenpipe.schedule.words import count

from .cases import WHOLE, Case

EQUAL = "equal (F = I = W = 1 per stage, B = 2; S = T = 0.4 per device; no transfer takes time)"


def summary(case: Case, costs: str | None) -> str:
    """Everything of one case. `costs`: the file that they come from, None for equal ones."""
    simulation, timeline = case.simulation, case.simulation.timeline
    schedule = case.schedule
    lines = [
        f"{labels([case])[0]}: {_size(case)}, {count(schedule.placement.stages, 'stage')}",
        f"costs      {EQUAL if costs is None else costs}",
        f"span       {_number(simulation.span)}{_bound(case, 'span')}",
        f"makespan   {_number(simulation.makespan)}{_bound(case, 'makespan')}",
        f"skew       {_number(timeline.skew)}",
        f"bubble     {_number(timeline.bubble)}, {100 * simulation.bubble_rate:.1f} % of the span",
        "",
        *_table(
            ["device", "busy", "% of the step", "in flight", *(["peak bytes"] if timeline.peak_bytes else [])],
            [
                [
                    str(device),
                    _number(timeline.busy[device]),
                    f"{_share(timeline.busy[device], simulation.makespan):.1f}",
                    str(timeline.peak_in_flight[device]),
                    *([_number(timeline.peak_bytes[device])] if timeline.peak_bytes else []),
                ]
                for device in range(schedule.devices)
            ],
        ),
        "",
        *_critical_path(case),
    ]
    return "\n".join(lines)


def table(cases: Sequence[Case], costs: str | None) -> str:
    """One row per case. `costs` as in `summary`."""
    modes = any(case.mode not in (None, *WHOLE) for case in cases)
    with_bytes = any(case.simulation.timeline.peak_bytes for case in cases)
    first = cases[0]
    head = ["schedule", *(["vocabulary"] if modes else []), "stages per device", "span", "bound", "makespan"]
    head += ["bubble %", "in flight", "microbatches", *(["peak bytes"] if with_bytes else [])]
    rows = []
    for case in cases:
        timeline = case.simulation.timeline
        bound = case.simulation.bounds["span"]
        count = case.stages_per_device
        peak = max(timeline.peak_in_flight)
        row = [case.name, *([case.mode or "as it stands"] if modes else [])]
        row += ["-" if count is None else str(count), _number(timeline.span)]
        row += [_number(bound.value), _number(timeline.makespan)]
        row += [f"{100 * timeline.bubble_rate:.1f}", str(peak)]
        row += [_number(peak * first.schedule.devices / case.schedule.placement.stages)]
        if with_bytes:
            row.append(_number(max(timeline.peak_bytes)) if timeline.peak_bytes else "-")
        rows.append(row)
    notes = []
    if len({case.schedule.placement.stages for case in cases}) > 1:
        notes.append(f"a stage of {first.name} has these costs; in the others a device does the same work")
    if modes and any(case.mode in WHOLE for case in cases):
        notes.append("where the vocabulary is not sharded, the first and last stage do that work too")
    return "\n".join(
        [
            _size(first),
            f"costs: {EQUAL if costs is None else costs}",
            *notes,
            "in flight: most stage activations on a device; microbatches: the same, in layers of a whole device",
            "",
            *_table(head, rows, left=2 if modes else 1),
        ]
    )


def to_dict(cases: Sequence[Case], costs: str | None, *, several: bool) -> dict[str, Any]:
    """For JSON: a case, or with `several` a list of them under "schedules"."""
    source = {"costs": costs or "equal"}
    if several:
        return {**source, "schedules": [case.to_dict() for case in cases]}
    return {**source, **cases[0].to_dict()}


def labels(cases: Sequence[Case]) -> list[str]:
    """Names, and modes if any of them adds passes."""
    modes = any(case.mode not in (None, *WHOLE) for case in cases)
    return [f"{case.name}, {case.mode}" if modes and case.mode else case.name for case in cases]


QUEUES = ("communicator", "link", "engine")


def _size(case: Case) -> str:
    return f"{count(case.schedule.devices, 'device')}, {count(case.schedule.microbatches, 'microbatch')}"


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
    """Aligned columns; the first `left` to the left, figures to the right."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            word.ljust(width) if column < left else word.rjust(width)
            for column, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *rows)
    ]


def _number(value: float) -> str:
    """Six digits at most, thousands apart."""
    if abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.6g}"


def _share(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
