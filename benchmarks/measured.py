"""Does a step take as long as was predicted, on this machine?

    python benchmarks/measured.py [--microbatches 1 2 4 8 16] [--rounds 2] [--output FILE.json]

For every schedule and vocabulary mode the costs are measured as `evenpipe profile` measures them, at one number of
microbatches; steps of every number of microbatches run in turn, traced, and each is compared with the simulation of the
program that it ran. The last cases are an order made bad on purpose: C stands right behind S, so that every device
waits for the statistics at once. A machine that others share changes its speed from one minute to the next: so the
processes of a case measure costs and run steps in rounds of a minute or two. Printed are medians:

    step        seconds from the first start of a pass to the last end of one, measured and predicted
    error       of the prediction, in percent of the measured step
    idle        seconds that each device waits, measured (from its waits) and predicted
    error       the largest difference of any device, in percent of the measured step
    untraced    seconds of the first process for a step that is not traced, and for one that is

Everything runs on the CPU, one thread per process. With more processes than cores, such as two devices of two tensor
ranks on two cores, the factor for contention stands for what they take from each other:

    python benchmarks/measured.py --processes 4 --tensor-ranks 2 --microbatches 2 8 --schedules 1f1b --no-bad-order
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
from common import configuration, option

from evenpipe import Pipeline, initialise_worker, launch
from evenpipe.compare.measured import compare
from evenpipe.schedule import Costs, Kind, Order, Pass, plan_order
from evenpipe.schedule.trace_file import trace_from_dict, trace_to_dict
from evenpipe.train.build import build_pipeline
from evenpipe.train.config import Config
from evenpipe.train.profile import measure_pipeline, profile_of, token_ids

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half")
MODES = ("first-last", "vocab-2")
BAD = "C right behind S"


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    processes: int = option(2, "devices of the pipeline times tensor ranks")
    tensor_ranks: int = option(1, "processes of each device")
    hidden_size: int = option(512, "of the model; heads have 64")
    vocabulary: int = option(8192, "rows of embedding and output layer")
    profiled_microbatches: int = option(8, "of the steps that costs are taken from")
    profiled_steps: int = option(3, "that costs are taken from, for every form of backward, in each round")
    profiled_warm_up: int = option(2, "steps of every form that do not count: they find memory new to them")
    repetitions: int = option(3, "measured steps of every number of microbatches, in each round")
    warm_up: int = option(1, "steps of each round that do not count")
    rounds: int = option(2, "of costs and steps")


def bad_order(devices: int, microbatches: int, costs: Costs) -> Order:
    """1F1B with vocab-2 whose C(i) stands right behind S(i)."""
    order = plan_order("1f1b", devices, microbatches, "vocab-2", costs)
    rows = []
    for device in range(devices):
        row: list[Pass] = []
        for item in order.passes(device):
            if item.kind is not Kind.C:
                row.append(item)
            if item.kind is Kind.S:
                row.append(Pass(Kind.C, None, item.microbatch))
        rows.append(tuple(row))
    return replace(order, rows=tuple(rows))


def measure(settings: Settings, schedule: str, mode: str, sizes: list[int]) -> dict[str, Any]:
    """On every process: costs, and steps of all sizes in turn. The first process returns what it traced."""
    device = initialise_worker().torch_device
    name = "1f1b" if schedule == BAD else schedule

    def arm(microbatches: int, **changes: Any) -> tuple[Config, Pipeline]:
        config = configuration(
            settings,
            settings.vocabulary,
            tp=settings.tensor_ranks,
            schedule=name,
            vocabulary=mode,
            microbatches=microbatches,
        )
        return config, build_pipeline(
            config, settings.vocabulary, 0, device, self_check=False, recipe=replace(config.recipe(), **changes)
        )

    profiled, pipeline = arm(settings.profiled_microbatches)
    arms = []
    for size in sizes:
        own = {"schedule": bad_order(pipeline.devices, size, pipeline.layout.costs)} if schedule == BAD else {}
        arms.append(arm(size, **own)[1])
    gc.collect()
    gc.freeze()
    profiles: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = [{"traces": [], "untraced": [], "traced": []} for _ in arms]
    for _ in range(settings.rounds):
        profiles.append(measure_pipeline(pipeline, profiled, settings.profiled_steps, settings.profiled_warm_up))
        for repetition in range(settings.warm_up + settings.repetitions):
            for one, figures in zip(arms, steps, strict=True):
                ids = token_ids(one.microbatches, settings.tokens, settings.vocabulary, repetition)
                for traced in (False, True):
                    result = one.step(ids, record_passes=traced)
                    one.zero_grad()
                    if repetition < settings.warm_up:
                        continue
                    figures["traced" if traced else "untraced"].append(result.record.end - result.record.start)
                    trace = one.trace(result) if traced else None
                    if trace is not None:
                        figures["traces"].append(trace_to_dict(trace))
    return {"profiles": profiles, "steps": steps}


def run_case(settings: Settings, schedule: str, mode: str, sizes: list[int]) -> list[dict[str, Any]]:
    found = launch(measure, settings, schedule, mode, sizes, processes=settings.processes, torch_device="cpu")[0]
    costs = profile_of(found["profiles"]).costs
    return [compared(schedule, mode, size, figures, costs) for size, figures in zip(sizes, found["steps"], strict=True)]


def compared(schedule: str, mode: str, microbatches: int, figures: dict[str, Any], costs: Costs) -> dict[str, Any]:
    """Medians of the steps beside what `costs` predict."""
    found = [compare(trace_from_dict(trace), costs).to_dict() for trace in figures["traces"]]
    step = statistics.median(one["measured"] for one in found)
    idle = [statistics.median(waits) for waits in zip(*(one["measured_waiting"] for one in found), strict=True)]
    predicted, predicted_idle = found[0]["predicted"], found[0]["predicted_waiting"]
    return {
        "schedule": schedule,
        "vocabulary": mode,
        "microbatches": microbatches,
        "step_seconds": step,
        "predicted_seconds": predicted,
        "step_error": predicted / step - 1,
        "idle_seconds": idle,
        "predicted_idle_seconds": predicted_idle,
        "idle_error": max(((p - m) / step for p, m in zip(predicted_idle, idle, strict=True)), key=abs),
        "steps": [one["measured"] for one in found],
        "untraced_seconds": statistics.median(figures["untraced"]),
        "traced_seconds": statistics.median(figures["traced"]),
        "costs": costs.to_dict(),
    }


NAMES = ("step s", "predicted", "error", "idle s", "predicted", "error", "untraced", "traced")
HEADER = "{:<17}{:<12}{:>3}{:>9}{:>10}{:>9}{:>15}{:>15}{:>9}{:>9}{:>8}".format("schedule", "vocabulary", "m", *NAMES)


def print_case(result: dict[str, Any]) -> None:
    idle = " ".join(f"{seconds:.3f}" for seconds in result["idle_seconds"])
    predicted = " ".join(f"{seconds:.3f}" for seconds in result["predicted_idle_seconds"])
    print(
        f"{result['schedule']:<17}{result['vocabulary']:<12}{result['microbatches']:>3}"
        f"{result['step_seconds']:>9.3f}{result['predicted_seconds']:>10.3f}{100 * result['step_error']:>7.1f} %"
        f"{idle:>15}{predicted:>15}{100 * result['idle_error']:>7.1f} %"
        f"{result['untraced_seconds']:>9.3f}{result['traced_seconds']:>8.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--no-bad-order", action="store_true", help="leave out the order made bad on purpose")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    cases = [(schedule, mode) for schedule in given.schedules for mode in given.modes]
    if not given.no_bad_order:
        cases.append((BAD, "vocab-2"))
    results = common.Results(settings, given.output)
    print(HEADER)
    for schedule, mode in cases:
        for result in run_case(settings, schedule, mode, given.microbatches):
            results.add(result)
            print_case(result)
    for name in ("step_error", "idle_error"):
        print(f"largest {name.replace('_', ' ')}: {100 * max(abs(one[name]) for one in results.cases):.1f} %")


if __name__ == "__main__":
    main()
