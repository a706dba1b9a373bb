"""What do tensor ranks cost on this machine, compared with more devices or replicas?

    python benchmarks/tensor_ranks.py [--ratio 8] [--schedule 1f1b] [--output FILE.json]

The same model and batch on the same processes, in layouts of devices x tensor ranks x replicas, as `first-last` and as
`vocab-2`: interleaved steps, one thread each. Printed are medians:

    step        seconds of a step, the slowest process
    vs devices  how many times as fast as with all processes as devices, in the same mode
    held        MiB of parameters on the process that holds the most

Everything runs on the CPU, where processes share cores and exchange tensors through memory, so figures say little about
GPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of torch about torch

import balance
import common
import torch.distributed as dist
from common import option, token_ids
from transformers import LlamaConfig

from evenpipe import Pipeline, launch
from evenpipe.schedule import SCHEDULES

MODES = ("first-last", "vocab-2")


@dataclass(frozen=True, kw_only=True)
class Settings(balance.Settings):
    """What is measured."""

    processes: int = option(4, "of all layouts; an even number")


@dataclass(frozen=True)
class Layout:
    """How many devices, tensor ranks and replicas."""

    devices: int
    ranks: int = 1
    replicas: int = 1

    def __str__(self) -> str:
        return f"{self.devices} x {self.ranks}" + (f", dp {self.replicas}" if self.replicas > 1 else "")


def layouts(processes: int) -> list[Layout]:
    """All processes as devices, half of them with two tensor ranks each or twice, and all as tensor ranks."""
    half = processes // 2
    return [Layout(processes), Layout(half, ranks=2), Layout(half, replicas=2), Layout(1, ranks=processes)]


def measure(config: LlamaConfig, schedule: str, settings: Settings) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the seconds of interleaved steps, by layout and mode, the last loss, and the parameters held."""
    arms = {
        (layout, mode): Pipeline(
            config,
            schedule=schedule,
            vocabulary=mode,
            microbatches=settings.microbatches // layout.replicas,
            tp=layout.ranks,
            dp=layout.replicas,
            self_check=False,
        )
        for layout in layouts(settings.processes)
        for mode in MODES
    }
    ids = token_ids(settings, config.vocab_size, settings.microbatches)
    found: dict[tuple[str, str], dict[str, Any]] = {
        (str(layout), mode): {
            "seconds": [],
            "held": sum(one.numel() * one.element_size() for one in arm.parameters()),
        }
        for (layout, mode), arm in arms.items()
    }
    for repetition in range(settings.warm_up + settings.repetitions):
        if repetition == settings.warm_up:
            gc.collect()
            gc.freeze()
        for (layout, mode), arm in arms.items():
            own = ids.chunk(layout.replicas)[arm.replica]
            arm.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            loss = arm.step(own).loss
            dist.barrier()
            if repetition >= settings.warm_up:
                found[str(layout), mode]["seconds"].append(time.perf_counter() - started)
                found[str(layout), mode]["loss"] = loss
    return found


def run_mode(mode: str, measured: list[dict[tuple[str, str], dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of one mode."""
    arms: dict[str, dict[str, Any]] = {}
    for layout, its_mode in measured[0]:
        if its_mode != mode:
            continue
        of_processes = [one[layout, mode] for one in measured]
        steps = [max(step) for step in zip(*(one["seconds"] for one in of_processes), strict=True)]
        arms[layout] = {
            "step_seconds": statistics.median(steps),
            "steps": steps,
            "held_bytes": max(one["held"] for one in of_processes),
            "loss": of_processes[0]["loss"],
        }
    first = next(iter(arms.values()))
    for arm in arms.values():
        pairs = zip(first["steps"], arm["steps"], strict=True)
        arm["vs_devices"] = statistics.median(one / other for one, other in pairs)
    return {"mode": mode, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", metavar="NAME")
    parser.add_argument("--ratio", type=float, default=8.0, help="cost of the output layer over that of one layer")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    config = balance.model_config(settings, given.ratio)
    results = common.Results(settings, given.output, schedule=given.schedule, vocabulary=config.vocab_size)
    measured = launch(measure, config, given.schedule, settings, processes=settings.processes, torch_device="cpu")
    print(f"{given.schedule}, output layer = {given.ratio:g} transformer layers (vocabulary {config.vocab_size:,})")
    print(f"{'devices x ranks':<18}{'vocabulary':<12}{'step s':>8}{'vs devices':>12}{'held MiB':>10}{'loss':>12}")
    for mode in MODES:
        case = run_mode(mode, measured)
        results.add(case)
        for name, arm in case["arms"].items():
            print(
                f"{name:<18}{mode:<12}{arm['step_seconds']:>8.2f}{arm['vs_devices']:>12.2f}"
                f"{arm['held_bytes'] / 2**20:>10.0f}{arm['loss']:>12.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
