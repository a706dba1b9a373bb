"""`evenpipe profile CONFIG.toml [section.key=value ...] [-o COSTS.toml]`, or with `--from TRACE.json ...`.

`evenpipe profile --hardware [CONFIG.toml] [-o HARDWARE.toml]` measures the machine itself, for `plan`; with a
configuration, also the passes of its model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from evenpipe.cli.printing import say, say_json
from evenpipe.cli.values import whole_numbers
from evenpipe.errors import InputError
from evenpipe.given import plain, shortened, write_text

STEPS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to measure, and the output."""
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the configuration, as for evenpipe train")
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", default=[], help="replace a value of the configuration"
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
        "--hardware",
        action="store_true",
        help="measure this machine for plan: products, memory, messages, and with CONFIG.toml passes of its model",
    )
    parser.add_argument(
        "--microbatch-sizes",
        metavar="B[,B...]",
        help="with --hardware CONFIG.toml: sequences per measured microbatch (default: 1,4)",
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        help="with --hardware: number of processes (default: as configured, or one per core)",
    )
    parser.add_argument("-o", "--output", metavar="FILE.toml", help="write a file; without it, print the figures")
    parser.add_argument("--json", action="store_true", help="print the costs as one JSON object and nothing else")
    parser.epilog = (
        "Trains a few steps of the configured model on random tokens, with all its processes at once, and measures\n"
        "every pass and transfer, in seconds. The file is for --costs of simulate, draw, check and search. Its times\n"
        "are valid for this model, number of stages, microbatch size and sequence length. With first-last, the\n"
        "output layer is part of the last stage."
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, and write or print."""
    from evenpipe.costs import costs_of
    from evenpipe.costs.cost_file import check_output, costs_to_toml
    from evenpipe.schedule.trace_file import read_trace
    from evenpipe.train.config_file import load_config

    if arguments.output is not None:
        check_output(arguments.output)
    if arguments.hardware:
        return _hardware(arguments)
    for name in ("processes", "microbatch_sizes"):
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} needs --hardware; without it, the configuration decides")
    if (arguments.config is None) == (arguments.traces is None):
        given = "neither is" if arguments.config is None else "both are"
        raise InputError(f"profile needs either CONFIG.toml or --from TRACE.json, but {given} given")
    if arguments.traces:
        traces = [read_trace(path) for path in arguments.traces]
        costs, about = costs_of(traces), traces[0].about
    else:
        config = load_config(arguments.config, arguments.overrides)

        from evenpipe.train.profile import profile

        found = profile(config, steps=arguments.steps)
        costs, about = found.costs, found.about
    known = ", ".join(shortened(plain(f"{key} {value}")) for key, value in about.items() if key != "step")
    notes = [f"Seconds per microbatch, measured: {known}"]
    return _show(arguments, costs.to_dict(), costs_to_toml(costs, notes))


def _show(arguments: argparse.Namespace, values: Mapping[str, Any], toml: str) -> int:
    """Write or print what was measured."""
    if arguments.output is not None:
        write_text(arguments.output, toml)
    if arguments.json:
        say_json(values)
    elif arguments.output is None:
        say(toml, end="")
    else:
        say(f"wrote {arguments.output}")
    return 0


def _hardware(arguments: argparse.Namespace) -> int:
    if arguments.traces is not None:
        raise InputError("--hardware measures the machine; leave out --from")
    if arguments.microbatch_sizes is not None and arguments.config is None:
        raise InputError("--microbatch-sizes needs a model, but no CONFIG.toml is given")

    from evenpipe.costs.hardware import hardware_to_toml
    from evenpipe.plan.configuration_search import cores
    from evenpipe.train.config_file import load_config
    from evenpipe.train.hardware_profile import MICROBATCH_SIZES, profile_hardware

    config = None if arguments.config is None else load_config(arguments.config, arguments.overrides)
    processes = arguments.processes
    if processes is None:
        processes = cores() if config is None else config.pipeline.processes
    sizes: tuple[int, ...] = MICROBATCH_SIZES
    if arguments.microbatch_sizes is not None:
        sizes = whole_numbers("microbatch-sizes", arguments.microbatch_sizes)
    hardware = profile_hardware(processes, config=config, sizes=sizes, steps=arguments.steps)
    return _show(arguments, hardware.to_dict(), hardware_to_toml(hardware))
