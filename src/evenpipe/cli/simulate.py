"""`evenpipe simulate --schedule NAME|FILE.csv ...`."""

from __future__ import annotations

from typing import Literal

from evenpipe.cli.options import COSTS_HELP, CaseOptions, schedules_help
from evenpipe.cli.printing import say, say_json, say_table
from evenpipe.errors import InputError
from evenpipe.schedule.collection import collecting_rarely


def epilog() -> str:
    """The end of the help."""
    return f"{schedules_help()}\n{COSTS_HELP}"


@collecting_rarely()
def run(
    *,
    options: CaseOptions,
    sort: Literal["lost", "step", "span", "bubble", "in-flight", "on-device", "bytes"] | None = None,
    json_: bool = False,
) -> int:
    """Print one schedule in detail, or several in a table.

    --sort  sort the rows of the table, the least first; default: as written
    """
    planned, costs = options.cases(), options.costs

    from evenpipe.compare import case_report

    several = options.compare is not None or len(planned) > 1
    if sort is not None and not several:
        raise InputError("--sort is given, but there is only one schedule; give several with --compare or --vocabulary")
    if json_:
        say_json(case_report.to_dict(planned, costs, several=several, sort=sort))
    elif several:
        say_table(case_report.table(planned, costs, sort=sort))
    else:
        say(case_report.summary(planned[0], costs))
    return 0
