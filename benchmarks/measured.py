"""Does a step take as long as was predicted, on this machine?

    python benchmarks/measured.py [--microbatches 1 2 4 8 16] [--rounds 3] [--output FILE.json]

For every schedule and vocabulary mode `evenpipe profile` measures the costs, at one number of microbatches; then steps
of every number of microbatches run in turn, traced, and each is compared with the simulation of the program that it
ran. The last cases are an order made bad on purpose: C stands right behind S, so that every device waits for the
statistics at once. A machine that others share changes its speed from one minute to the next, between a profile and
the steps too: so there are several rounds over all cases, each with profiles of its own. Printed are medians of the
steps of a round, and at the end the medians of all rounds:

    step        seconds from the first start of a pass to the last end of one, measured and predicted
    error       of the prediction, in percent of the measured step
    idle        seconds that each device waits, measured (from its waits) and predicted
    error       the largest difference of any device, in percent of the measured step
    untraced    seconds of the first process for a step that is not traced, and for one that is

Everything runs on the CPU, one thread per process.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
from common import llama, option, token_ids

from evenpipe.plan.measured import compare
from evenpipe.runtime import initialise_worker, launch
from evenpipe.schedule import Costs, Kind, Order, Pass, plan_order
from evenpipe.schedule.trace_file import trace_from_dict, trace_to_dict
from evenpipe.train.build import build_pipeline
from evenpipe.train.config import Config, DataConfig, ModelConfig, PipelineConfig, TokenizerConfig
from evenpipe.train.profile import profile

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half")
MODES = ("first-last", "vocab-2")
BAD = "C right behind S"


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    hidden_size: int = option(512, "of the model; heads have 64")
    vocabulary: int = option(8192, "rows of embedding and output layer")
    profiled_microbatches: int = option(8, "of the steps that costs are taken from")
    profiled_steps: int = option(4, "that costs are taken from, for every form of backward")
    repetitions: int = option(4, "measured steps of every number of microbatches, in each round")
    warm_up: int = option(1, "steps that do not count")
    rounds: int = option(3, "over all cases")


def configuration(settings: Settings, schedule: str, mode: str, microbatches: int) -> Config:
    model = llama(settings, settings.vocabulary).to_diff_dict()
    del model["model_type"]
    return Config(
        model=ModelConfig(architecture="llama", config=model, self_check=False),
        data=DataConfig(corpus="python-standard-library", sequence_length=settings.tokens),  # of which nothing is read
        tokenizer=TokenizerConfig(vocabulary_size=settings.vocabulary),
        pipeline=PipelineConfig(
            processes=settings.processes, schedule=schedule, vocabulary=mode, microbatches=microbatches
        ),
    )


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


def measure(settings: Settings, schedule: str, mode: str, sizes: list[int], costs: Costs) -> list[dict[str, Any]]:
    """On every process: steps of all sizes in turn. The first process returns traces and seconds, by size."""
    device = initialise_worker().torch_device
    arms = []
    for size in sizes:
        name = "1f1b" if schedule == BAD else schedule
        own = {"schedule": bad_order(settings.processes, size, costs)} if schedule == BAD else {}
        config = configuration(settings, name, mode, size)
        arms.append(build_pipeline(config, settings.vocabulary, 0, device, self_check=False, costs=costs, **own))
    found: list[dict[str, Any]] = [{"traces": [], "untraced": [], "traced": []} for _ in arms]
    for repetition in range(settings.warm_up + settings.repetitions):
        for size, pipeline, figures in zip(sizes, arms, found, strict=True):
            ids = token_ids(settings, settings.vocabulary, size, repetition)
            for traced in (False, True):
                result = pipeline.step(ids, record_passes=traced)
                pipeline.zero_grad()
                if repetition < settings.warm_up:
                    continue
                figures["traced" if traced else "untraced"].append(result.record.end - result.record.start)
                trace = pipeline.trace(result) if traced else None
                if trace is not None:
                    figures["traces"].append(trace_to_dict(trace))
    return found


def run_case(settings: Settings, schedule: str, mode: str, sizes: list[int]) -> list[dict[str, Any]]:
    name = "1f1b" if schedule == BAD else schedule
    config = configuration(settings, name, mode, settings.profiled_microbatches)
    costs = profile(config, steps=settings.profiled_steps).costs
    measured = launch(measure, settings, schedule, mode, sizes, costs, processes=settings.processes, torch_device="cpu")
    results = []
    for size, figures in zip(sizes, measured[0], strict=True):
        found = [compare(trace_from_dict(trace), costs).to_dict() for trace in figures["traces"]]
        devices = range(settings.processes)
        step = statistics.median(one["measured"] for one in found)
        idle = [statistics.median(one["measured_waiting"][device] for one in found) for device in devices]
        predicted, predicted_idle = found[0]["predicted"], found[0]["predicted_waiting"]
        results.append(
            {
                "schedule": schedule,
                "vocabulary": mode,
                "microbatches": size,
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
        )
    return results


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
    parser.add_argument("--profile-each", action="store_true", help="a profile for every number of microbatches")
    parser.add_argument("--no-bad-order", action="store_true", help="leave out the order made bad on purpose")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    cases = [(schedule, mode) for schedule in given.schedules for mode in given.modes]
    if not given.no_bad_order:
        cases.append((BAD, "vocab-2"))
    results = common.Results(settings, given.output)
    groups = [[size] for size in given.microbatches] if given.profile_each else [given.microbatches]
    for number in range(settings.rounds):
        print(f"\nround {number + 1}\n{HEADER}")
        for (schedule, mode), sizes in product(cases, groups):
            profiled = sizes[0] if given.profile_each else settings.profiled_microbatches
            for result in run_case(replace(settings, profiled_microbatches=profiled), schedule, mode, sizes):
                results.add(result | {"round": number + 1})
                print_case(result)
    print(f"\nmedians of {settings.rounds} rounds\n{HEADER}")
    medians = [median_case(found) for found in by_case(results.cases)]
    for result in medians:
        print_case(result)
    for name in ("step_error", "idle_error"):
        print(f"largest {name.replace('_', ' ')}: {100 * max(abs(one[name]) for one in medians):.1f} %")


def by_case(results: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results of all rounds, case by case."""
    cases: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for one in results:
        cases.setdefault((one["schedule"], one["vocabulary"], one["microbatches"]), []).append(one)
    return list(cases.values())


def median_case(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of every figure over the rounds of one case; of errors, those of each round's own prediction."""

    def median(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [statistics.median(column) for column in zip(*values, strict=True)]
        return statistics.median(values)

    return {
        name: value if isinstance(value, (str, int)) else median([one[name] for one in found])
        for name, value in found[0].items()
        if name not in ("costs", "steps", "round")
    }


if __name__ == "__main__":
    main()
