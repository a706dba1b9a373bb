"""Arguments for the model and the hardware."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evenpipe.errors import InputError
from evenpipe.given import plain, shown

if TYPE_CHECKING:
    from evenpipe.model import Description


MOST_GPUS = 100_000
"""Largest accepted number of GPUs; this many can already be arranged in thousands of ways."""


def check_gpus(number: int) -> None:
    """Raise InputError for a number of GPUs below 1 or above MOST_GPUS."""
    if not 1 <= number <= MOST_GPUS:
        raise InputError(f"--gpus is {shown(number)}, expected a whole number of at least 1, at most {MOST_GPUS}")


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add `--gpus`, for `check_gpus`, `--hardware` and `--gpu-memory`."""
    parser.add_argument("--gpus", metavar="N", type=int, required=True, help="number of GPUs")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE.toml",
        default="H100-80G",
        help="A100-40G, A100-80G, H100-80G, H200, B200, or a file of `evenpipe profile --hardware` (default:"
        " %(default)s)",
    )
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="memory of each GPU, such as 80GiB (default: that of the hardware)"
    )


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add `--kernels`."""
    parser.add_argument(
        "--kernels",
        default="transformers",
        help="transformers, fused, megatron or transformer-engine (default: %(default)s)",
    )


def add_skew(parser: argparse._ActionsContainer) -> None:
    """Add `--skew`."""
    parser.add_argument(
        "--skew",
        metavar="S",
        type=float,
        default=1.0,
        help="with ep, what the fullest of the replicas that share experts gets over the mean: 1 if routers choose"
        " evenly (default), up to 2 early in a training",
    )


def read_model(text: str) -> Description:
    """The model of `--model` without weights, and without the quantisation of a source that has one. Raises
    InputError if it is not a causal language model."""
    from evenpipe.model import describe
    from evenpipe.model.config import read_config

    if Path(text).suffix == ".json" and not Path(text).is_file():
        raise InputError(f"the model is '{plain(text)}', but there is no such file")
    config = read_config(text)
    if not getattr(config, "quantization_config", None):
        return describe(text)
    del config.quantization_config
    note = "the weights of this model are quantised, and are taken as if they were not: those cannot be trained"
    print(f"evenpipe: {note}", file=sys.stderr)
    return describe(config)
