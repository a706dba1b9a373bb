"""`evenpipe check FILE.csv`."""

from __future__ import annotations

from evenpipe.cli.options import limits, read_costs, read_edges
from evenpipe.cli.printing import say_report
from evenpipe.errors import InputError


def run(
    file: str,
    *,
    edges: str | None = None,
    costs: str | None = None,
    max_in_flight: str | None = None,
    bytes_limit: str | None = None,
    json_: bool = False,
) -> int:
    """Check the file and print the result.

    FILE.csv                one line per device, such as 0F0,0B0: an order, or a program with transfers
    --costs FILE            file with times and bytes: every pass must have a time in it, its bytes give the peak
    --bytes-limit N[,N...]  like --max-in-flight in bytes, with the sizes of --costs

    A schedule is sound if it runs every pass exactly once on its device, after the passes it needs, completes for every
    way of queueing transfers, and releases every activation.
    The first 1000 faults are listed, with --json all of them.
    Placement, microbatches, slices and vocabulary mode follow from the passes.

    exit codes: 0 sound, 1 faults found, 2 not a schedule
    """
    from evenpipe.schedule.check_file import check_file
    from evenpipe.schedule.files import read_schedule

    limits_by_option = {
        "--max-in-flight": limits("max_in_flight", max_in_flight),
        "--bytes-limit": limits("bytes_limit", bytes_limit),
    }
    for name, values in limits_by_option.items():
        if isinstance(values, list) and len(values) != (devices := read_schedule(file, read_edges(edges)).devices):
            raise InputError(f"{name} has {len(values)} numbers; it must have one, or {devices}, one per device")
    if bytes_limit is not None and costs is None:
        raise InputError("--costs is missing; --bytes-limit needs its sizes")
    report = check_file(file, read_costs(costs), *limits_by_option.values(), edges=read_edges(edges))
    say_report(report, as_json=json_)
    return 0 if report.sound else 1
