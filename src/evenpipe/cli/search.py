"""`evenpipe search --devices P --microbatches M ...`."""

from __future__ import annotations

import argparse
from pathlib import Path

from evenpipe.cli.printing import say, say_json
from evenpipe.cli.schedule_arguments import add_costs, add_json, add_memory_limit, add_size, costs, refuse_too_large
from evenpipe.cli.values import check_output, numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the search problem, its limits, and the output."""
    add_size(parser, required=True)
    parser.add_argument("--stages-per-device", metavar="V", type=int, help="1 is linear, more are looped (default: 1)")
    parser.add_argument(
        "--placement", metavar="WHICH", help="linear, looped, v, or the device of each stage such as 0,1,1,0"
    )
    parser.add_argument("--split-backward", action="store_true", help="I and W instead of B")
    parser.add_argument(
        "--vocabulary",
        metavar="MODE",
        default="first-last",
        help="first-last, vocab-1 or vocab-2 (default: %(default)s)",
    )
    add_costs(parser, "default: equal times")
    add_memory_limit(parser, "most stage activations that a device may hold: one number, or one per device")
    parser.add_argument(
        "--objective",
        choices=("span", "makespan"),
        default="span",
        help="minimise the longest time of any device, or the whole step (default: %(default)s)",
    )
    parser.add_argument("--seconds", metavar="N", type=float, default=30.0, help="at most (default: %(default)g)")
    parser.add_argument("--workers", metavar="N", type=int, default=1, help="threads (default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the solver (default: %(default)s)")
    parser.add_argument("-o", "--output", metavar="FILE.csv", type=Path, help="write the order")
    add_json(parser)
    parser.epilog = (
        "Starts from the best named schedule and searches for a shorter order with OR-tools (pip install\n"
        "'evenpipe[search]') until it proves that there is none, or reaches the time limit. For small cases: some\n"
        "hundred passes. A search that ends before its time limit gives the same order every time.\n\n"
        "exit codes: 0 an order, 1 no order fits the memory limit, 2 the input is wrong"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, print the result and write the order."""
    from evenpipe.plan.search import order_problem_of, search
    from evenpipe.schedule.files import write_schedule

    if arguments.output is not None:
        check_output(arguments.output, ".csv", "a schedule's file")
    refuse_too_large(arguments)
    problem = order_problem_of(
        devices=arguments.devices,
        microbatches=arguments.microbatches,
        stages_per_device=arguments.stages_per_device,
        placement=arguments.placement,
        split_backward=arguments.split_backward,
        vocabulary=arguments.vocabulary,
        costs=costs(arguments),
        memory_limit=numbers("memory-limit", arguments.memory_limit),
        objective=arguments.objective,
    )
    result = search(problem, seconds=arguments.seconds, workers=arguments.workers, seed=arguments.seed)
    if result is not None and arguments.output is not None:
        write_schedule(result.order, arguments.output)
    if arguments.json:
        say_json({"possible": False} if result is None else {"possible": True, **result.to_dict()})
    else:
        say("no order fits the memory limit" if result is None else result.text())
    return int(result is None)
