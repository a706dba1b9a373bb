"""Does a step take as long as was predicted, on this machine?

    python benchmarks/measured.py [--microbatches 1 2 4 8 16] [--repetitions 7] [--output FILE.json]

For every schedule and vocabulary mode `evenpipe profile` measures the costs, at one number of microbatches; then steps
of every number of microbatches run in turn, traced, and each is compared with the simulation of the program that it
ran. The last cases are an order made bad on purpose: C stands right behind S, so that every device waits for the
statistics at once. Printed are medians:

    step        seconds from the first start of a pass to the last end of one, measured and predicted
    error       of the prediction, in percent of the measured step
    idle        seconds that each device waits, measured (from its waits) and predicted
    error       the largest difference of any device, in percent of the measured step
    untraced    seconds of the first process for a step that is not traced, and for one that is

Everything runs on the CPU, one thread per process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from evenpipe.plan.measured import compare
from evenpipe.runtime import initialise_worker, launch
from evenpipe.runtime.trace import machine
from evenpipe.schedule import Costs, Kind, Order, Pass, plan_order
from evenpipe.schedule.trace_file import trace_from_dict, trace_to_dict
from evenpipe.train.build import build_pipeline
from evenpipe.train.config import Config, DataConfig, ModelConfig, PipelineConfig, TokenizerConfig
from evenpipe.train.profile import profile

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half")
MODES = ("first-last", "vocab-2")
BAD = "C right behind S"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    processes: int
    layers: int
    hidden_size: int
    vocabulary: int
    tokens: int
    """Per microbatch, one sequence."""
    profiled_microbatches: int
    profiled_steps: int
    repetitions: int
    warm_up: int


def configuration(settings: Settings, schedule: str, mode: str, microbatches: int) -> Config:
    width = settings.hidden_size
    model = {
        "hidden_size": width,
        "intermediate_size": int(2.75 * width) // 64 * 64,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": settings.tokens,
        "vocab_size": settings.vocabulary,
        "tie_word_embeddings": False,
    }
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
            generator = torch.Generator().manual_seed(repetition)
            ids = torch.randint(0, settings.vocabulary, (size, settings.tokens), generator=generator)
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
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a microbatch")
    parser.add_argument("--profiled-microbatches", type=int, default=8)
    parser.add_argument("--profile-each", action="store_true", help="a profile for every number of microbatches")
    parser.add_argument("--profiled-steps", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--no-bad-order", action="store_true", help="leave out the order made bad on purpose")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    given = parser.parse_args()
    settings = Settings(
        processes=given.processes,
        layers=given.layers,
        hidden_size=given.hidden_size,
        vocabulary=given.vocabulary,
        tokens=given.tokens,
        profiled_microbatches=given.profiled_microbatches,
        profiled_steps=given.profiled_steps,
        repetitions=given.repetitions,
        warm_up=given.warm_up,
    )
    cases = [(schedule, mode) for schedule in given.schedules for mode in given.modes]
    if not given.no_bad_order:
        cases.append((BAD, "vocab-2"))
    results: dict[str, Any] = {"settings": asdict(settings), **machine(torch.device("cpu")), "cases": []}
    head = ("step s", "predicted", "error", "idle s", "predicted", "error", "untraced", "traced")
    print("{:<17}{:<12}{:>3}{:>9}{:>10}{:>9}{:>15}{:>15}{:>9}{:>9}{:>8}".format("schedule", "vocabulary", "m", *head))
    groups = [[size] for size in given.microbatches] if given.profile_each else [given.microbatches]
    for (schedule, mode), sizes in product(cases, groups):
        profiled = sizes[0] if given.profile_each else given.profiled_microbatches
        for result in run_case(replace(settings, profiled_microbatches=profiled), schedule, mode, sizes):
            results["cases"].append(result)
            print_case(result)
        if given.output is not None:
            given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name in ("step_error", "idle_error"):
        print(f"largest {name.replace('_', ' ')}: {100 * max(abs(one[name]) for one in results['cases']):.1f} %")


if __name__ == "__main__":
    main()
