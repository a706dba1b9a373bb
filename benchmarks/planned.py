"""Are plans as fast, one beside the other, as the planner says?

    python benchmarks/planned.py [--plans devices] [--tokens 256] [--turns 4] [--output FILE.json]

`evenpipe profile --hardware` measures this machine, and for each of some choices the planner's best plan is taken:

    devices     schedules and vocabulary modes of two devices
    axes        a Llama on two devices of two processes: replicas, tensor ranks, context ranks, slices
    experts     a mixture of experts on two devices of two replicas, which share their experts or not

Then passes are measured in turns on all processes, with one or two of them to a device, as `evenpipe profile
CONFIG.toml --hardware` does, and some steps of each plan run, with sums over replicas and the optimizer: a machine that
others share changes its speed from one minute to the next. Printed are medians and the planner's times, and the pairs
of plans whose predicted times differ by more than 5 % and that are measured the other way round.
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
import torch
import torch.distributed as dist
from common import configuration, option, token_ids

from evenpipe import Pipeline, initialise_worker, launch
from evenpipe.costs.measured_passes import MeasuredPasses
from evenpipe.model import describe
from evenpipe.plan.configuration import LEAST, Configuration
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.evaluation import timed
from evenpipe.plan.problem import problem_of
from evenpipe.plan.space import Space
from evenpipe.train.config import Config
from evenpipe.train.hardware_profile import (
    measure_passes,
    passes_from,
    pipelines_to_measure,
    profile_hardware,
)
from evenpipe.train.input_sections import ModelConfig
from evenpipe.train.planned_config import configured_model


def choice(
    schedule: str = "1f1b",
    vocabulary: str = "vocab-2",
    *,
    size: int = 1,
    dp: int = 1,
    ep: int = 1,
    tp: int = 1,
    cp: int = 1,
    slices: int = 1,
    checkpointing: str = LEAST,
) -> Space:
    """Two devices with one schedule, mode and microbatch size, and one size of each other axis."""
    return Space(
        pp=(2,),
        dp=(dp,),
        ep=(ep,),
        tp=(tp,),
        cp=(cp,),
        zero=(0,),
        schedules=(schedule,),
        vocabularies=(vocabulary,),
        microbatch_sizes=(size,),
        slices=(slices,),
        checkpointing=(checkpointing,),
    )


CHOICES = {
    "devices": {
        "balanced": choice(),
        "first-last": choice("1f1b", "first-last"),
        "redistribute": choice("1f1b", "redistribute"),
        "recomputed": choice("1f1b", "first-last", checkpointing="full"),
        "zero bubble": choice("zb-h1"),
        "two stages": choice("zbv"),
        "large microbatches": choice(size=4),
    },
    "axes": {
        "replicas": choice(dp=2),
        "replicas, whole": choice("1f1b", "first-last", dp=2),
        "tensor ranks": choice(tp=2),
        "context ranks": choice(cp=2),
        "context and slices": choice(cp=2, slices=2),
    },
    "experts": {
        "replicas": choice(dp=2),
        "shared": choice(dp=2, ep=2),
        "shared, whole": choice("1f1b", "first-last", dp=2, ep=2),
        "shared, recomputed": choice(dp=2, ep=2, checkpointing="full"),
        "shared, zero bubble": choice("zb-h1", dp=2, ep=2),
    },
}
"""Set -> name -> what the search may choose: one plan each."""
PROCESSES = {"devices": 2, "axes": 4, "experts": 4}
"""What the plans of a set are for."""
APART = 0.05
"""Plans whose predicted times differ by more must be measured in the same order."""
PARTS = ("pipeline_seconds", "end_seconds", "seconds")
"""Of a step: passes with the sums over replicas beside them, the rest of these sums and the optimizer, and all."""


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    tokens: int = option(256, "of a sequence")
    vocabulary: int = option(16384, "rows of embedding and output layer")
    experts: int = option(16, "of a layer of the mixture, four for each token")
    sequences: int = option(8, "of a step")
    turns: int = option(4, "of passes and of all plans, one after the other")
    profiled_steps: int = option(2, "that passes are taken from, for every form of backward, in each turn")
    profiled_warm_up: int = option(2, "steps of every form that do not count")
    repetitions: int = option(3, "measured steps of a plan in each turn")
    warm_up: int = option(3, "steps of a turn that do not count: memory that another plan gave back is new to them")


def base_of(settings: Settings, plans: str) -> Config:
    """Training of the model of a set."""
    base = configuration(settings, settings.vocabulary)
    if plans != "experts":
        return base
    heads, width = settings.hidden_size // 64, settings.hidden_size
    mixture = {
        "vocab_size": settings.vocabulary,
        "hidden_size": width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts": settings.experts,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": width,
        "tie_word_embeddings": False,
    }
    return replace(base, model=ModelConfig(architecture="qwen3_moe", config=mixture, self_check=False))


def measure_steps(
    settings: Settings, base: Config, plans: dict[str, Configuration]
) -> dict[str, list[tuple[float, float]]]:
    """On every process: seconds of passes and of the rest of some steps of each plan."""
    initialise_worker()
    model, seconds = configured_model(base), {}
    for name, plan in plans.items():
        pipeline = Pipeline(model, recipe=plan.recipe, self_check=False)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-5, fused=True)
        ids = token_ids(settings, settings.vocabulary, settings.sequences // plan.recipe.parallelism.dp)
        gc.collect()
        steps = []
        for _ in range(settings.warm_up + settings.repetitions):
            pipeline.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            pipeline.step(ids)
            stepped = time.perf_counter()
            optimizer.step()
            dist.barrier()
            steps.append((stepped - started, time.perf_counter() - stepped))
        seconds[name] = steps[settings.warm_up :]
        pipeline.close()
    return seconds


def measure(
    settings: Settings, base: Config, plans: dict[str, Configuration], processes: int
) -> tuple[list[MeasuredPasses], dict[str, list[tuple[float, float]]]]:
    """Return passes, and by plan the seconds of each step: until its slowest process has run its passes, and after."""
    sizes = sorted({plan.recipe.batch.microbatch_size for plan in plans.values()})
    parallelisms = [plan.recipe.parallelism for plan in plans.values()]
    pipelines = []
    for tensor, context, exchange in sorted({(one.tp, one.cp, one.context_exchange) for one in parallelisms}):
        ranks = {"tp": tensor, "cp": context, "context_exchange": exchange}
        cut = replace(base.pipeline, processes=processes, **ranks)
        pipelines += pipelines_to_measure(replace(base, pipeline=cut), processes, sizes)
    found: list[dict[str, list[dict[str, Any]]]] = [{name: [] for name in one} for one in pipelines]
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for _ in range(settings.turns):
        measured = settings.profiled_steps, settings.profiled_warm_up
        profiled = launch(measure_passes, pipelines, *measured, processes=processes, torch_device="cpu")[0]
        for results, of_turn in zip(found, profiled, strict=True):
            for name, result in of_turn.items():
                results[name].append(result)
        taken = launch(measure_steps, settings, base, plans, processes=processes, torch_device="cpu")
        for name, of_plan in steps.items():
            for of_processes in zip(*(one[name] for one in taken), strict=True):
                stepped = max(one for one, _ in of_processes)
                of_plan.append((stepped, max(map(sum, of_processes)) - stepped))
    passes = [passes_from(of, one["sharded"], "cpu") for one, of in zip(pipelines, found, strict=True)]
    return passes, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", choices=CHOICES, default="devices")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings, processes = common.settings_of(given, Settings), PROCESSES[given.plans]
    base = base_of(settings, given.plans)
    hardware = profile_hardware(processes)
    problem = problem_of(
        describe(configured_model(base)),
        hardware,
        gpus=processes,
        sequence=settings.tokens,
        sequences_per_step=settings.sequences,
        dtype="fp32",
    )
    plans = {}
    for name, space in CHOICES[given.plans].items():
        found = search_configurations(problem, space, count=1, workers=1)
        assert found.best is not None, f"{name}: nothing fits"
        plans[name] = found.best.configuration
    passes, steps = measure(settings, base, plans, processes)
    problem = replace(problem, hardware=replace(hardware, passes=tuple(passes)), known={})
    results = common.Results(settings, given.output, plans=given.plans, hardware=problem.hardware.to_dict())
    print(f"{'plan':<20}{'configuration':<40}{'predicted':>11}{'measured':>11}{'error':>9}{'passes':>9}{'rest':>9}")
    for name, plan in plans.items():
        taken = [(*step, sum(step)) for step in steps[name]]
        measured = dict(zip(PARTS, map(statistics.median, zip(*taken, strict=True)), strict=True))
        evaluation = timed(problem, plan)
        predicted = {part: getattr(evaluation, part) for part in PARTS}
        results.add(
            {
                "plan": name,
                "configuration": plan.name,
                "predicted": predicted,
                "measured": measured,
                "steps": taken,
            }
        )
        errors = [f"{100 * (predicted[part] / measured[part] - 1):.1f} %" for part in ("seconds", "pipeline_seconds")]
        rest = f"{predicted['end_seconds'] - measured['end_seconds']:+.3f} s"
        print(
            f"{name:<20}{plan.name:<40}{predicted['seconds']:>9.3f} s{measured['seconds']:>9.3f} s"
            f"{errors[0]:>9}{errors[1]:>9}{rest:>9}"
        )
    wrong = [
        f"{one['plan']} and {other['plan']}"
        for one, other in combinations(results.cases, 2)
        if abs(one["predicted"]["seconds"] / other["predicted"]["seconds"] - 1) > APART
        and (one["predicted"]["seconds"] < other["predicted"]["seconds"])
        != (one["measured"]["seconds"] < other["measured"]["seconds"])
    ]
    print(f"measured the other way round: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
