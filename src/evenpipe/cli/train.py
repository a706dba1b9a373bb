"""`evenpipe train CONFIG.toml [section.key=value ...] [--trace [FOLDER]] [--force]`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from evenpipe.cli.main import OVERRIDE

TRACED_STEP = 3
"""Default traced step of --trace: memory and connections are warmed up by then."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration and its overrides; the help lists every field."""
    from evenpipe.train.config_help import configuration_help

    parser.add_argument("config", metavar="CONFIG.toml", help="the configuration")
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", default=[], help="replace a value of the configuration"
    )
    parser.add_argument(
        "--trace",
        metavar="FOLDER",
        nargs="?",
        const="",
        help="write traces of the steps output.trace_steps (default: step 3) into FOLDER (default: traces in"
        " output.folder)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="train even if another run writes to the folders; the next checkpoint of that run then fails",
    )
    parser.epilog = "fields of the configuration:\n\n" + configuration_help()


def run(arguments: argparse.Namespace) -> int:
    """Train. A repeated run continues from the last checkpoint."""
    from evenpipe.train.config_file import load_config

    if OVERRIDE.match(arguments.trace or ""):  # an override after --trace is not its folder
        arguments.overrides.append(arguments.trace)
        arguments.trace = ""
    config = load_config(arguments.config, arguments.overrides)
    if arguments.trace is not None:
        steps = config.output.trace_steps or (min(TRACED_STEP, config.training.steps or TRACED_STEP),)
        folder = arguments.trace or config.output.trace_folder
        config = replace(config, output=replace(config.output, trace_steps=steps, trace_folder=folder))

    from evenpipe.train.start import run_training

    run_training(config, force=arguments.force)
    return 0
