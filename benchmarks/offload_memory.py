"""Does memory fall when activations go to a file, and does it stay the same however many microbatches there are?

    python benchmarks/offload_memory.py [--schedules gpipe 1f1b] [--output FILE.json]

The same model runs with everything kept, and with everything on the host that lowers memory, whatever it takes
(`OffloadOptions(activations="all")`). For each process:

    grown       the most bytes that no file stands behind (RssAnon + RssShmem) in a step, less those before it
    predicted   the same from the estimator: the most bytes of tensors, less those behind the step
    step        median seconds
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import torch.distributed as dist
from common import llama, option, token_ids

from evenpipe import OffloadOptions, Pipeline, Recipe, launch
from evenpipe.costs.hardware import KNOWN
from evenpipe.host.memory import return_freed_memory
from evenpipe.memory.device import DeviceBytes
from evenpipe.memory.estimate import estimate
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.memory.programs import planned
from evenpipe.model import describe
from evenpipe.schedule import Order

VOCABULARY = 4096
MICROBATCHES = (8, 16, 32, 64)
SAMPLE_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    tokens: int = option(512, "of a microbatch, which is one sequence")
    repetitions: int = option(3, "measured steps")


def resident() -> int:
    """Bytes of this process that no file stands behind."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    lines = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class Sampler(threading.Thread):
    """Looks at resident memory again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(SAMPLE_SECONDS):
            self.most = max(self.most, resident())


def measure(settings: Settings, schedule: str, activations: str, microbatches: int) -> dict[str, Any]:
    """On every process."""
    return_freed_memory()  # with everything kept too, so that both are measured alike
    pipeline = Pipeline(
        llama(settings, VOCABULARY),
        schedule=schedule,
        microbatches=microbatches,
        offload=OffloadOptions(activations=activations),
        self_check=False,
    )
    if activations == "none":
        return_freed_memory()
    ids = token_ids(settings, VOCABULARY, microbatches)
    pipeline.step(ids)
    grown, seconds = 0, []
    for _ in range(settings.repetitions):
        dist.barrier()
        sampler, before, started = Sampler(), resident(), time.perf_counter()
        sampler.start()
        pipeline.step(ids)
        seconds.append(time.perf_counter() - started)
        sampler.over.set()
        sampler.join()
        grown = max(grown, sampler.most - before)
    pool = None if pipeline._executor.walker._activations is None else pipeline._executor.walker._activations.pool
    found = {
        "grown": grown,
        "seconds": statistics.median(seconds),
        "host": 0 if pool is None else pool.most_used,
        "order": pipeline.order.to_csv(),
        "vocabulary": pipeline.order.vocabulary.value,
    }
    pipeline.close()
    return found


def predicted(settings: Settings, order: Order) -> list[int]:
    """By device: the most bytes of tensors in a step, less those behind it; gradients are there already."""
    description = describe(llama(settings, VOCABULARY))
    recipe = Recipe.of(pp=settings.processes, schedule=order, sequence_length=settings.tokens)
    hardware = replace(KNOWN["H200"], name="this host", torch_device="cpu")
    found = estimate(description, recipe, hardware=hardware)
    plan = planned(description, recipe)
    grown = []
    for device in range(settings.processes):
        held = DeviceBytes.of(ModelBytes(description), plan, found.settings, device)
        held = replace(held, state=replace(held.state, optimizer=0, step_peak=0))
        memory = held.memory(plan, found.settings, device, curve=True)
        grown.append(memory.peak - memory.curve[-1])
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"], metavar="NAME")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output)
    print("schedule  microbatches  activations     grown MiB   predicted MiB  off  host MiB  step s")
    for schedule in given.schedules:
        for microbatches in MICROBATCHES:
            for activations in ("none", "all"):
                arguments = (settings, schedule, activations, microbatches)
                found = launch(measure, *arguments, processes=settings.processes)
                order = Order.from_csv(found[0]["order"], microbatches=microbatches, vocabulary=found[0]["vocabulary"])
                expected = predicted(settings, order)
                off = max((one["grown"] / most - 1 for one, most in zip(found, expected, strict=True)), key=abs)
                print(
                    f"{schedule:9} {microbatches:12}  {activations:11}"
                    f"{max(one['grown'] for one in found) / 2**20:13.1f} {max(expected) / 2**20:15.1f} {off:+.1%}"
                    f" {max(one['host'] for one in found) / 2**20:9.1f} {max(one['seconds'] for one in found):7.2f}",
                    flush=True,
                )
                results.add(
                    {
                        "schedule": schedule,
                        "microbatches": microbatches,
                        "activations": activations,
                        "predicted": expected,
                        **{name: [one[name] for one in found] for name in ("grown", "seconds", "host")},
                    }
                )


if __name__ == "__main__":
    main()
