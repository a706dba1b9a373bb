"""`evenpipe search --devices P --microbatches M ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from evenpipe.cli.declarations import Count
from evenpipe.cli.options import BALANCED, check_output, check_positive, limits, read_costs, refuse_too_large
from evenpipe.cli.printing import say, say_json


def run(
    *,
    devices: Count,
    microbatches: Count,
    stages_per_device: Count | None = None,
    placement: str | None = None,
    split_backward: bool = False,
    vocabulary: str = BALANCED,
    costs: str | None = None,
    max_in_flight: str | None = None,
    objective: Literal["span", "makespan"] = "span",
    seconds: float = 30.0,
    workers: Count = 1,
    seed: int = 0,
    output: Path | None = None,
    json_: bool = False,
) -> int:
    """Search, print the result and write the order.

    --devices P            devices of the pipeline
    --microbatches M       microbatches of the step
    --stages-per-device V  1 is linear, more are looped; default: 1
    --placement WHICH      linear, looped, v, or the device of each stage such as 0,1,1,0
    --split-backward       I and W instead of B
    --vocabulary MODE      first-last, vocab-1, vocab-2 or balanced (= vocab-2)
    --objective            minimise the longest time of any device, or the whole step
    --seconds N            at most
    --workers N            threads
    --seed N               of the solver
    -o, --output FILE.csv  write the order

    Starts from the best named schedule and searches for a shorter order with OR-tools (pip install 'evenpipe[search]')
    until it proves that there is none, or reaches the time limit. For small cases: some hundred passes. A search that
    ends before its time limit gives the same order every time.

    exit codes: 0 an order, 1 no order fits the memory limit, 2 the input is wrong
    """
    from evenpipe.schedule.files import write_schedule
    from evenpipe.search.search import order_problem_of, search

    check_output(output, ".csv")
    refuse_too_large(devices, microbatches, stages_per_device)
    check_positive("--seconds", seconds)
    problem = order_problem_of(
        devices=devices,
        microbatches=microbatches,
        stages_per_device=stages_per_device,
        placement=placement,
        split_backward=split_backward,
        vocabulary=vocabulary,
        costs=read_costs(costs),
        max_in_flight=limits("max_in_flight", max_in_flight),
        objective=objective,
    )
    result = search(problem, seconds=seconds, workers=workers, seed=seed)
    if result is not None and output is not None:
        write_schedule(result.order, output)
    if json_:
        say_json({"possible": False} if result is None else {"possible": True, **result.to_dict()})
    else:
        say("no order fits the memory limit" if result is None else result.text())
    return int(result is None)
