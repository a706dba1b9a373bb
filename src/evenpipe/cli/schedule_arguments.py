"""Arguments that the commands about schedules share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpipe.errors import InputError
from evenpipe.given import plain

if TYPE_CHECKING:
    from evenpipe.plan.cases import Case

COSTS = """
Costs: a TOML or JSON file with times in one unit: F, B (or I and W), per stage; S, C, T, E, G per device; p2p,
collectives, bytes, ... A number holds for all, a list has one for each. Without a file: F = I = W = 1 (B = 2),
S = T = 0.4, and nothing for the rest.

When schedules are compared, F, B, I, W and bytes are those of a stage of the *first* schedule. The others do the same
work with the same bytes: with twice as many stages per device each has half. A list can be joined (8 stages to 4), but
not cut: give it for the schedule with the most stages. Where modes are compared that shard the vocabulary layers and
that do not, the first and last stage of the latter do their work: S + T of all devices in three equal parts with F, I
and W of the last stage, E with the first F, G with the first W."""

LARGEST = 10_000_000
"""Devices x microbatches x stages per device: some thirty million passes, an hour of simulation."""


def schedules_help() -> str:
    """Every schedule in one line."""
    from evenpipe.schedule.registry import SCHEDULES, describe

    lines = [f"  {name:12s}{describe(name)}" for name in SCHEDULES]
    return "\n".join(["schedules:", *lines])


def add_size(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Devices and microbatches."""
    known = "" if required else " (a file: as many as it has)"
    parser.add_argument("--devices", metavar="P", type=int, required=required, help=f"devices of the pipeline{known}")
    parser.add_argument(
        "--microbatches", metavar="M", type=int, required=required, help=f"microbatches of the step{known}"
    )


def add_costs(parser: argparse.ArgumentParser, use: str) -> None:
    """A cost file."""
    parser.add_argument("--costs", metavar="FILE", help=f"TOML or JSON file with times and bytes, {use}")


def add_memory_limit(parser: argparse.ArgumentParser, use: str) -> None:
    """How much may be held."""
    parser.add_argument("--memory-limit", metavar="K[,K...]", help=use)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Output for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Which schedules, at which size, with which costs; read by `cases`."""
    parser.add_argument(
        "--schedule", metavar="NAME|FILE.csv", help="a schedule by name, or an order or program in a file"
    )
    parser.add_argument(
        "--compare", metavar="NAME,...", help="several, side by side, behind --schedule if given; 'all': every name"
    )
    add_size(parser, required=False)
    parser.add_argument("--stages-per-device", metavar="V", type=int, help="for schedules that leave a choice")
    parser.add_argument(
        "--group-size", metavar="G", type=int, help="microbatches that a device takes in turn, likewise"
    )
    add_memory_limit(parser, "stage activations that a device may hold, for schedules that plan by it")
    parser.add_argument(
        "--vocabulary",
        metavar="MODE,...",
        help="first-last, redistribute, interlaced, vocab-1, vocab-2 or balanced (= vocab-2), one or several"
        " (default: first-last, where the first and last stage hold the vocabulary layers; a file as it stands)",
    )
    add_offload(parser)
    add_costs(parser, "instead of equal ones")


def add_offload(parser: argparse._ActionsContainer) -> None:
    """`--offload`; read by `offload`."""
    parser.add_argument(
        "--offload",
        metavar="WHAT",
        default="scheduled",
        help="which activations go to the host: free (all that lowers memory and costs no time), all (whatever it"
        " takes to hold as little as can be), a number of bytes as --costs counts them (what it takes to hold no more),"
        " none; default: scheduled (what the order says)",
    )


def offload(arguments: argparse.Namespace) -> str | float:
    """What `--offload` says. Raises InputError for anything else."""
    from evenpipe.schedule.planning import check_offload

    try:
        return check_offload(float(arguments.offload))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
    return check_offload(arguments.offload)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """What the arguments of `add_cases` ask for, planned and simulated. Raises InputError."""
    from evenpipe.plan.cases import plan_cases
    from evenpipe.schedule import SCHEDULES
    from evenpipe.schedule.files import read_costs

    given = options(arguments)
    names = [] if arguments.schedule is None else [arguments.schedule]
    for name in (arguments.compare or "").split(","):
        if name.strip() == "all":
            names += SCHEDULES
        elif name.strip():
            names.append(name.strip())
    if not names:
        raise InputError("no schedule is given; expected --schedule NAME, --schedule FILE.csv or --compare NAME,NAME")
    for name in names:
        _refuse_strange(name, SCHEDULES)
    refuse_too_large(arguments)
    modes = [mode.strip() for mode in (arguments.vocabulary or "").split(",") if mode.strip()]
    if arguments.vocabulary is not None and not modes:
        raise InputError(
            f"--vocabulary is '{plain(arguments.vocabulary)}', expected one or several modes such as vocab-2"
        )
    return plan_cases(
        list(dict.fromkeys(names)),
        devices=arguments.devices,
        microbatches=arguments.microbatches,
        vocabularies=modes,
        costs=None if arguments.costs is None else read_costs(arguments.costs),
        options=given,
        offload=offload(arguments),
    )


def refuse_too_large(arguments: argparse.Namespace) -> None:
    """Raise InputError for a size that no one has time to wait for, as a mistyped number gives."""
    size = 1
    for name in ("devices", "microbatches", "stages_per_device"):
        size *= max(1, getattr(arguments, name) or 1)
    if size > LARGEST:
        raise InputError(
            f"devices x microbatches x stages per device is {size}, too many to simulate; accepted: {LARGEST}"
        )


def _refuse_strange(name: str, schedules: Mapping[str, Any]) -> None:
    """Raise InputError for what is neither the name of a schedule nor that of a CSV file, and say how to write it."""
    from evenpipe.schedule.registry import options_of

    if name in schedules or name.endswith(".csv"):
        return
    if "," in name:
        raise InputError(f"--schedule is '{plain(name)}', but takes one schedule; --compare {name} takes several")
    if Path(name).suffix or Path(name).is_file():
        raise InputError(f"'{plain(name)}' is not the name of a schedule, and the name of a file must end in .csv")
    options_of(name)  # which raises, with the nearest name


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of generators that were given."""
    given = {
        "stages_per_device": arguments.stages_per_device,
        "group_size": arguments.group_size,
        "memory_limit": numbers("memory-limit", arguments.memory_limit),
    }
    return {name: value for name, value in given.items() if value is not None}


def numbers(name: str, text: str | None) -> float | list[float] | None:
    """One number, or several with commas. Raises InputError."""
    if text is None:
        return None
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--{name} is '{plain(text)}', expected a number, or one per device such as 8,8,6,4") from None
    return values[0] if len(values) == 1 else values
