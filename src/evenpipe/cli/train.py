"""`evenpipe train CONFIG.toml [section.key=value ...] [--trace [FOLDER]] [--force]`."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

from evenpipe.cli.main import OVERRIDE

TRACED_STEP = 3
"""Default traced step of --trace: memory and connections are warmed up by then."""


def epilog() -> str:
    """The end of the help: every field of the configuration."""
    from evenpipe.train.config_help import configuration_help

    return "fields of the configuration:\n\n" + configuration_help()


def prepare(arguments: list[str]) -> list[str]:
    """The arguments with an empty FOLDER behind a `--trace` that has none: at the end, before options and overrides."""
    prepared = []
    for argument, following in itertools.pairwise([*arguments, "-"]):
        has_no_folder = argument == "--trace" and (following.startswith("-") or OVERRIDE.match(following))
        prepared.append("--trace=" if has_no_folder else argument)
    return prepared


def run(config: str, overrides: list[str] | None = None, *, trace: str | None = None, force: bool = False) -> int:
    """Train. A repeated run continues from the last checkpoint.

    CONFIG.toml             the configuration
    [section.key=value]...  replace values of the configuration
    --trace [FOLDER]        write traces of the steps output.trace_steps (default: step 3) into FOLDER (default: traces
                            in output.folder)
    --force                 train even if another run writes to the folders; the next checkpoint of that run then fails
    """
    from evenpipe.processes.environment import allocator_variables

    os.environ.update(allocator_variables())  # before torch is imported
    from evenpipe.train.config_file import load_config

    settings = load_config(config, overrides or [])
    if trace is not None:
        steps = settings.output.trace_steps or (min(TRACED_STEP, settings.training.steps or TRACED_STEP),)
        folder = trace or settings.output.trace_folder
        settings = replace(settings, output=replace(settings.output, trace_steps=steps, trace_folder=folder))

    from evenpipe.train.start import run_training

    run_training(settings, force=force)
    return 0
