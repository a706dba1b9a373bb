"""`evenpipe simulate --schedule NAME|FILE.csv ...`."""

from __future__ import annotations

import argparse

from evenpipe.cli.printing import say, say_json
from evenpipe.cli.schedule_arguments import COSTS, add_cases, add_json, cases, schedules_help
from evenpipe.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schedules to simulate."""
    from evenpipe.plan.case_report import SORTED_BY

    add_cases(parser)
    parser.add_argument(
        "--sort",
        choices=tuple(SORTED_BY),
        help="sort the rows of the table, the best first; default: as given",
    )
    add_json(parser)
    parser.epilog = f"{schedules_help()}\n{COSTS}"


def run(arguments: argparse.Namespace) -> int:
    """Print one schedule in detail, or several in a table."""
    planned = cases(arguments)

    from evenpipe.plan import case_report

    several = arguments.compare is not None or len(planned) > 1
    if arguments.sort is not None and not several:
        raise InputError("--sort is given, but there is only one schedule; give several with --compare or --vocabulary")
    if arguments.json:
        say_json(case_report.to_dict(planned, arguments.costs, several=several, sort=arguments.sort))
    elif several:
        say(case_report.table(planned, arguments.costs, sort=arguments.sort))
    else:
        say(case_report.summary(planned[0], arguments.costs))
    return 0
