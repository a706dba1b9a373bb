"""The model and the hardware that a command is about."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from evenpipe.errors import InputError
from evenpipe.given import plain, shown

if TYPE_CHECKING:
    from evenpipe.model import Description


MOST_GPUS = 100_000
"""With so many there are already thousands of ways to arrange them."""


def check_gpus(number: int) -> None:
    """Raise InputError for a number of GPUs that nobody can plan for."""
    if not 1 <= number <= MOST_GPUS:
        raise InputError(f"--gpus is {shown(number)}, expected a whole number of at least 1, at most {MOST_GPUS}")


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """`--hardware` and `--gpu-memory`."""
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE.toml",
        default="H100-80G",
        help="A100-40G, A100-80G, H100-80G, H200, B200, or what `evenpipe profile --hardware` wrote (default:"
        " %(default)s)",
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of each, such as 80GiB (default: that of the hardware)")


def read_model(text: str) -> Description:
    """The model that `--model` names, without its weights. Raises InputError for what is no causal language model."""
    from evenpipe.model import describe

    if Path(text).suffix == ".json" and not Path(text).is_file():
        raise InputError(f"the model is '{plain(text)}', but there is no such file")
    return describe(text)
