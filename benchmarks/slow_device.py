"""A run that arranges its order by what passes take, on a device that is slower than the other.

    python benchmarks/slow_device.py [--slower 150] [--device 0] [--output FILE.json]

Two processes train. After the first step every pass of one device computes on, until it has taken as much longer as
asked for: the order of the start was arranged for equal devices. After steps 3 to 6 the run takes another order
(`evenpipe.train.arrangement`). Then steps of both take turns. Printed are, for each schedule and vocabulary mode, the
median seconds of a step (until the last device has run its passes) in the order of the start and in the new one, and
the bound: as a solver proves, no order of these passes that keeps no more microbatches in flight is shorter.
"recovered" is the part of the difference to the bound that the new order saves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
from common import configuration, option

from evenpipe import Callback, run_training
from evenpipe.costs import costs_of
from evenpipe.recipe.layout import Layout
from evenpipe.schedule import Kind
from evenpipe.schedule.passes import STAGE_KINDS, VOCABULARY_KINDS
from evenpipe.schedule.trace_file import read_trace
from evenpipe.search.optimal_order import OrderProblem, solve
from evenpipe.simulate import best_bound, simulate
from evenpipe.train.callbacks import TrainingState
from evenpipe.train.run_sections import OutputConfig, TrainingConfig

CASES = (("zb-h1", "vocab-1"), ("zb-h1", "vocab-2"), ("1f1b", "vocab-2"), ("interleaved", "interlaced"))
ARRANGED = 6
"""Step after which the run may take another order."""


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    vocabulary: int = option(9216, "rows of embedding and output layer: it costs as much as three layers")
    tokens: int = option(256, "of a microbatch, which is one sequence")
    microbatches: int = option(2, "of a step; 4 with interleaved")
    slower: int = option(150, "percent of the time of a pass on the other device")
    device: int = option(0, "that is slower")
    steps: int = option(24, "in each of both orders")
    search: int = option(60, "seconds that the solver may look for a bound")


class SlowDevice(Callback):
    """Slows a device, and changes between the orders of the start and of the run after every step."""

    def __init__(self, device: int, slower: float) -> None:
        self.device, self.slower = device, slower
        self.layouts: list[Layout] = []

    def on_step_end(self, state: TrainingState) -> None:
        pipeline = state.pipeline
        if state.step == 1:
            self.layouts.append(pipeline.layout)
            if pipeline.device == self.device:
                self._slow(pipeline._executor.walker._pass_handlers)
                pipeline._executor.walker._rows.clear()
        if state.step == ARRANGED:
            self.layouts.append(pipeline.layout)
        if state.step >= ARRANGED:
            pipeline.layout = self.layouts[state.step % 2]

    def _slow(self, handlers: dict[Any, Callable[..., None]]) -> None:
        # By the time that this thread computes: handlers also wait for what a pass needs.
        def slowed(handler: Callable[..., None]) -> Callable[..., None]:
            def run(item: Any) -> None:
                started = time.thread_time()
                handler(item)
                until = started + self.slower * (time.thread_time() - started)
                while time.thread_time() < until:
                    pass

            return run

        for kind in {*STAGE_KINDS, *VOCABULARY_KINDS} & handlers.keys():
            handlers[kind] = slowed(handlers[kind])


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing is printed, neither here nor by processes that are started."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def run_case(settings: Settings, schedule: str, mode: str) -> dict[str, Any]:
    last = ARRANGED + 2 + 2 * settings.steps
    recorded = range(ARRANGED + 3, last + 1)  # the first step in each of both orders does not count
    size = max(settings.microbatches, 4 if schedule == "interleaved" else 0)
    with tempfile.TemporaryDirectory() as folder:
        run = replace(
            configuration(settings, settings.vocabulary, schedule=schedule, vocabulary=mode, microbatches=size),
            training=TrainingConfig(steps=last, evaluation_batches=1),
            output=OutputConfig(folder=folder, trace_steps=tuple(recorded), export=False, log_every_steps=last),
        )
        with silent():
            run_training(run, callbacks=[SlowDevice(settings.device, settings.slower / 100)])
        traces = {step: read_trace(run.trace_folder / f"step-{step:08d}.json") for step in recorded}
    by_order = [[trace for step, trace in traces.items() if step % 2 == place] for place in (1, 0)]
    costs = costs_of([trace for of_order in by_order for trace in of_order])
    measured, predicted = zip(
        *(
            (
                statistics.median(trace.timeline().makespan for trace in of_order),
                simulate(of_order[0].program, costs).makespan,
            )
            for of_order in by_order
        ),
        strict=True,
    )
    order, arranged = (of_order[0].program.order for of_order in by_order)
    split = any(item.kind is Kind.I for item in order.passes(0))
    problem = OrderProblem(
        placement=order.placement,
        microbatches=size,
        costs=costs,
        vocabulary=order.vocabulary,
        split_backward=split,
        max_in_flight=tuple(max(1, held) for held in by_order[0][0].timeline().peak_in_flight),
        objective="makespan",
    )
    known = best_bound(order.placement, size, costs, split=split, vocabulary=order.vocabulary).value
    bound = solve(problem, hint=order, bound=known, seconds=settings.search).bound
    return {
        "schedule": schedule,
        "vocabulary": mode,
        "microbatches": size,
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "bound_seconds": bound,
        "taken": order != arranged,
        "recovered": (measured[0] - measured[1]) / (measured[0] - bound) if order != arranged else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output)
    print(f"{'schedule':<13}{'vocabulary':<12}{'m':>2}{'start':>10}{'arranged':>10}{'bound':>10}{'recovered':>11}")
    for schedule, mode in CASES:
        found = run_case(settings, schedule, mode)
        results.add(found)
        recovered = f"{100 * found['recovered']:.0f} %" if found["taken"] else "kept"
        start, arranged = (f"{seconds:.3f} s" for seconds in found["measured_seconds"])
        print(
            f"{schedule:<13}{mode:<12}{found['microbatches']:>2}{start:>10}{arranged:>10}"
            f"{found['bound_seconds']:>8.3f} s{recovered:>11}",
            flush=True,
        )
        before, after = (f"{seconds:.3f} s" for seconds in found["predicted_seconds"])
        print(f"{'   predicted':<27}{before:>10}{after:>10}", flush=True)


if __name__ == "__main__":
    main()
