"""Arguments that several commands share, and how to read them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpipe.cli.values import numbers
from evenpipe.errors import InputError
from evenpipe.given import plain

if TYPE_CHECKING:
    from evenpipe.plan.cases import Case
    from evenpipe.recipe.parallelism import Parallelism
    from evenpipe.schedule import Costs
    from evenpipe.schedule.placement import Edge

COSTS = """
Costs: a TOML or JSON file with times in one unit: F, B (or I and W) per stage; S, C, T, E, G per device; p2p,
collectives, bytes, ... A number applies to all stages or devices, a list has one number for each. Without a file:
F = I = W = 1 (B = 2), S = T = 0.4, all other times 0.

When schedules are compared, F, B, I, W and bytes describe a stage of the *first* schedule. The others do the same
work with the same bytes: with twice as many stages per device, each stage has half. A list can be merged (8 stages into
4) but not divided: give it for the schedule with the most stages. When modes with and without sharded vocabulary layers
are compared, the first and last stage do the vocabulary work of the latter: S + T of all devices in three equal parts
with F, I and W of the last stage, E with F and G with W of the first stage."""

LARGEST = 10_000_000
"""Largest devices x microbatches x stages per device x slices: some thirty million passes, an hour of simulation."""


def schedules_help() -> str:
    """Help text with one line per schedule."""
    from evenpipe.schedule.generators import SCHEDULES
    from evenpipe.schedule.registry import describe

    lines = [f"  {name:12s}{describe(name)}" for name in SCHEDULES]
    return "\n".join(["schedules:", *lines])


def add_size(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the numbers of devices and microbatches."""
    known = "" if required else " (default for a file: as in the file)"
    parser.add_argument("--devices", metavar="P", type=int, required=required, help=f"devices of the pipeline{known}")
    parser.add_argument(
        "--microbatches", metavar="M", type=int, required=required, help=f"microbatches of the step{known}"
    )


def add_costs(parser: argparse.ArgumentParser, use: str) -> None:
    """Add `--costs`."""
    parser.add_argument("--costs", metavar="FILE", help=f"TOML or JSON file with times and bytes, {use}")


def costs(arguments: argparse.Namespace) -> Costs | None:
    """The costs in the file of `--costs`, None without it. Raises InputError if they are not valid."""
    from evenpipe.schedule.files import read_costs

    return None if arguments.costs is None else read_costs(arguments.costs)


def add_memory_limit(parser: argparse._ActionsContainer, use: str) -> None:
    """Add `--memory-limit`."""
    parser.add_argument("--memory-limit", metavar="K[,K...]", help=use)


def add_edges(parser: argparse.ArgumentParser) -> None:
    """Add `--edges`, for `edges`."""
    parser.add_argument(
        "--edges",
        metavar="S>T,...",
        help="edges between the stages of a file, as in '0>1,0>2,1>3,2>3' (default: a chain)",
    )


def edges(arguments: argparse.Namespace) -> tuple[Edge, ...]:
    """The value of `--edges`. Raises InputError if it is not valid."""
    from evenpipe.schedule.placement import edges_of_text

    return () if arguments.edges is None else edges_of_text(arguments.edges)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of named schedules, for `options`."""
    parser.add_argument(
        "--stages-per-device", metavar="V", type=int, help="stages per device, for schedules that leave a choice"
    )
    parser.add_argument(
        "--group-size", metavar="G", type=int, help="microbatches that a device takes in turn (some schedules)"
    )
    add_memory_limit(parser, "most stage activations that a device may hold, for schedules that have this option")


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add the schedules, their size and their costs, for `cases`."""
    parser.add_argument(
        "--schedule", metavar="NAME|FILE.csv", help="name of a schedule, or file with an order or program"
    )
    parser.add_argument(
        "--compare",
        metavar="NAME,...",
        help="several schedules side by side, after --schedule if given; 'all': every name",
    )
    add_size(parser, required=False)
    add_options(parser)
    parser.add_argument(
        "--slices", metavar="N", type=int, help="cut every sequence into so many slices of equal time (default: 1)"
    )
    add_edges(parser)
    parser.add_argument(
        "--vocabulary",
        metavar="MODE,...",
        help="first-last, redistribute, interlaced, vocab-1, vocab-2 or balanced (= vocab-2), one or several"
        " (default: first-last, with the vocabulary layers on the first and last stage; for a file: unchanged)",
    )
    add_offload(parser)
    add_replicas(parser)
    add_costs(parser, "default: equal times")


def add_offload(parser: argparse._ActionsContainer) -> None:
    """Add `--offload`, for `offload`."""
    parser.add_argument(
        "--offload",
        metavar="CHOICE",
        default="scheduled",
        help="activations for the host: free (all that lower the peak without costing time), all (enough to reach"
        " the lowest possible peak), a number (enough to stay below that many bytes, with the sizes of --costs),"
        " none; default: scheduled (as the order says)",
    )


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Add what replicas do, for `replicas`."""
    parser.add_argument(
        "--data-parallel",
        choices=("replicate", "shard"),
        help="several replicas: they sum gradients, or also share parameters and gather them (default: one replica)",
    )
    parser.add_argument(
        "--reshard",
        action="store_true",
        default=None,
        help="with shard: free parameters between passes, and gather them again",
    )
    parser.add_argument(
        "--prefetch",
        metavar="N",
        type=int,
        help="with shard: gather parameters so many stages ahead (default: all at the start; 1 with --reshard)",
    )


def replicas(arguments: argparse.Namespace) -> Parallelism | None:
    """What replicas do, if there are several. Raises InputError if it is not valid."""
    from evenpipe.recipe.parallelism import Parallelism

    kind = arguments.data_parallel
    several = Parallelism(
        dp=2, data_parallel=kind or "replicate", reshard=bool(arguments.reshard), prefetch=arguments.prefetch
    )
    return None if kind is None else several


def offload(arguments: argparse.Namespace) -> str | float:
    """The value of `--offload`. Raises InputError if it is not valid."""
    from evenpipe.schedule.planning import check_offload

    given: str | float = arguments.offload
    with contextlib.suppress(ValueError):
        given = float(given)
    return check_offload(given)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases of the arguments of `add_cases`, planned and simulated. Raises InputError."""
    from evenpipe.plan.cases import plan_cases
    from evenpipe.schedule import SCHEDULES

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
        costs=costs(arguments),
        options=given,
        offload=offload(arguments),
        slices=arguments.slices,
        edges=edges(arguments),
        replicas=replicas(arguments),
    )


def refuse_too_large(arguments: argparse.Namespace) -> None:
    """Raise InputError for a size that would take hours, such as a mistyped number."""
    size = 1
    for name in ("devices", "microbatches", "stages_per_device", "slices"):
        size *= max(1, getattr(arguments, name, None) or 1)
    if size > LARGEST:
        raise InputError(
            f"devices x microbatches x stages per device x slices is {size}, too many to simulate; accepted: {LARGEST}"
        )


def _refuse_strange(name: str, schedules: Mapping[str, Any]) -> None:
    """Raise InputError for a value that is neither the name of a schedule nor of a CSV file."""
    from evenpipe.schedule.registry import options_of

    if name in schedules or name.endswith(".csv"):
        return
    if "," in name:
        raise InputError(f"--schedule is '{plain(name)}', but it takes one schedule; use --compare {name} for several")
    if Path(name).suffix or Path(name).is_file():
        raise InputError(f"'{plain(name)}' is not the name of a schedule, and the name of a file must end in .csv")
    options_of(name)  # raises, with the nearest name


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given options of generators."""
    given = {
        "stages_per_device": arguments.stages_per_device,
        "group_size": arguments.group_size,
        "memory_limit": numbers("memory-limit", arguments.memory_limit),
    }
    return {name: value for name, value in given.items() if value is not None}
