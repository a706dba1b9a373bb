"""`evenpipe draw --schedule NAME|FILE.csv ... [-o FILE.{html,svg,json}]`."""

from __future__ import annotations

import argparse
import math

from evenpipe.cli.schedule_arguments import COSTS, add_cases, cases, schedules_help
from evenpipe.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to draw, and where."""
    add_cases(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="a page with zoom and explanations (.html), a picture (.svg) or a trace for Perfetto (.json);"
        " without it, the terminal",
    )
    parser.add_argument(
        "--memory", action="store_true", help="what each device holds, under its passes (.html: always)"
    )
    parser.add_argument(
        "--unit-seconds", metavar="X", type=float, help="length of the costs' unit of time, for axes in seconds"
    )
    parser.epilog = f"{schedules_help()}\n{COSTS}"


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say so, or print the picture."""
    from evenpipe.draw import check_file, draw, terminal

    unit = arguments.unit_seconds
    if unit is not None and not 0 < unit < math.inf:
        raise InputError(f"--unit-seconds is {unit:g}, expected a number above 0")
    if arguments.output is not None:
        check_file(arguments.output)
    planned = cases(arguments)

    from evenpipe.plan.case_report import labels

    timelines = dict(zip(labels(planned), (case.simulation.timeline for case in planned), strict=True))
    if arguments.output is None:
        print(terminal(timelines, memory=arguments.memory, unit_seconds=unit), end="", flush=True)
        return 0
    size = planned[0].schedule
    draw(
        timelines,
        arguments.output,
        title=f"{size.devices} devices, {size.microbatches} microbatches",
        memory=arguments.memory,
        unit_seconds=unit,
    )
    print(f"wrote {arguments.output}", flush=True)
    return 0
