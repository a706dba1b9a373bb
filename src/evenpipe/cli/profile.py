"""`evenpipe profile CONFIG.toml [section.key=value ...] [-o COSTS.toml]`, or with `--from TRACE.json ...`.

With `--hardware [--processes N] [-o HARDWARE.toml]` no model is run: the machine itself is measured, for `plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evenpipe.errors import InputError

if TYPE_CHECKING:
    from evenpipe.schedule import Costs

STEPS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where the costs go."""
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the configuration, as for evenpipe train")
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="replaces a value of the configuration"
    )
    parser.add_argument(
        "--from",
        dest="traces",
        metavar="TRACE.json",
        nargs="+",
        help="take the costs from traces of training (evenpipe train --trace) instead of running anything",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=STEPS,
        help="measured steps per form of backward (default: %(default)s)",
    )
    parser.add_argument(
        "--hardware", action="store_true", help="measure this machine instead: products, memory, messages; for plan"
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        help="with --hardware: so many at once (default: as many as there are cores)",
    )
    parser.add_argument("-o", "--output", metavar="FILE.toml", help="write a file; without it, print the figures")
    parser.add_argument("--json", action="store_true", help="print the costs as one JSON object and nothing else")
    parser.epilog = (
        "Trains a few steps of the configured model on random tokens, with all its processes at once, and takes the\n"
        "medians of every pass and transfer, in seconds. The file is for --costs of simulate, draw, check and search.\n"
        "Its times hold for this model, number of stages, microbatch size and sequence length. An output layer that\n"
        "is whole (first-last) counts as part of the last stage."
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, and write or print."""
    from evenpipe.costs import write_costs
    from evenpipe.costs.cost_file import check_output, costs_to_toml

    if arguments.output is not None:
        check_output(arguments.output)
    if arguments.hardware:
        return _hardware(arguments)
    if arguments.processes is not None:
        raise InputError("--processes is for --hardware; the configuration says it otherwise")
    if (arguments.config is None) == (arguments.traces is None):
        given = "neither is" if arguments.config is None else "both are"
        raise InputError(f"profile needs either CONFIG.toml or --from TRACE.json, but {given} given")
    costs, about = _from_traces(arguments.traces) if arguments.traces else _measured(arguments)
    known = ", ".join(f"{key} {value}" for key, value in about.items() if key != "step")
    notes = [f"Seconds per microbatch, measured: {known}"]
    if arguments.output is not None:
        write_costs(costs, arguments.output, notes)
    if arguments.json:
        print(json.dumps(costs.to_dict()), flush=True)
    elif arguments.output is None:
        print(costs_to_toml(costs, notes), end="", flush=True)
    else:
        print(f"wrote {arguments.output}", flush=True)
    return 0


def _from_traces(paths: list[str]) -> tuple[Costs, Mapping[str, Any]]:
    from evenpipe.costs import costs_of
    from evenpipe.schedule.trace_file import read_trace

    traces = [read_trace(path) for path in paths]
    return costs_of(traces), traces[0].about


def _measured(arguments: argparse.Namespace) -> tuple[Costs, Mapping[str, Any]]:
    from evenpipe.train.config_file import load_config

    config = load_config(arguments.config, arguments.overrides)

    from evenpipe.train.profile import profile

    found = profile(config, steps=arguments.steps)
    return found.costs, found.about


def _hardware(arguments: argparse.Namespace) -> int:
    if arguments.config is not None or arguments.traces is not None:
        raise InputError("--hardware measures the machine alone; leave CONFIG.toml and --from away")

    from evenpipe.costs.hardware import hardware_to_toml, write_hardware
    from evenpipe.plan.configuration_search import cores
    from evenpipe.train.hardware_profile import profile_hardware

    hardware = profile_hardware(cores() if arguments.processes is None else arguments.processes)
    if arguments.output is not None:
        write_hardware(hardware, arguments.output)
    if arguments.json:
        print(json.dumps(hardware.to_dict()), flush=True)
    elif arguments.output is None:
        print(hardware_to_toml(hardware), end="", flush=True)
    else:
        print(f"wrote {arguments.output}", flush=True)
    return 0
