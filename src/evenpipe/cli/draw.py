"""`evenpipe draw --schedule NAME|FILE.csv ... | TRACE.json [-o FILE.{html,svg,json}]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenpipe.cli.options import (
    COSTS_HELP,
    CaseOptions,
    limits,
    read_costs,
    read_offload,
    schedules_help,
    written,
)
from evenpipe.cli.printing import say
from evenpipe.errors import InputError
from evenpipe.schedule.collection import collecting_rarely
from evenpipe.words import refused

if TYPE_CHECKING:
    from evenpipe.compare.cases import Case
    from evenpipe.schedule import Timeline

TRACES = """
For a trace (evenpipe train --trace), the measured step is drawn above the predicted step of the same program, on one
time axis in seconds. The prediction uses the median times of the trace, or the costs of --costs in seconds (or in
--unit-seconds)."""


def epilog() -> str:
    """The end of the help."""
    return f"{schedules_help()}\n{TRACES}\n{COSTS_HELP}"


@collecting_rarely()
def run(
    trace: str | None = None,
    *,
    options: CaseOptions,
    output: str | None = None,
    memory: bool = False,
    waits: bool = False,
    unit_seconds: float | None = None,
) -> int:
    """Write the file, or draw in the terminal.

    TRACE.json         a measured step, instead of a schedule
    -o, --output FILE  write a page with zoom and explanations (.html), a picture (.svg, .png) or a trace for Perfetto
                       (.json); default: draw in the terminal
    --memory           draw the memory of each device under its passes (.html: always)
    --waits            show what idle devices wait for (.html, .json and traces: always)
    --unit-seconds X   length of the time unit of the costs, for axes in seconds
    """
    from evenpipe.declaration import LARGEST
    from evenpipe.draw import check_file, draw, terminal
    from evenpipe.schedule.cost_values import SMALLEST

    if unit_seconds is not None and not SMALLEST <= unit_seconds <= LARGEST:
        raise refused("--unit-seconds", unit_seconds, f"a number from {SMALLEST:g} to {LARGEST:g}")
    if output is not None:
        check_file(output)
    note = ""
    if trace is None:
        timelines, title = _simulated(options)
    else:
        timelines, title, note = _measured(trace, options, unit_seconds)
        waits, unit_seconds = True, 1.0
    if output is None:
        print(terminal(timelines, memory=memory, waits=waits, unit_seconds=unit_seconds), end="", flush=True)
    else:
        draw(timelines, output, title=title, memory=memory, waits=waits, unit_seconds=unit_seconds)
        say(f"wrote {output}")
    if note:
        say(note)
    return 0


def _simulated(options: CaseOptions) -> tuple[Mapping[str, Timeline], str]:
    from evenpipe.compare.case_report import labels
    from evenpipe.words import count

    planned = options.cases()
    timelines = {}
    for name, case in zip(labels(planned), planned, strict=True):
        timeline = case.simulation.timeline_with_slack
        if options.costs is None:  # bytes of schedules are activations only
            timeline = replace(timeline, memory=None)
        timelines[name] = replace(timeline, limit=_limit(options, case, timeline))
    size = planned[0].schedule
    title = f"{count(size.devices, 'device')}, {count(size.microbatches, 'microbatch')}"
    title = title if size.slices == 1 else f"{title} of {count(size.slices, 'slice')}"
    return timelines, title


def _limit(options: CaseOptions, case: Case, timeline: Timeline) -> tuple[float, ...] | None:
    """The limit of each device in the unit of its memory curve, None without one in that unit.

    --max-in-flight counts stage activations in flight, and --offload bytes on the device, of which a forward stores an
    equal number in every stage if it is to be a limit of stage activations there.
    """
    from evenpipe.schedule import SCHEDULES
    from evenpipe.schedule.check_limit import limits_per_device
    from evenpipe.schedule.registry import options_of

    devices, stage_bytes = case.schedule.devices, set(timeline.stage_bytes or ())
    device_budget = read_offload(options.offload)
    if isinstance(device_budget, float) and timeline.memory is not None:
        return (device_budget,) * devices
    if isinstance(device_budget, float) and timeline.on_device is not None and len(stage_bytes) == 1:
        return (device_budget / stage_bytes.pop(),) * devices
    limit = limits("max_in_flight", options.max_in_flight)
    has_option = case.name in SCHEDULES and "max_in_flight" in options_of(case.name)
    in_flight = timeline.memory is None and timeline.on_device is None
    return limits_per_device(limit, devices) if limit is not None and has_option and in_flight else None


def _measured(trace: str, options: CaseOptions, unit_seconds: float | None) -> tuple[Mapping[str, Timeline], str, str]:
    from evenpipe.compare.measured import compare
    from evenpipe.schedule.trace_file import read_trace

    for field in fields(options):
        if field.name not in ("costs", "offload") and getattr(options, field.name) != field.default:
            raise InputError(
                f"{written(field.name)} is given, but the trace {trace} has a schedule already; leave one of them out"
            )
    comparison = compare(read_trace(trace), read_costs(options.costs), unit_seconds=unit_seconds or 1.0)
    return comparison.timelines, comparison.title or Path(trace).stem, comparison.allocations
