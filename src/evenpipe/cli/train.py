"""`evenpipe train CONFIG.toml [section.key=value ...]`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration and what overrides it; the help lists every field."""
    from evenpipe.train.config_help import configuration_help

    parser.add_argument("config", metavar="CONFIG.toml", help="the configuration")
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="replaces a value of the configuration"
    )
    parser.epilog = "fields of the configuration:\n\n" + configuration_help()


def run(arguments: argparse.Namespace) -> int:
    """Train; started again with the same configuration it goes on from the last checkpoint."""
    from evenpipe.train.config_file import load_config

    config = load_config(arguments.config, arguments.overrides)

    from evenpipe.train.start import start

    start(config)
    return 0
