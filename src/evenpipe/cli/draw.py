"""`evenpipe draw --schedule NAME|FILE.csv ... [-o FILE.{html,svg,json}]`."""

from __future__ import annotations

import argparse

from evenpipe.cli.schedule_arguments import COSTS, add_cases, cases, schedules_help


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

    if arguments.output is not None:
        check_file(arguments.output)
    planned = cases(arguments)

    from evenpipe.plan.case_report import labels

    timelines = dict(zip(labels(planned), (case.simulation.timeline for case in planned), strict=True))
    if arguments.output is None:
        print(terminal(timelines, memory=arguments.memory, unit_seconds=arguments.unit_seconds), end="", flush=True)
        return 0
    size = planned[0].schedule
    draw(
        timelines,
        arguments.output,
        title=f"{size.devices} devices, {size.microbatches} microbatches",
        memory=arguments.memory,
        unit_seconds=arguments.unit_seconds,
    )
    print(f"wrote {arguments.output}", flush=True)
    return 0
