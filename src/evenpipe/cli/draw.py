"""`evenpipe draw --schedule NAME|FILE.csv ... | TRACE.json [-o FILE.{html,svg,json}]`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenpipe.cli.printing import say
from evenpipe.cli.schedule_arguments import COSTS, add_cases, cases, costs, offload, options, schedules_help
from evenpipe.errors import InputError

if TYPE_CHECKING:
    from evenpipe.plan.cases import Case
    from evenpipe.schedule import Timeline

TRACES = """
For a trace (evenpipe train --trace), the measured step is drawn above the predicted step of the same program, on one
time axis in seconds. The prediction uses the median times of the trace, or the costs of --costs in seconds (or in
--unit-seconds)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schedules or the trace to draw, and the output."""
    parser.add_argument("trace", metavar="TRACE.json", nargs="?", help="a measured step, instead of a schedule")
    add_cases(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write a page with zoom and explanations (.html), a picture (.svg, .png) or a trace for Perfetto (.json);"
        " default: draw in the terminal",
    )
    parser.add_argument(
        "--memory", action="store_true", help="draw the memory of each device under its passes (.html: always)"
    )
    parser.add_argument(
        "--waits",
        action="store_true",
        help="show what idle devices wait for (.html, .json and traces: always)",
    )
    parser.add_argument(
        "--unit-seconds", metavar="X", type=float, help="length of the time unit of the costs, for axes in seconds"
    )
    parser.epilog = f"{schedules_help()}\n{TRACES}\n{COSTS}"


def run(arguments: argparse.Namespace) -> int:
    """Write the file, or draw in the terminal."""
    from evenpipe.draw import check_file, draw, terminal
    from evenpipe.schedule.cost_values import LARGEST, SMALLEST

    unit = arguments.unit_seconds
    if unit is not None and not SMALLEST <= unit <= LARGEST:
        raise InputError(f"--unit-seconds is {unit:g}, expected a number above 0, from {SMALLEST:g} to {LARGEST:g}")
    if arguments.output is not None:
        check_file(arguments.output)
    note = ""
    if arguments.trace is None:
        timelines, title, waits = *_simulated(arguments), arguments.waits
    else:
        timelines, title, note = _measured(arguments)
        waits, unit = True, 1.0
    if arguments.output is None:
        print(terminal(timelines, memory=arguments.memory, waits=waits, unit_seconds=unit), end="", flush=True)
    else:
        draw(timelines, arguments.output, title=title, memory=arguments.memory, waits=waits, unit_seconds=unit)
        say(f"wrote {arguments.output}")
    if note:
        say(note)
    return 0


def _simulated(arguments: argparse.Namespace) -> tuple[Mapping[str, Timeline], str]:
    from evenpipe.plan.case_report import labels
    from evenpipe.words import count

    planned = cases(arguments)
    timelines = {}
    for name, case in zip(labels(planned), planned, strict=True):
        timeline = case.simulation.timeline_with_slack
        if arguments.costs is None:  # bytes of schedules are activations only
            timeline = replace(timeline, memory=None)
        timelines[name] = replace(timeline, limit=_limit(arguments, case, timeline))
    size = planned[0].schedule
    title = f"{count(size.devices, 'device')}, {count(size.microbatches, 'microbatch')}"
    return timelines, title if size.slices == 1 else f"{title} of {count(size.slices, 'slice')}"


def _limit(arguments: argparse.Namespace, case: Case, timeline: Timeline) -> tuple[float, ...] | None:
    """The limit of each device in the unit of its memory curve, None without one in that unit.

    --memory-limit counts stage activations in flight, and --offload bytes on the device, of which a forward stores an
    equal number in every stage if it is to be a limit of stage activations there.
    """
    from evenpipe.schedule import SCHEDULES
    from evenpipe.schedule.check_limit import limits_per_device
    from evenpipe.schedule.registry import options_of

    devices, stage_bytes = case.schedule.devices, set(timeline.stage_bytes or ())
    most = offload(arguments)
    if isinstance(most, float) and timeline.memory is not None:
        return (most,) * devices
    if isinstance(most, float) and timeline.on_device is not None and len(stage_bytes) == 1:
        return (most / stage_bytes.pop(),) * devices
    limit = options(arguments).get("memory_limit")
    has_option = case.name in SCHEDULES and "memory_limit" in options_of(case.name)
    in_flight = timeline.memory is None and timeline.on_device is None
    return limits_per_device(limit, devices) if limit is not None and has_option and in_flight else None


def _measured(arguments: argparse.Namespace) -> tuple[Mapping[str, Timeline], str, str]:
    from evenpipe.plan.measured import compare
    from evenpipe.schedule.trace_file import read_trace

    others = ("schedule", "compare", "devices", "microbatches", "stages_per_device", "slices", "group_size", "edges")
    for name in (*others, "memory_limit", "data_parallel", "reshard", "prefetch", "vocabulary"):
        if getattr(arguments, name) is not None:
            option = name.replace("_", "-")
            raise InputError(
                f"--{option} is given, but the trace {arguments.trace} has a schedule already; leave one of them out"
            )
    trace = read_trace(arguments.trace)
    comparison = compare(trace, costs(arguments), unit_seconds=arguments.unit_seconds or 1.0)
    return comparison.timelines, comparison.title or Path(arguments.trace).stem, comparison.allocations
