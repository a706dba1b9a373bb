"""`evenpipe explain MODEL --gpus N ...`."""

from __future__ import annotations

import argparse

from evenpipe.cli.model_argument import add_hardware, add_kernels, check_gpus, read_model
from evenpipe.cli.printing import progress_line, say, say_json
from evenpipe.cli.schedule_arguments import add_json
from evenpipe.cli.values import memory
from evenpipe.errors import InputError

SEQUENCE = 4096
SEQUENCES_PER_GPU = 8
"""Default batch: enough microbatches for a pipeline of all GPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the machine and the output."""
    parser.add_argument("model", metavar="MODEL", help="hub name, folder or config.json")
    add_hardware(parser)
    parser.add_argument(
        "--sequence", metavar="TOKENS", type=int, help=f"length of a sequence (default: {SEQUENCE}, or the longest)"
    )
    parser.add_argument(
        "--batch", metavar="SEQUENCES", type=int, help=f"per step over all GPUs (default: {SEQUENCES_PER_GPU} per GPU)"
    )
    parser.add_argument(
        "--pp", metavar="P", type=int, help="devices of the pipeline, at least 2 (default: the best from 4 on)"
    )
    parser.add_argument("--tp", metavar="T", type=int, help="tensor parallelism (default: the best)")
    add_kernels(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the picture as a page (.html), .svg, .png or .json instead of printing it",
    )
    add_json(parser)
    parser.epilog = (
        "Needs no GPU and no weights: times are computed from the shapes of the model and the speed of the\n"
        "hardware, memory as by `evenpipe estimate`.\n\nexit codes: 0 done, 2 the input is wrong"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print figures, one picture, and the next commands."""
    check_gpus(arguments.gpus)
    for name in ("sequence", "batch", "pp", "tp"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} is {value}, expected a whole number of at least 1")

    from evenpipe.schedule.collection import collecting_rarely

    with collecting_rarely():
        from evenpipe.costs.hardware import find_hardware
        from evenpipe.draw import check_file, draw, terminal
        from evenpipe.plan.explanation import explain
        from evenpipe.plan.problem import problem_of

    if arguments.output is not None:
        check_file(arguments.output)
    hardware = find_hardware(arguments.hardware)
    description = read_model(arguments.model)
    longest = description.maximum_length or SEQUENCE
    problem = problem_of(
        description,
        hardware,
        gpus=arguments.gpus,
        sequence=arguments.sequence or min(SEQUENCE, longest),
        sequences_per_step=arguments.batch or SEQUENCES_PER_GPU * arguments.gpus,
        memory_bytes=memory(arguments),
        dtype="fp32" if hardware.torch_device == "cpu" else "bf16",
        kernels=arguments.kernels,
    )
    with progress_line() as show:
        found = explain(problem, arguments.model, pp=arguments.pp, tp=arguments.tp, progress=show)
    if arguments.output is not None:
        draw(found.timelines(), arguments.output, title=f"{arguments.model}: one step", unit_seconds=1.0)
    if arguments.json:
        say_json(found.to_dict())
        return 0
    say(f"{found.text()}\n")
    if arguments.output is None:
        print(terminal(found.timelines(), unit_seconds=1.0, overview=True))
    else:
        say(f"wrote {arguments.output}\n")
    say("\n".join(["Next commands", *(f"  {command}" for command in found.commands())]))
    return 0
