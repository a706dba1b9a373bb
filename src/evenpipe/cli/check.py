"""`evenpipe check FILE.csv`."""

from __future__ import annotations

import argparse

from evenpipe.cli.printing import say, say_json
from evenpipe.cli.schedule_arguments import add_costs, add_edges, add_json, add_memory_limit, costs, edges
from evenpipe.cli.values import numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the limits to check it against."""
    parser.add_argument(
        "file", metavar="FILE.csv", help="one line per device, such as 0F0,0B0: an order, or a program with transfers"
    )
    add_edges(parser)
    add_costs(parser, "every pass must have a time in it; its bytes give the peak in bytes")
    add_memory_limit(parser, "most stage activations that a device may hold: one number, or one per device")
    parser.add_argument("--bytes-limit", metavar="N[,N...]", help="the same in bytes, with the sizes of the cost file")
    add_json(parser)
    parser.epilog = (
        "A schedule is sound if it runs every pass exactly once on its device, after the passes it needs, completes\n"
        "for every way of queueing transfers, and releases every activation.\n"
        "The first 1000 faults are listed, with --json all of them.\n"
        "Placement, microbatches, slices and vocabulary mode follow from the passes.\n\n"
        "exit codes: 0 sound, 1 faults found, 2 not a schedule"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the file and print the result."""
    from evenpipe.schedule.check_file import check_file

    report = check_file(
        arguments.file,
        costs(arguments),
        memory_limit=numbers("memory-limit", arguments.memory_limit),
        bytes_limit=numbers("bytes-limit", arguments.bytes_limit),
        edges=edges(arguments),
    )
    if arguments.json:
        say_json(report.to_dict())
    else:
        say(report.text())
    return 0 if report.sound else 1
