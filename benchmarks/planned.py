"""Are plans as fast, one beside the other, as the planner says?

    python benchmarks/planned.py [--tokens 256] [--turns 4] [--output FILE.json]

`evenpipe profile --hardware` measures this machine, and for each of some choices the planner's best plan for two
processes is taken. Then, in turns, passes are measured, as `evenpipe profile CONFIG.toml --hardware` does, and some
steps of each plan run, the same data for all: a machine that others share changes its speed from one minute to the
next. Printed are medians and the planner's times, and the pairs of plans whose predicted times differ by more than 5 %
and that are measured the other way round.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import torch.distributed as dist
from common import configuration, llama, option, token_ids

from evenpipe import Pipeline, initialise_worker, launch
from evenpipe.model import describe
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.evaluation import timed
from evenpipe.plan.problem import problem_of
from evenpipe.plan.space import Space
from evenpipe.train.build import build_pipeline
from evenpipe.train.config import Config
from evenpipe.train.hardware_profile import (
    MEASURED_AS,
    MICROBATCH_SIZES,
    passes_from,
    pipelines_to_measure,
    profile_hardware,
)
from evenpipe.train.profile import measure_pipeline, profile_of

ONE: dict[str, Any] = {"tp": (1,), "cp": (1,), "zero": (0,), "pp": (2,)}
CHOICES = {
    "balanced": Space(**ONE, schedules=("1f1b",), vocabularies=("vocab-2",), microbatch_sizes=(1,)),
    "first-last": Space(**ONE, schedules=("1f1b",), vocabularies=("first-last",), microbatch_sizes=(1,)),
    "redistribute": Space(**ONE, schedules=("1f1b",), vocabularies=("redistribute",), microbatch_sizes=(1,)),
    "recomputed": Space(
        **ONE, schedules=("1f1b",), vocabularies=("first-last",), microbatch_sizes=(1,), checkpointing=("full",)
    ),
    "zero bubble": Space(**ONE, schedules=("zb-h1",), vocabularies=("vocab-2",), microbatch_sizes=(1,)),
    "two stages": Space(**ONE, schedules=("zbv",), vocabularies=("vocab-2",), microbatch_sizes=(1,)),
    "large microbatches": Space(**ONE, schedules=("1f1b",), vocabularies=("vocab-2",), microbatch_sizes=(4,)),
}
"""Name -> what the search may choose: one plan each."""
APART = 0.05
"""Plans whose predicted times differ by more must be measured in the same order."""


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    tokens: int = option(256, "of a sequence")
    vocabulary: int = option(16384, "rows of embedding and output layer")
    sequences: int = option(8, "of a step")
    turns: int = option(4, "of passes and of all plans, one after the other")
    profiled_steps: int = option(2, "that passes are taken from, for every form of backward, in each turn")
    profiled_warm_up: int = option(2, "steps of every form that do not count")
    repetitions: int = option(3, "measured steps of a plan in each turn")
    warm_up: int = option(1, "steps of a turn that do not count: memory that another plan gave back is new to them")


def measure(settings: Settings, plans: dict[str, Configuration]) -> dict[str, Any]:
    """On every process: passes, and seconds of the steps of all plans, in turn."""
    device = initialise_worker().torch_device
    measured = []
    found: dict[int, dict[str, tuple[Config, list[dict[str, Any]]]]] = {}
    for size in MICROBATCH_SIZES:
        pipelines = pipelines_to_measure(configuration(settings, settings.vocabulary), settings.processes, size)
        found[size] = {name: (one, []) for name, one in pipelines.items()}
        for name, one in pipelines.items():
            pipeline = build_pipeline(one, settings.vocabulary, 0, device, self_check=False)
            measured.append((name, one, pipeline, found[size][name][1]))
    config = llama(settings, settings.vocabulary)
    arms = {name: Pipeline(config, recipe=plan.recipe, self_check=False) for name, plan in plans.items()}
    ids = token_ids(settings, settings.vocabulary, settings.sequences)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    gc.collect()
    gc.freeze()
    for _ in range(settings.turns):
        for name, one, pipeline, profiles in measured:
            steps = settings.profiled_steps, settings.profiled_warm_up
            profiles.append(measure_pipeline(pipeline, one, *steps, MEASURED_AS[name]))
        for name, arm in arms.items():
            for step in range(settings.warm_up + settings.repetitions):
                arm.zero_grad()
                dist.barrier()
                started = time.perf_counter()
                arm.step(ids)
                dist.barrier()
                if step >= settings.warm_up:
                    seconds[name].append(time.perf_counter() - started)
    return {"seconds": seconds, "profiles": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    hardware = profile_hardware(settings.processes)
    results = common.Results(settings, given.output, hardware=hardware.to_dict())
    problem = problem_of(
        describe(llama(settings, settings.vocabulary)),
        hardware,
        gpus=settings.processes,
        sequence=settings.tokens,
        sequences_per_step=settings.sequences,
        dtype="fp32",
    )
    plans = {}
    for name, space in CHOICES.items():
        found = search_configurations(problem, space, wanted=1, workers=1)
        assert found.best is not None, f"{name}: nothing fits"
        plans[name] = found.best
    configurations = {name: plan.configuration for name, plan in plans.items()}
    measured = launch(measure, settings, configurations, processes=settings.processes, torch_device="cpu")
    passes = [
        passes_from({name: profile_of(profiles) for name, (_, profiles) in found.items()}, found["sharded"][0], "cpu")
        for found in measured[0]["profiles"].values()
    ]
    problem = replace(problem, hardware=replace(hardware, passes=tuple(passes)), known={})
    print(f"{'plan':<20}{'predicted':>11}{'measured':>10}{'error':>9}")
    for name, plan in plans.items():
        steps = [max(step) for step in zip(*(one["seconds"][name] for one in measured), strict=True)]
        seconds = statistics.median(steps)
        predicted = timed(problem, plan.configuration).pipeline_seconds
        results.add(
            {
                "plan": name,
                "configuration": plan.configuration.name,
                "predicted_seconds": predicted,
                "step_seconds": seconds,
                "steps": steps,
            }
        )
        error = predicted / seconds - 1
        print(f"{name:<20}{predicted:>9.3f} s{seconds:>8.3f} s{100 * error:>7.1f} %")
    wrong = [
        f"{one['plan']} and {other['plan']}"
        for one, other in combinations(results.cases, 2)
        if abs(one["predicted_seconds"] / other["predicted_seconds"] - 1) > APART
        and (one["predicted_seconds"] < other["predicted_seconds"]) != (one["step_seconds"] < other["step_seconds"])
    ]
    print(f"measured the other way round: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
