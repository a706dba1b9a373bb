"""How much does a balanced vocabulary gain, on this machine, in every schedule?

    python benchmarks/balance.py [--schedules 1f1b zbv] [--ratios 2 8 20] [--processes 4] [--output FILE.json]

For each ratio (cost of the output layer over that of one transformer layer) and each schedule the same model runs one
training step after the other, in turn, as `first-last`, `vocab-1` and `vocab-2`: same processes, same weights, same
data, one thread each. With 1F1B also as `redistribute`, `interlaced`, and in torch's own `Schedule1F1B`. Printed are
medians:

    step        seconds of a step, the slowest process
    predicted   seconds that the simulator says, from the times that passes took in another step
    vs first    how many times as fast as first-last in the same schedule
    ideal       the same for a pipeline without ramp and communication
    vs torch    how many times as fast as torch's Schedule1F1B
    busy        processor time inside passes of each device, and by how much the busiest exceeds the idlest
    peak        highest resident memory of each process, in a run of its own, with --memory

Ideal counts the busiest device's work only, layers and output layer. Everything runs on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of torch about torch

import common
import torch.distributed as dist
from common import llama, option, token_ids
from torch.distributed.pipelining import Schedule1F1B
from torch_pipeline import TorchPipeline
from transformers import LlamaConfig

from evenpipe import Pipeline, launch
from evenpipe.compare.measured import compare
from evenpipe.model import describe, layer_flops
from evenpipe.schedule import SCHEDULES

MODES = ("first-last", "vocab-1", "vocab-2")
TORCH = "torch 1F1B"
MORE = {"1f1b": ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2", TORCH)}
"""Arms of a schedule; of all others they are `MODES`."""


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    microbatches: int = option(8, "of a step")
    repetitions: int = option(8, "measured steps of each arm")
    warm_up: int = option(1, "steps that do not count")


def model_config(settings: Settings, ratio: float) -> LlamaConfig:
    """A Llama whose output layer costs `ratio` times one of its layers, in FLOPs."""
    config = llama(settings, 64)  # until it is known how many rows make the ratio
    layer = layer_flops(describe(config), settings.tokens)[0]
    config.vocab_size = round(ratio * layer / (2 * settings.hidden_size) / 64) * 64
    return config


# --- measuring -------------------------------------------------------------------------------------------


def build(schedule: str, mode: str, config: LlamaConfig, settings: Settings) -> Pipeline | TorchPipeline:
    if mode == TORCH:
        return TorchPipeline(config, Schedule1F1B, settings.microbatches)
    return Pipeline(config, schedule=schedule, vocabulary=mode, microbatches=settings.microbatches, self_check=False)


def measure_steps(schedule: str, config: LlamaConfig, settings: Settings) -> dict[str, dict[str, Any]]:
    """Interleaved steps of all arms in one set of processes: seconds, busy seconds and the loss of every step; on the
    first process also the prediction from one more step, which is traced."""
    arms = {name: build(schedule, name, config, settings) for name in MORE.get(schedule, MODES)}
    ids = token_ids(settings, config.vocab_size, settings.microbatches)
    result: dict[str, dict[str, Any]] = {name: {"seconds": [], "busy": [], "loss": []} for name in arms}
    for repetition in range(settings.warm_up + settings.repetitions):
        if repetition == settings.warm_up:
            gc.collect()
            gc.freeze()
        for name, arm in arms.items():
            arm.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            done = arm.step(ids)
            dist.barrier()
            seconds = time.perf_counter() - started
            if repetition < settings.warm_up:
                continue
            figures = result[name]
            figures["seconds"].append(seconds)
            if isinstance(arm, Pipeline):
                figures["busy"].append(done.record.busy)
                figures["loss"].append(done.loss)
            else:
                figures["loss"].append(done)
    for name, arm in arms.items():
        if isinstance(arm, Pipeline):
            trace = arm.trace(arm.step(ids, record_passes=True))
            result[name]["predicted"] = None if trace is None else compare(trace).to_dict()["predicted"]
    return result


def measure_memory(schedule: str, mode: str, config: LlamaConfig, settings: Settings) -> int:
    """Highest resident memory of this process, in bytes, over building and two steps of one arm."""
    arm = build(schedule, mode, config, settings)
    ids = token_ids(settings, config.vocab_size, settings.microbatches)
    for _ in range(2):
        arm.step(ids)
        arm.zero_grad()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status["VmHWM"].split()[0]) * 1024


def ideal(ratio: float, mode: str, settings: Settings) -> float:
    """Work of the busiest device per microbatch, in layers."""
    layers, devices = settings.layers, settings.processes
    if mode in ("first-last", TORCH):
        return -(-layers // devices) + ratio
    if mode == "redistribute":
        return min(max(-(-(layers - last) // max(1, devices - 1)), last + ratio) for last in range(layers + 1))
    return (layers + ratio) / devices


def run_case(schedule: str, ratio: float, settings: Settings, *, memory: bool) -> dict[str, Any]:
    config = model_config(settings, ratio)
    measured = launch(measure_steps, schedule, config, settings, processes=settings.processes, torch_device="cpu")
    arms: dict[str, dict[str, Any]] = {}
    for name in measured[0]:
        steps = [max(step) for step in zip(*(one[name]["seconds"] for one in measured), strict=True)]
        arm: dict[str, Any] = {
            "step_seconds": statistics.median(steps),
            "steps": steps,
            "losses": [loss for one in measured for loss in one[name]["loss"] if loss is not None][:1],
            "ideal": ideal(ratio, "first-last", settings) / ideal(ratio, name, settings),
        }
        if name != TORCH:
            busy = [statistics.median(one[name]["busy"]) for one in measured]
            arm |= {"busy_seconds": busy, "busy_spread": max(busy) / min(busy) - 1}
            arm["predicted_seconds"] = measured[0][name]["predicted"]
        if memory:
            arm["peak_bytes"] = launch(
                measure_memory, schedule, name, config, settings, processes=settings.processes, torch_device="cpu"
            )
        arms[name] = arm
    for arm in arms.values():
        for peer, key in (("first-last", "vs_first_last"), (TORCH, "vs_torch"), ("redistribute", "vs_redistribute")):
            if peer in arms:
                pairs = zip(arms[peer]["steps"], arm["steps"], strict=True)
                arm[key] = statistics.median(one / other for one, other in pairs)
    return {"ratio": ratio, "schedule": schedule, "vocabulary": config.vocab_size, "arms": arms}


HEADER = ("step s", "predicted", "vs first", "ideal", "vs redist.", "vs torch", "busy s", "spread", "peak MiB")
LINE = "{:<13}{:<13}{:>8}{:>11}{:>10}{:>8}{:>12}{:>10}{:>16}{:>8}{:>16}"


def print_case(found: dict[str, Any]) -> None:
    for name, arm in found["arms"].items():
        spread = arm.get("busy_spread")
        cells = [f"{arm['step_seconds']:.2f}"]
        cells += [
            "" if value is None else f"{value:.2f}"
            for value in (arm.get("predicted_seconds"), arm["vs_first_last"], arm["ideal"])
        ]
        cells += ["" if key not in arm else f"{arm[key]:.2f}" for key in ("vs_redistribute", "vs_torch")]
        cells.append(" ".join(f"{value:.2f}" for value in arm.get("busy_seconds", [])))
        cells.append("" if spread is None else f"{100 * spread:.1f}%")
        cells.append(" ".join(f"{value / 2**20:.0f}" for value in arm.get("peak_bytes", [])))
        print(LINE.format(found["schedule"], name, *cells), flush=True)


def print_summary(cases: list[dict[str, Any]]) -> None:
    """The worst of all schedules and ratios."""
    for mode in MODES[1:]:
        spread = max(cases, key=lambda found: found["arms"][mode]["busy_spread"])
        slowest = min(cases, key=lambda found: found["arms"][mode]["vs_first_last"])
        print(
            f"{mode}: busy time differs by at most {100 * spread['arms'][mode]['busy_spread']:.1f} %"
            f" ({spread['schedule']}, ratio {spread['ratio']:g});"
            f" at least {slowest['arms'][mode]['vs_first_last']:.2f} times as fast as first-last"
            f" ({slowest['schedule']}, ratio {slowest['ratio']:g})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 8.0, 20.0])
    parser.add_argument("--memory", action="store_true", help="measure peak memory too, in runs of their own")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output)
    for ratio in given.ratios:
        rows = model_config(settings, ratio).vocab_size
        print(f"\noutput layer = {ratio:g} transformer layers (vocabulary {rows:,})")
        print(LINE.format("", "", *HEADER))
        for schedule in given.schedules:
            found = run_case(schedule, ratio, settings, memory=given.memory)
            results.add(found)
            print_case(found)
    print()
    print_summary(results.cases)


if __name__ == "__main__":
    main()
